"""Gradients and moments of parts against those of the whole: over microbatches, devices and workers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace import A2C, APPO, IMPALA, PPO, Actor, AsyncBatches, Inline, Learner, Rollout, SyncBatches
from headrace.envs.toy import Target
from headrace.targets import standardized

NORMALIZED = {"normalize_observation": True, "normalize_reward": True}
METHODS = {
    "a2c": A2C(hidden=(8,), normalize_advantage=True, **NORMALIZED),
    "a2c-gru": A2C(hidden=(8,), memory="gru", normalize_reward=True),
    "ppo": PPO(hidden=(8,), update_epochs=2, num_minibatches=2, clip_range_vf=0.2, ent_coef=0.01, **NORMALIZED),
    "impala": IMPALA(hidden=(8,), **NORMALIZED),
    "appo": APPO(hidden=(8,), **NORMALIZED),
}
ENV = Target(dimensions=2, length=3)


def descending(method: Any) -> Any:
    """The same method with plain gradient descent, which shows a gradient as it is."""

    @dataclasses.dataclass(frozen=True)
    class Descending(type(method)):  # type: ignore[misc]
        def optimizers(self, net: nn.Module) -> Any:
            groups = super().optimizers(net)
            return {name: torch.optim.SGD(each.param_groups[0]["params"], lr=0.1) for name, each in groups.items()}

    return Descending(**vars(method))


def rollouts(method: Any, count: int, num_envs: int = 6) -> list[Rollout]:
    """What an actor with the learner's first weights makes, reset rows included."""
    learner = Learner(method, ENV.spec, seed=1)
    with Actor(learner.method, learner.acting, ENV, range(num_envs), 8) as actor:
        return [actor.rollout(number).clone() for number in range(count)]


def learned(method: Any, given: Sequence[Rollout], **arguments: Any) -> Learner:
    learner = Learner(method, ENV.spec, seed=1, **arguments)
    for rollout in given:
        learner.update(learner.prepare(rollout))
    return learner


def assert_equal(learner: Learner, expected: Learner) -> None:
    for name, tensor in expected.net.state_dict().items():
        torch.testing.assert_close(learner.net.state_dict()[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_however_a_batch_is_cut_it_teaches_the_same(name: str) -> None:
    """In microbatches of any size and on several devices; weights, statistics and all."""
    method = descending(METHODS[name])
    given = rollouts(method, 3)
    whole = learned(method, given)
    for arguments in (
        {"microbatch_size": 9},
        {"microbatch_size": 17},
        {"devices": ("cpu",) * 2},
        {"devices": ("cpu",) * 4, "microbatch_size": 5},
    ):
        assert_equal(learned(method, given, **arguments), whole)
    twice = [learned(method, given, devices=("cpu", "cpu")).digest() for _ in range(2)]
    assert twice[0] == twice[1]
    fresh = Learner(method, ENV.spec, seed=1).net.state_dict()
    assert max(float((fresh[key] - held).abs().max()) for key, held in whole.net.state_dict().items()) > 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_all_replicas_are_equal_after_every_update(name: str) -> None:
    """Parameters and running statistics: what the second device computes with next is what the first does."""
    learner = learned(METHODS[name], rollouts(METHODS[name], 2), devices=("cpu", "cpu"))
    first, second = (replica.net.state_dict() for replica in learner._replicas)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("plan", "method"),
    [
        (SyncBatches(2, 6, 8, max_lag=1), "ppo"),
        (AsyncBatches(2, 6, 8, batch_rollouts=2, max_lag=2), "impala"),
    ],
    ids=["sync", "async"],
)
def test_several_devices_under_a_plan(plan: Any, method: str) -> None:
    """Inline, so that both runs take the same rollouts; actions of a normal distribution follow the weights closely."""
    told = []
    for devices in (("cpu",), ("cpu", "cpu"), ("cpu", "cpu")):
        learner = Learner(descending(METHODS[method]), ENV.spec, devices, seed=1)
        with closing(plan.run(learner, ENV, Inline(), env_steps=10**9)) as reports:
            for report in reports:
                if report.version == 3:
                    break
        told.append((learner, report))
    (one, first), (several, second), (again, _) = told
    assert again.digest() == several.digest()
    assert second.env_steps == first.env_steps
    for name, tensor in one.net.state_dict().items():
        torch.testing.assert_close(several.net.state_dict()[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    assert second.metrics["losses/entropy"] == pytest.approx(first.metrics["losses/entropy"], rel=1e-4)


@pytest.mark.parametrize("name", ["a2c", "impala"])
def test_gradients_of_unequal_parts_by_weight_are_that_of_the_whole(name: str) -> None:
    """The mean worked out in float64 by NumPy, from what each part sends."""
    method = dataclasses.replace(METHODS[name], **({"normalize_advantage": False} if name == "a2c" else {}))
    (rollout,) = rollouts(method, 1)
    rollout.valid[3:, 1] = False
    one, *others = (Learner(method, ENV.spec, seed=1) for _ in range(4))
    parts = [rollout.at(B=slice(low, high)) for low, high in ((0, 1), (1, 4), (4, 6))]
    whole, metrics = one.gradient(one.prepare(rollout))
    sent = [other.gradient(other.prepare(part)) for other, part in zip(others, parts, strict=True)]
    weights = np.array([float(gradient.weight) for gradient, _ in sent])
    assert len({*weights}) == 3
    mean = sum(gradient.flat.double().numpy() * weight for (gradient, _), weight in zip(sent, weights, strict=True))
    np.testing.assert_allclose(mean / weights.sum(), whole.flat, rtol=1e-5, atol=1e-6)
    assert weights.sum() == float(whole.weight)
    for key in metrics.keys() - {"losses/explained_variance"}:
        found = sum(told[key] * weight for (_, told), weight in zip(sent, weights, strict=True)) / weights.sum()
        assert found == pytest.approx(metrics[key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["observation", "reward"])
def test_moments_that_were_sent_move_statistics_as_the_batches_do(kind: str) -> None:
    """Against mean and variance of all rows at once, by NumPy."""
    method = A2C(hidden=(4,), normalize_observation=kind == "observation", normalize_reward=kind == "reward")
    given = rollouts(method, 3)
    owner, worker = (Learner(method, ENV.spec, seed=1) for _ in range(2))
    batches = [worker.prepare(rollout) for rollout in given]
    zeros = worker.prepare(worker.example(8, 6))
    for batch in batches:
        gradient, metrics = worker.gradient(batch)
        report = owner.apply(gradient, metrics, [worker.moments(batch)], zeros)
        assert report.metrics == metrics
    net: Any = owner.net
    if kind == "observation":
        moments = net.encoder.normalizer.moments
        rows = np.concatenate([rollout.observation[:-1][rollout.valid].double().numpy() for rollout in given])
    else:
        moments = net.reward_normalizer.moments
        rows = np.concatenate([batch.running_return[batch.weight > 0].numpy() for batch in batches])[:, None]
    assert int(moments.count) == len(rows)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-10)
    np.testing.assert_allclose(moments.variance, rows.var(0), rtol=1e-9)


class Meeting:
    """A mean over threads, in the order of ranks."""

    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size, timeout=30.0), [(torch.empty(0), 0.0)] * size

    def mean(self, rank: int) -> Callable[[Tensor, Tensor | float], Tensor]:
        def mean(vector: Tensor, weight: Tensor | float) -> Tensor:
            self.given[rank] = vector.clone(), float(weight)
            self.barrier.wait()
            total = sum(weight for _, weight in self.given)
            found = sum((vector * (weight / total) for vector, weight in self.given), torch.zeros_like(vector))
            self.barrier.wait()
            return found

        return mean


@pytest.mark.parametrize("parts", [1, 4])
def test_normalisation_over_workers_is_that_of_all_their_rows(parts: int) -> None:
    """By NumPy: minibatch j is what all workers hold of it, and some hold nothing that counts."""
    rng = np.random.default_rng(3)
    values = [rng.normal(5, 2, 8 * parts).astype(np.float32) * (rank + 1) for rank in range(3)]
    weights = [(rng.random(8 * parts) < share).astype(np.float32) for share in (1.0, 0.5, 0.0)]
    meeting = Meeting(3)

    def work(rank: int) -> np.ndarray[Any, Any]:
        mine = torch.from_numpy(values[rank]), torch.from_numpy(weights[rank])
        return standardized(*mine, meeting.mean(rank), parts).numpy()

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3)))
    for part in range(parts):
        rows = slice(8 * part, 8 * part + 8)
        counted = np.concatenate([v[rows][w[rows] > 0] for v, w in zip(values, weights, strict=True)]).astype(
            np.float64
        )
        expected = (counted - counted.mean()) / counted.std()
        given = np.concatenate([f[rows][w[rows] > 0] for f, w in zip(found, weights, strict=True)])
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)
