"""Normalisers through the whole plan: what moves when, on which placement, and what of it is saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import A2C, PPO, Actor, Box, Discrete, Env, Inline, Learner, Processes, Spec, evaluate
from headrace.envs.base import CheckedVectorEnv
from headrace.envs.toy import Recall, Scripted, Target
from headrace.normalizers import CLIP

pytestmark = pytest.mark.timeout(60)

ON = {"normalize_observation": True, "normalize_reward": True}


@pytest.fixture(scope="module")
def Drawn() -> Any:
    """Drawn(): observations drawn from N(100, 5), episodes of 50 steps, and a reward for the sign of the first one."""

    @dataclasses.dataclass(frozen=True)
    class Drawn(Env):
        @property
        def spec(self) -> Spec:
            return Spec(Box(np.full(3, -np.inf), np.full(3, np.inf)), Discrete(2))

        def make(self, indices: range) -> Any:
            return _Drawn(self.spec, indices)

    class _Drawn(CheckedVectorEnv):
        def __init__(self, spec: Spec, indices: range) -> None:
            super().__init__(len(indices), spec.action)
            self.indices = indices

        def _show(self) -> Any:
            self.shown = np.stack([rng.normal(100, 5, 3) for rng in self.rngs]).astype(np.float32)
            return self.shown

        def _reset(self, seed: int) -> Any:
            self.rngs = [np.random.default_rng((seed, index)) for index in self.indices]
            self.steps = 0
            return self._show()

        def _step(self, action: Any) -> Any:
            reward = (action == (self.shown[:, 0] > 100)).astype(np.float32)
            self.steps = (self.steps + 1) % 51
            if not self.steps:
                reward[:] = 0
            ended, never = np.full((2, len(reward)), [[self.steps == 50], [False]])
            return self._show(), reward, never, ended

    return Drawn


KINDS = {
    "target": (Target(dimensions=2, length=5, low=-3, high=9), {}),
    "recurrent": (Recall(length=4), {"memory": "gru"}),
}


PARTS = {"devices": ("cpu", "cpu"), "microbatch_size": 12}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("target", PARTS),
        ("recurrent", {}),
        pytest.param("target", {}, marks=pytest.mark.slow),
        pytest.param("recurrent", PARTS, marks=pytest.mark.slow),
    ],
    ids=["target-parts", "recurrent-whole", "target-whole", "recurrent-parts"],
)
def test_one_hash_on_all_placements(kind: str, arguments: Any, places: Any, train: Any, digest: Any) -> None:
    env, fields = KINDS[kind]
    method = PPO(hidden=(8,), num_minibatches=2, update_epochs=2, gamma=0.9, **ON, **fields)
    found = set()
    for place in places.values():
        learner = Learner(method, env.spec, seed=1, **arguments)
        run = train(method, env, place, learner=learner, updates=3, actors=2, max_lag=1)
        found.add(digest(learner))
        for replica in learner._replicas:  # where it learns on several devices, all know what the first one does
            for buffer, first in zip(replica.net.buffers(), learner.net.buffers(), strict=True):
                assert torch.equal(buffer, first)
        counted = sum(int(rollout.valid.sum()) for rollout in run.rollouts)
        assert learner.net.encoder.normalizer.moments.count == counted
        assert learner.net.reward_normalizer.moments.count == counted
    assert len(found) == 1


@pytest.mark.parametrize("actors", [1, 2])
def test_statistics_are_those_of_all_valid_rows_and_move_after_the_update(actors: int, train: Any) -> None:
    env = Target(dimensions=2, length=5, low=-3, high=9)
    method = A2C(hidden=(4,), gamma=0.0, gae_lambda=0.0, **ON)  # so a reward is its own return, and its own target
    run = train(method, env, Inline(), updates=4, actors=actors)
    for version, rollout in enumerate(run.rollouts):
        known, batch = run.weights[version], run.batches[version]
        assert torch.equal(rollout.version, torch.full_like(rollout.version, version))
        seen = [r.observation[:-1][r.valid].double().numpy() for r in run.rollouts[:version]]
        rewards = [r.reward[r.valid].double().numpy() for r in run.rollouts[:version]]
        scale = 1.0
        if version:
            every = np.concatenate(seen)
            np.testing.assert_allclose(known["encoder.normalizer.moments.mean"], every.mean(0), rtol=1e-12)
            np.testing.assert_allclose(
                known["encoder.normalizer.moments.squares"] / len(every), every.var(0), rtol=1e-9
            )
            scale = 1 / np.sqrt(np.concatenate(rewards).var() + 1e-8)
        # What it learns from knows of the batches before, and not of this one.
        assert float(known["reward_normalizer.scale"]) == pytest.approx(scale, rel=1e-6)
        expected = (rollout.reward.double().numpy() * scale).clip(-CLIP, CLIP)
        valid = rollout.valid.numpy()
        np.testing.assert_allclose(batch.target.numpy()[valid], expected[valid], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_LC_24_the_ratio_is_1_before_the_first_gradient_step(kind: str, train: Any) -> None:
    """Though the statistics have moved, and the actors act with what they came to."""
    env, fields = KINDS[kind]
    method = PPO(hidden=(16,), num_minibatches=1, update_epochs=1, learning_rate=1e-2, **ON, **fields)
    run = train(method, env, Inline(), updates=3, num_envs=4, actors=2, num_steps=32)
    moved = {tuple(weights["encoder.normalizer.shift"].tolist()) for weights in run.weights.values()}
    assert len(moved) == 4
    for report in run.reports:
        assert abs(report.metrics["losses/approx_kl"]) <= 1e-6
        assert report.metrics["losses/clipfrac"] == 0


def test_rewards_are_normalised_then_clipped_then_scaled_and_raw_in_reports(train: Any) -> None:
    env = Scripted([((8, -6, 0.1), "terminated")])
    fields = {"hidden": (4,), "gamma": 0.0, "gae_lambda": 0.0, "learning_rate": 0.0}
    for given, expected in (
        ({}, [8, -6, 0.1]),
        ({"reward_clip": 1.0}, [1, -1, 0.1]),
        ({"reward_scale": 0.5}, [4, -3, 0.05]),
        ({"reward_clip": 7.0, "reward_scale": 10.0}, [70, -60, 1]),
        ({"normalize_reward": True, "reward_clip": 9.0, "reward_scale": 0.5}, None),
    ):
        run = train(A2C(**fields, **given), env, Inline(), updates=2, num_envs=2, num_steps=8)
        targets = run.batches[1].target[run.rollouts[1].valid]
        if expected is None:
            deviation = np.sqrt(np.var([8, -6, 0.1]) + 1e-8)  # the returns are the rewards: γ = 0
            expected = [value / deviation * 0.5 for value in (8, -6, 0.1)]
        for value in targets.tolist():
            assert min(abs(value - one) for one in expected) < 1e-4, (given, value)
        assert run.reports[1].episode_returns.tolist() == pytest.approx([2.1] * 4)


def test_a_first_reward_beyond_ten_is_clipped(train: Any) -> None:
    env = Scripted([((500, -500), "terminated")])
    method = A2C(hidden=(4,), gamma=0.0, gae_lambda=0.0, normalize_reward=True)
    run = train(method, env, Inline(), updates=1, num_envs=2, num_steps=6)
    targets = run.batches[0].target[run.rollouts[0].valid]
    np.testing.assert_allclose(sorted(set(targets.round(decimals=3).tolist())), [-CLIP, CLIP], atol=1e-3)


@pytest.mark.parametrize("num_steps", [8, 3, 1])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_LC_43_the_accumulator_begins_anew_with_an_episode(end: Any, num_steps: int, train: Any) -> None:
    env = Scripted([((1, 1, 1), end)])
    method = A2C(hidden=(4,), gamma=0.9, normalize_reward=True)
    run = train(method, env, Inline(), updates=8 // num_steps + 1, num_envs=1, num_steps=num_steps)
    found = [
        value
        for rollout, batch in zip(run.rollouts, run.batches, strict=True)
        for value in batch.running_return[rollout.valid].tolist()
    ]
    np.testing.assert_allclose(found[:6], [1, 1.9, 2.71, 1, 1.9, 2.71], rtol=1e-12)
    if num_steps == 8:
        held = Learner(method, env.spec, seed=1)
        held.update(run.batches[0])
        moments = held.net.reward_normalizer.moments  # type: ignore[union-attr]
        assert round(float(moments.variance), 4) == 0.4878  # type: ignore[union-attr, arg-type]
        assert moments.count == 6  # type: ignore[union-attr]
    for report in run.reports:
        assert set(report.episode_returns.tolist()) <= {3.0}


def test_LC_43_all_24_steps_count_where_environments_reset_within_the_step(train: Any, place: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Same(Env):
        """Episodes of four steps, each of which rewards 1."""

        @property
        def spec(self) -> Spec:
            return Spec(Box(np.zeros(1), np.full(1, 9)), Discrete(2), shortest_truncation=4)

        def make(self, indices: range) -> Any:
            return _Same(self.spec, indices)

    class _Same(CheckedVectorEnv):
        def __init__(self, spec: Spec, indices: range) -> None:
            super().__init__(len(indices), spec.action)

        def _reset(self, seed: int) -> Any:
            self.steps = 0
            return np.zeros((self.num_envs, 1), np.float32)

        def _step(self, action: Any) -> Any:
            self.steps = (self.steps + 1) % 4
            ended, never = np.full((2, self.num_envs), [[self.steps == 0], [False]])
            shown = np.full((self.num_envs, 1), self.steps, np.float32)
            return shown, np.ones(self.num_envs, np.float32), never, ended

        def final_observation(self) -> Any:
            return np.full((self.num_envs, 1), 4, np.float32)

    method = A2C(hidden=(4,), gamma=0.9, normalize_reward=True, normalize_observation=True)
    run = train(method, Same(), place, updates=1, num_envs=2, actors=2, num_steps=12)
    moments = run.learner.net.reward_normalizer.moments
    assert moments.count == 24
    expected = np.array([1, 1.9, 2.71, 3.439])
    np.testing.assert_allclose(run.batches[0].running_return, np.tile(expected, 3)[:, None].repeat(2, 1), rtol=1e-12)
    assert float(moments.variance) == pytest.approx(expected.var(), rel=1e-12)
    seen = run.learner.net.encoder.normalizer.moments
    assert seen.count == 24
    assert float(seen.mean) == pytest.approx(1.5)
    assert run.reports[0].episode_returns.tolist() == [4.0] * 6


def test_LC_41_a_loaded_policy_acts_as_the_one_that_was_saved(train: Any, Drawn: Any, tmp_path: Path) -> None:
    method = A2C(hidden=(16,), **ON)
    run = train(method, Drawn(), Inline(), updates=10, num_envs=40, num_steps=50)
    learner = run.learner
    assert sum(rollout.valid.numel() for rollout in run.rollouts) == 20_000
    moments = learner.net.encoder.normalizer.moments
    assert moments.count == learner.env_steps
    np.testing.assert_allclose(moments.mean, [100] * 3, atol=0.2)
    np.testing.assert_allclose(moments.variance.sqrt(), [5] * 3, atol=0.2)

    before = {name: tensor.clone() for name, tensor in learner.net.state_dict().items()}
    evaluate(method, learner.net, Drawn(), 5)
    for name, tensor in learner.net.state_dict().items():
        assert torch.equal(tensor, before[name]), name

    torch.save(learner.state(), tmp_path / "state")  # and nothing else
    fixed = torch.from_numpy(np.random.default_rng(7).normal(100, 5, (100, 3))).float()
    noise = method.noise(learner.net, 1, 100, torch.Generator().manual_seed(3))[0]

    def load(method: Any, spec: Spec, path: Path, fixed: Any, noise: Any, lanes: Any) -> None:
        loaded = Learner(method, spec, seed=2)
        loaded.load_state(torch.load(path))
        with torch.no_grad():
            decision = method.act(loaded.net, fixed, None, noise)
        lanes[0].put({"decision": decision, "net": dict(loaded.net.state_dict())})

    with torch.no_grad():
        decision = method.act(learner.net, fixed, None, noise)
        like = {"decision": decision, "net": dict(learner.net.state_dict())}
        with Processes().crew(seed=1) as crew:
            lanes = crew.lanes(1, like=like)
            crew.start(load, method, Drawn().spec, tmp_path / "state", fixed, noise, lanes)
            (found,) = lanes.take_each()
            assert found["decision"].equal(decision)
            for name, tensor in before.items():
                assert torch.equal(found["net"][name], tensor), name
    assert 20 < decision.action.sum() < 80  # that many of each are no matter of course: without statistics tanh is full
    blind = Learner(method, Drawn().spec, seed=1)
    blind.net.load_state_dict({**before, **{k: v for k, v in blind.net.state_dict().items() if "normalizer" in k}})
    with torch.no_grad():
        assert not method.act(blind.net, fixed, None, noise).equal(decision)


def test_an_actor_moves_no_statistic(Drawn: Any) -> None:
    learner = Learner(A2C(hidden=(4,), **ON), Drawn().spec, seed=1)
    before = [buffer.clone() for buffer in learner.net.buffers()]
    with Actor(learner.method, learner.acting, Drawn(), range(3), 20) as actor:
        first, second = actor.rollout().discounted_return.clone(), actor.rollout().discounted_return  # type: ignore[union-attr]
    assert not first.any()
    assert second is not None
    assert second.any()
    assert all(map(torch.equal, before, learner.net.buffers()))
