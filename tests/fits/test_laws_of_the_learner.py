"""How a batch is computed changes nothing: in microbatches, on several devices, by several workers, or centrally.

Weights are compared after plain gradient descent, which shows a gradient as it is: Adam divides it by its own size,
and so turns the rounding of a gradient near 0 into a step.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn

from headrace import (
    A2C,
    PPO,
    Actor,
    Box,
    ConfigError,
    Discrete,
    Learner,
    Loss,
    Method,
    Rollout,
    Spec,
    Struct,
    Threads,
    role,
)
from headrace.envs.toy import Recall, Target
from headrace.struct import NAMESPACE

PATIENCE = 30.0
"""Seconds that a thread waits for the others."""


def vectors(size: int, bound: float = np.inf) -> Box:
    return Box(np.full(size, -bound), np.full(size, bound), torch.float32)


DISCRETE = Spec(observation=vectors(8), action=Discrete(4))
CONTINUOUS = Spec(observation=vectors(17), action=vectors(6, 1))

ON_POLICY = {
    "a2c": (A2C(normalize_advantage=True), DISCRETE),
    "a2c-gru": (A2C(memory="gru"), CONTINUOUS),
    "ppo": (PPO(update_epochs=2, num_minibatches=2, ent_coef=0.01), CONTINUOUS),
    "ppo-gru": (PPO(update_epochs=2, num_minibatches=2, memory="gru", clip_range_vf=0.1), DISCRETE),
}
REPLAYED = ["dqn", "r2d2", "sac", "td3"]


def descending(method: Method, rate: float = 0.3) -> Method:
    """The same method with plain gradient descent."""

    class Descending(type(method)):  # type: ignore[misc]
        def optimizers(self, net: nn.Module) -> Any:
            groups = super().optimizers(net).items()
            return {name: torch.optim.SGD(given.param_groups[0]["params"], lr=rate) for name, given in groups}

    return Descending(**vars(method))


class Case:
    """A method, its spaces, and random batches of both sizes."""

    def __init__(self, name: str, fits: Any, random_rollout: Any) -> None:
        self.name, self.random_rollout = name, random_rollout
        self.fit = None if name in ON_POLICY else fits(name)
        method, self.spec = ON_POLICY[name] if self.fit is None else (self.fit.method, self.fit.spec)
        # Without clipping, larger steps would make SAC and TD3 diverge, and rounding with them.
        self.method = descending(method, 0.3 if self.fit is None else 0.03)

    def learner(self, method: Method | None = None, **arguments: Any) -> Learner:
        return Learner(method or self.method, self.spec, **{"seed": 1, **arguments})

    def rollout(self, learner: Learner, seed: int = 0, num_envs: int = 5) -> Rollout:
        """With reset rows, and an environment in which no row counts."""
        rollout: Rollout = self.random_rollout(learner, 7, num_envs, seed)
        rollout.valid[:, 2] = False
        return rollout

    def batch(self, learner: Learner, seed: int = 0) -> Struct:
        if self.fit is None:
            return learner.prepare(self.rollout(learner, seed))
        batch: Struct = self.fit.batch(learner, seed, rows={"r2d2": 7, "vtrace": 5 * 16}.get(self.name, 35))
        return batch


@pytest.fixture
def case(request: pytest.FixtureRequest, fits: Any, random_rollout: Any) -> Case:
    return Case(request.param, fits, random_rollout)


everything = pytest.mark.parametrize("case", [*ON_POLICY, "vtrace", *REPLAYED], indirect=True)


def assert_equal(learner: Learner, expected: Learner) -> None:
    for name, tensor in expected.net.state_dict().items():
        torch.testing.assert_close(learner.net.state_dict()[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def assert_moved(learner: Learner, other: Learner, by: float = 1e-3) -> None:
    """What is compared has learned by far more than the tolerance."""
    states = learner.net.state_dict(), other.net.state_dict()
    assert max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0]) > by


# One learner


@pytest.mark.parametrize("size", [14, 50])
@everything
def test_microbatches_equal_the_big_batch(case: Case, size: int) -> None:
    one, other = case.learner(), case.learner(microbatch_size=size)
    for seed in range(2):
        batch = case.batch(one, seed)
        big, small = one.update(batch), other.update(batch)
        assert small.metrics == pytest.approx(big.metrics, rel=1e-4, abs=1e-5)
        assert small.samples_learned == big.samples_learned
    assert_equal(other, one)
    assert_moved(other, case.learner())


@pytest.mark.parametrize("arguments", [{"devices": ("cpu",) * 2}, {"devices": ("cpu",) * 3, "microbatch_size": 8}])
@everything
def test_several_devices_equal_one(case: Case, arguments: dict[str, Any]) -> None:
    one, other = case.learner(), case.learner(**arguments)
    for seed in range(3):  # the second finds the weights, and the third the target networks, that the others left
        batch = case.batch(one, seed)
        single, several = one.update(batch), other.update(batch)
        assert several.metrics == pytest.approx(single.metrics, rel=1e-4, abs=1e-5)
        assert several.samples_learned == single.samples_learned
    assert_equal(other, one)
    assert_moved(other, case.learner())


def test_a_loss_that_takes_means_itself_would_be_noticed(fits: Any, random_rollout: Any) -> None:
    """The laws above can fail: parts of unequal sizes are not equally heavy."""

    class Wrong(A2C):
        def losses(self, net: nn.Module, batch: Struct, step: int) -> Iterator[Loss]:
            for loss in super().losses(net, batch, step):
                yield Loss(loss.total / torch.as_tensor(loss.weight).clamp_min(1), 1.0)

    case = Case("a2c", fits, random_rollout)
    method = descending(Wrong())
    one, other = case.learner(method), case.learner(method, microbatch_size=14)
    batch = case.batch(one)
    one.update(batch)
    other.update(batch)
    with pytest.raises(AssertionError):
        assert_equal(other, one)


# Several workers


class Meeting:
    """A mean over threads: each waits for all, and all sum in the order of ranks."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._given: list[tuple[Tensor, float]] = [(torch.empty(0), 0.0)] * size

    def mean(self, rank: int) -> Callable[[Tensor, Tensor | float], Tensor]:
        def mean(vector: Tensor, weight: Tensor | float) -> Tensor:
            self._given[rank] = vector.clone(), float(weight)
            self._barrier.wait()
            total = sum(weight for _, weight in self._given)
            result = sum((vector * (weight / total) for vector, weight in self._given), torch.zeros_like(vector))
            self._barrier.wait()
            return result

        return mean

    def all(self, function: Callable[..., Any], *each: Sequence[Any]) -> list[Any]:
        """What function(rank, ...) returns in a thread per rank."""

        def guarded(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except BaseException:
                self._barrier.abort()  # nobody waits for a thread that failed
                raise

        size = self._barrier.parties
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(guarded, range(size), *each))


WORKERS = {
    "a2c": (A2C(normalize_advantage=True), DISCRETE),
    "a2c-gru": (A2C(memory="gru", normalize_advantage=True), CONTINUOUS),
    # One minibatch an epoch: each worker shuffles its own rows, so smaller ones would be other rows together.
    "ppo": (PPO(update_epochs=3, num_minibatches=1, ent_coef=0.01, target_kl=10.0), CONTINUOUS),
    "ppo-gru": (PPO(update_epochs=3, num_minibatches=1, memory="gru"), DISCRETE),
}


@pytest.mark.parametrize("name", WORKERS)
def test_two_workers_equal_one_with_both_their_batches(name: str, random_rollout: Any) -> None:
    given, spec = WORKERS[name]
    method = descending(given)
    one, *workers = (Learner(method, spec, seed=1) for _ in range(3))
    meeting = Meeting(2)
    for seed in range(2):
        whole = random_rollout(one, 7, 8, seed)
        whole.valid[:, 1] = False
        parts = [whole.at(B=slice(0, 3)), whole.at(B=slice(3, 8))]
        expected = one.update(one.prepare(whole))

        def work(rank: int, learner: Learner, part: Rollout) -> Any:
            return learner.update(learner.prepare(part), meeting.mean(rank))

        reports = meeting.all(work, workers, parts)
        assert reports[0].metrics.keys() == expected.metrics.keys()
        for key in expected.metrics.keys() - {"losses/explained_variance"}:  # each says that of its own batch
            assert reports[0].metrics[key] == reports[1].metrics[key]
            assert reports[0].metrics[key] == pytest.approx(expected.metrics[key], rel=1e-4, abs=1e-5)
    assert_equal(workers[0], one)
    for name, tensor in workers[0].net.state_dict().items():
        assert torch.equal(tensor, workers[1].net.state_dict()[name])
    assert_moved(one, Learner(method, spec, seed=1))


@pytest.mark.parametrize("cut", [3, 7])
def test_the_statistics_of_two_workers_are_those_of_one_with_both_their_batches(cut: int, random_rollout: Any) -> None:
    """The last worker may hold nothing but a column in which no row counts."""
    method = descending(A2C(normalize_observation=True, normalize_reward=True))
    one, *workers = (Learner(method, CONTINUOUS, seed=1) for _ in range(3))
    meeting = Meeting(2)
    for seed in range(3):
        whole = random_rollout(one, 7, 8, seed)
        whole.valid[:, 7] = False
        parts = [whole.at(B=slice(0, cut)), whole.at(B=slice(cut, 8))]
        one.update(one.prepare(whole))

        def work(rank: int, learner: Learner, part: Rollout) -> Any:
            return learner.update(learner.prepare(part), meeting.mean(rank))

        meeting.all(work, workers, parts)
    for worker in workers:
        for name, tensor in worker.net.state_dict().items():
            assert torch.equal(tensor, workers[0].net.state_dict()[name])
            if not name.endswith((".count", ".squares")):  # of a worker, on average
                torch.testing.assert_close(tensor, one.net.state_dict()[name], rtol=1e-5, atol=1e-5, msg=name)
    counts = [learner.net.encoder.normalizer.moments.count for learner in (one, workers[0])]  # type: ignore[union-attr]
    assert counts[0] == 2 * counts[1] > 100  # type: ignore[operator]
    assert_moved(one, Learner(method, CONTINUOUS, seed=1))


@pytest.mark.parametrize("case", REPLAYED, indirect=True)
def test_two_workers_equal_one_when_batches_are_replayed(case: Case) -> None:
    """The noise of the losses is given, since each worker would draw its own."""
    one = case.learner()

    class Settled(type(case.method)):  # type: ignore[misc]
        def minibatches(self, batch: Struct, rng: Any, mean: Any) -> Iterator[Struct]:
            yield batch

    workers = [case.learner(Settled(**vars(case.method))) for _ in range(2)]
    meeting = Meeting(2)
    for seed in range(2):
        draw = torch.Generator().set_state(one.state()["rng"])  # what the one learner is about to draw
        batch = case.batch(one, seed)
        (settled,) = case.method.minibatches(batch, draw, lambda vector, weight: vector)
        one.update(batch)
        cut = 3 if case.name == "r2d2" else 11
        parts = [settled.at(B=slice(0, cut)), settled.at(B=slice(cut, settled.size("B")))]

        def work(rank: int, learner: Learner, part: Struct) -> Any:
            return learner.update(part, meeting.mean(rank))

        meeting.all(work, workers, parts)
    assert_equal(workers[0], one)
    assert_equal(workers[1], one)
    assert_moved(one, case.learner())


@pytest.mark.parametrize("case", ["a2c", "a2c-gru", "vtrace", "dqn", "r2d2"], indirect=True)
def test_the_mean_of_gradients_is_the_gradient_of_all(case: Case) -> None:
    """By hand, as they move when gradients are what is sent; what is normalised needs a mean over all, as below."""
    method = case.method
    if isinstance(method, A2C):
        method = dataclasses.replace(method, normalize_advantage=False)
    one, *workers = (case.learner(method) for _ in range(3))
    whole = case.batch(one)
    cut = 2 if "B" in whole.axis_names and "T" in whole.axis_names else 11
    parts = [whole.at(B=slice(0, cut)), whole.at(B=slice(cut, whole.size("B")))]
    before = {name: tensor.clone() for name, tensor in one.net.state_dict().items()}
    expected, metrics = one.gradient(whole)
    gradients = [worker.gradient(part)[0] for worker, part in zip(workers, parts, strict=True)]
    total = sum(gradient.weight for gradient in gradients)
    mean = sum(gradient.flat * (gradient.weight / total).float() for gradient in gradients)
    assert torch.equal(total, expected.weight)
    assert isinstance(mean, Tensor)
    torch.testing.assert_close(mean, expected.flat, rtol=1e-6, atol=1e-6)
    assert expected.flat.abs().max() > 1e-3
    for name, tensor in one.net.state_dict().items():
        assert torch.equal(tensor, before[name])
    # Whoever applies it has made the step that an update makes, but for clipping.
    report = one.apply(expected.replace(flat=mean), metrics)
    assert report.version == one.gradient_steps == 1
    assert report.metrics == metrics
    assert_moved(one, workers[0])


@pytest.mark.parametrize("case", ["ppo", "sac", "td3"], indirect=True)
def test_several_steps_are_no_gradient_to_hand_on(case: Case) -> None:
    learner = case.learner()
    with pytest.raises(ConfigError, match=r"in \d+ minibatches and has \d optimizers; only one gradient step"):
        learner.gradient(case.batch(learner))


def test_a_group_of_a_crew_is_such_a_mean(random_rollout: Any) -> None:
    """Two roles, each with its own learner and its own half, end with the weights of one learner with both halves."""
    method, spec = PPO(update_epochs=2, num_minibatches=1, target_kl=10.0), DISCRETE
    one = Learner(descending(method), spec, seed=1)
    whole = random_rollout(one, 8, 6)
    halves = [whole.at(B=slice(0, 2)).clone(), whole.at(B=slice(2, 6)).clone()]
    one.update(one.prepare(whole))
    weights = torch.cat([tensor.flatten() for tensor in one.net.state_dict().values()])

    def learn(method: Method, spec: Spec, halves: list[Rollout], group: Any, lanes: Any) -> None:
        rank = role().rank
        learner = Learner(method, spec, seed=1)

        def mean(vector: Tensor, weight: Tensor | float) -> Tensor:
            result: Tensor = group.mean(vector, float(weight))
            return result

        learner.update(learner.prepare(halves[rank]), mean)
        lanes[rank].put(torch.cat([tensor.flatten() for tensor in learner.net.state_dict().values()]))

    with Threads().crew(seed=1) as crew:
        group = crew.group(2, like=torch.zeros(one.longest // 4))
        lanes = crew.lanes(2, like=weights)
        crew.start(learn, descending(method), spec, halves, group, lanes, copies=2)
        first, second = (learned.clone() for learned in lanes.take_each())
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights, rtol=1e-6, atol=1e-6)


# Acting


class Central:
    """One network that decides for several actors at once: a step waits until all have asked."""

    def __init__(self, method: Method, net: nn.Module, shares: Sequence[range]) -> None:
        self._method, self._net, self._shares = method, net, shares
        self._barrier = threading.Barrier(len(shares), timeout=PATIENCE)
        self._asked: list[Any] = [None] * len(shares)

    def decide(self, rank: int) -> Callable[..., Any]:
        mine = self._shares[rank]

        def decide(*question: Any) -> Any:
            self._asked[rank] = question
            if self._barrier.wait() == 0:
                joined = optree.tree_map(lambda *parts: torch.cat(parts), *self._asked, namespace=NAMESPACE)
                self._answer = self._method.act(self._net, *joined)
            self._barrier.wait()
            return self._answer.at(B=slice(mine.start, mine.stop))

        return decide


@everything
def test_acting_centrally_equals_acting_locally(case: Case) -> None:
    """Two actors of 3 and 2 environments, with a network each or with one for both; memory goes on between rollouts."""
    discrete = isinstance(case.spec.action, Discrete)
    env = Recall(length=4, cues=3) if discrete else Target(dimensions=6, length=4)
    method = case.method.behaviour(range(5), 5)  # whoever decides, the environments explore as they do
    learner = Learner(case.method, env.spec, seed=1)
    shares = [range(0, 3), range(3, 5)]
    central = Central(method, learner.acting, shares)

    def act(rank: int, decide: Any) -> list[Rollout]:
        behaving = case.method.behaviour(shares[rank], 5)
        with Actor(behaving, learner.acting, env, shares[rank], 9, (1,), rank, decide) as actor:
            return [actor.rollout(number).clone() for number in range(2)]

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(act, range(2), [central.decide(0), central.decide(1)]))
    apart = [act(rank, None) for rank in range(2)]
    for rollouts, expected in zip(together, apart, strict=True):
        for one, other in zip(rollouts, expected, strict=True):
            for (path, tensor), (_, alone) in zip(one.named_leaves(), other.named_leaves(), strict=True):
                torch.testing.assert_close(tensor, alone, rtol=1e-5, atol=1e-5, msg=path)
