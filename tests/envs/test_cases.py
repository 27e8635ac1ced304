"""Fault cases about spaces and actions: what the policy chose is what the environment is given, and what is counted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit
from torch import Tensor

from headrace import PPO, Actor, Box, ConfigError, Gymnasium, Inline, Learner, MultiDiscrete, SyncBatches, evaluate
from headrace.distributions import MultiCategorical, Normal, SquashedNormal, distribution_over


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Noting(gymnasium.Env[Any, Any]):
    """Keeps what it is shown and given; an episode is ten steps."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, action_space: gymnasium.Space[Any], seen: list[tuple[Any, Any]]) -> None:
        self.action_space, self.seen = action_space, seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert action.dtype == self.action_space.dtype
        assert self.action_space.contains(action), action
        self.seen.append((self.shown, np.array(action)))
        self.steps += 1
        return self._observe(), 0.0, self.steps == 10, False, {}

    def _observe(self) -> Any:
        self.shown = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self.shown


def noting(low: Any, high: Any, dtype: Any = np.float32) -> tuple[Gymnasium, list[tuple[Any, Any]]]:
    seen: list[tuple[Any, Any]] = []
    space = gymnasium.spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
    return Gymnasium(lambda: Noting(space, seen)), seen


# LC-22: the log-probability of a squashed action ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "std", "u", "expected"),
    [(10.0, 0.5, 9.5, 16.887914), (-12.0, 0.1, -12.0, 23.997352), (0.0, 1.0, 0.5, -0.80371)],
)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
def test_LC_22_log_probabilities_where_tanh_is_flat(
    mean: float, std: float, u: float, expected: float, dtype: torch.dtype, relative: float
) -> None:
    policy = SquashedNormal(Box(np.array([-1.0]), np.array([1.0]))).to(dtype)
    with torch.no_grad():
        policy.log_std.fill_(np.log(std))
    logits = torch.full((1, 1), mean, dtype=dtype, requires_grad=True)
    noise = torch.full((1, 1), (u - mean) / std, dtype=dtype)
    sampled, log_prob = policy.sample(logits, noise)
    assert log_prob.item() == pytest.approx(expected, rel=max(relative, 5e-6))  # the case has five digits
    assert sampled.item() == pytest.approx(u)
    evaluated, entropy = policy.evaluate(logits, torch.full((1, 1), u, dtype=dtype))
    assert evaluated.dtype == dtype
    assert evaluated.item() == pytest.approx(expected, rel=max(relative, 5e-6))
    for number in (log_prob, evaluated, entropy):
        gradients = torch.autograd.grad(number.sum(), (logits, policy.log_std), retain_graph=True)
        assert all(gradient.isfinite().all() for gradient in gradients)


# LC-26: actions in the units of the environment -----------------------------------------------------------------------


@pytest.mark.parametrize(("squashed", "chosen"), [(False, (-1.0, 0.0, 1.0)), (True, (-30.0, 0.0, 30.0))])
def test_LC_26_the_environment_sees_its_own_units(squashed: bool, chosen: tuple[float, ...]) -> None:
    env, seen = noting([300], [500])
    policy = distribution_over(env.spec.action, squashed)
    vector = env.make(range(3))
    vector.reset(seed=1)
    logits = torch.tensor(chosen).unsqueeze(-1)
    action, _ = policy.sample(logits, None)
    given = policy.environment_action(action)
    assert isinstance(given, Tensor)
    vector.step(given.numpy())
    vector.close()
    assert [action.item() for _, action in seen] == [300, 400, 500]


def test_LC_26_noise_is_clipped_where_the_environment_s_bounds_are() -> None:
    policy = Normal(Box(np.array([0.0]), np.array([1.0])))
    with torch.no_grad():
        policy.log_std.fill_(np.log(0.1))
    noise = policy.noise(10_000, rng=torch.Generator().manual_seed(0))
    action, _ = policy.sample(torch.full((10_000, 1), -1.0), noise)
    given = policy.environment_action(action)
    assert isinstance(given, Tensor)
    assert given.min() >= 0
    assert given.max() <= 1
    assert (given == 0).float().mean() >= 0.45
    assert len(given.unique()) > 4_000  # the other half is where the noise put it


def test_LC_26_bounds_of_each_dimension() -> None:
    policy = Normal(Box(np.array([0.0, -5.0]), np.array([1.0, 10.0])))
    given = [policy.environment_action(torch.full((2,), float(chosen))) for chosen in (-1, 0, 1)]
    assert [each.tolist() for each in given if isinstance(each, Tensor)] == [[0, -5], [0.5, 2.5], [1, 10]]


# LC-29: Discrete(3, start=-1) -----------------------------------------------------------------------------------------


class Signs(gymnasium.Env[Any, Any]):
    """Pays the action that it is given, which must be -1, 0 or 1; an episode is eight steps."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(3, start=-1)

    def __init__(self, seen: Path) -> None:
        self.seen = seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if action not in (-1, 0, 1):
            raise ValueError(f"{action} is none of -1, 0, 1")
        (self.seen / str(action)).touch()
        self.steps += 1
        return np.ones(1, np.float32), float(action), self.steps == 8, False, {}


def test_LC_29_a_discrete_space_that_starts_below_0(tmp_path: Path) -> None:
    env = Gymnasium(Signs, seen=tmp_path)  # files: what a role is started with is a copy
    method = PPO(hidden=(8,), learning_rate=0.02, update_epochs=2)
    learner = Learner(method, env.spec, seed=1)
    for _ in SyncBatches(num_envs=4, num_steps=32).run(learner, env, Inline(), env_steps=2_000):
        pass
    assert {file.name for file in tmp_path.iterdir()} == {"-1", "0", "1"}
    # Data holds actions numbered from 0; the environment is given those of its space.
    with torch.inference_mode():
        decision = method.act(learner.net, torch.ones(2, 1), None, None)
    assert decision.action.tolist() == [2, 2]
    assert decision.environment_action.tolist() == [1, 1]
    (tmp_path / "greedy").mkdir()
    env = Gymnasium(Signs, seen=tmp_path / "greedy")
    assert evaluate(method, learner.net, env, episodes=3).tolist() == [8, 8, 8]
    assert [file.name for file in (tmp_path / "greedy").iterdir()] == ["1"]


# LC-31: several integers at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7])
def test_LC_31_log_probability_and_entropy_of_two_components(batch: int) -> None:
    policy = MultiCategorical(MultiDiscrete((2, 3)))
    logits = torch.tensor([0.25, 0.75, 0.2, 0.3, 0.5]).log().expand(batch, 5) + 3.0  # only differences matter
    log_prob, entropy = policy.evaluate(logits, torch.tensor([1, 2]).expand(batch, 2))
    assert log_prob.shape == entropy.shape == (batch,)
    assert log_prob.tolist() == pytest.approx([-0.980829] * batch, abs=1e-6)
    assert entropy.tolist() == pytest.approx([1.591988] * batch, abs=1e-6)
    mode, of_mode = policy.sample(logits, None)
    assert isinstance(mode, Tensor)
    assert mode.tolist() == [[1, 2]] * batch
    assert of_mode.tolist() == pytest.approx([-0.980829] * batch, abs=1e-6)


# LC-47: the same seed, the same run -----------------------------------------------------------------------------------


def fingerprint(threads: int, seed: int) -> str:
    """The SHA-256 of parameters, optimizer state and metrics of 20 updates, with minibatches large enough to share."""
    env = Gymnasium("CartPole-v1")
    method = PPO(hidden=(64,), update_epochs=1, num_minibatches=1)
    learner = Learner(method, env.spec, seed=seed, threads=threads)
    found = hashlib.sha256()
    for report in SyncBatches(actors=2, num_envs=16, num_steps=64).run(learner, env, Inline(), env_steps=10**9):
        told = {field.name: getattr(report, field.name) for field in dataclasses.fields(report) if field.compare}
        found.update(json.dumps({name: np.asarray(value).tolist() for name, value in told.items()}).encode())
        if report.updates == 20:
            break
    state = learner.state()
    optimizers = [held for optimizer in state["optimizers"].values() for held in optimizer.values()]
    for held in (state["net"], *optimizers):
        for name, number in held.items():
            found.update(name.encode() + np.asarray(number).tobytes())
    assert learner.version == 20
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 4])
def test_LC_47_the_same_seed_is_the_same_run(threads: int) -> None:
    first = fingerprint(threads, seed=1)
    assert fingerprint(threads, seed=1) == first
    assert fingerprint(threads, seed=2) != first


# US-06: what a step is ------------------------------------------------------------------------------------------------


class Frames(gymnasium.Env[Any, Any]):
    """Leaves a byte in a file at each of its steps, and never ends."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)

    def __init__(self, counted: Path) -> None:
        self.file = counted.open("ab", buffering=0)

    def close(self) -> None:
        self.file.close()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.file.write(b".")
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Skip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Four frames a step, and says so."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.metadata = {**env.metadata, "frame_skip": 4}

    def step(self, action: Any) -> Any:
        rewards = 0.0
        for _ in range(4):
            observation, reward, terminated, truncated, info = self.env.step(action)
            rewards += float(reward)
        return observation, rewards, terminated, truncated, info


@pytest.mark.parametrize(("num_steps", "over"), [(46, 0), (50, 3 * 50)])
def test_US_06_environment_steps_frames_and_time_limits(num_steps: int, over: int, tmp_path: Path) -> None:
    counted = tmp_path / "frames"
    env = Gymnasium(Frames, counted=counted, wrappers=[Skip, lambda env: TimeLimit(env, 27)])
    learner = Learner(PPO(hidden=(4,), update_epochs=1, num_minibatches=1), env.spec, seed=1)
    reports = list(SyncBatches(num_envs=3, num_steps=num_steps).run(learner, env, Inline(), env_steps=1_200))
    # 400 steps of each environment end 14 episodes of 27; the 14 rows that begin the next ones are no steps. So 9
    # rollouts of 46 rows are 1,200 steps to the digit; of 50 rows, the last rollout goes over, by less than its size.
    assert 0 <= reports[-1].env_steps - 1_200 <= over
    assert reports[-2].env_steps < 1_200
    assert reports[-1].frames == 4 * reports[-1].env_steps == counted.stat().st_size
    assert learner.env_steps == reports[-1].env_steps
    lengths = np.concatenate([report.episode_lengths for report in reports])
    assert len(lengths) == 3 * (reports[-1].env_steps // 3 // 27) >= 3 * 14
    assert (lengths == 27).all()
    assert (np.concatenate([report.episode_returns for report in reports]) == 4 * 27).all()


# US-07: actions of the right kind, and one path for all of them -------------------------------------------------------


def trained(env: Gymnasium, squashed: bool) -> Learner:
    learner = Learner(PPO(hidden=(8,), learning_rate=0.05, squashed=squashed), env.spec, seed=1)
    for report in SyncBatches(num_envs=2, num_steps=16).run(learner, env, Inline(), env_steps=10**6):
        if report.updates == 3:
            break
    return learner


@pytest.mark.parametrize("squashed", [False, True])
@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        ([-1] * 100, [1] * 100, np.int32),
        ([0, 0], [5, 1], np.float32),
        ([0, 0], [5, 1], np.uint8),
        ([-0.1, 0.1], [0.1, 0.7], np.float64),
        ([-0.1, 0.1], [0.1, 0.7], np.float16),
    ],
)
def test_US_07_training_and_evaluation_send_the_same_action(low: Any, high: Any, dtype: Any, squashed: bool) -> None:
    env, seen = noting(low, high, dtype)  # which asserts range and dtype
    learner = trained(env, squashed)
    with torch.no_grad():
        learner.net.distribution.log_std.fill_(2.0)  # type: ignore[union-attr]
    seen.clear()
    with Actor(learner.method, learner.net, env, range(2), 32) as actor:
        actor.rollout()
    wild = np.array([action for _, action in seen])
    near = 0.01 if squashed else 0.0  # all of the space is reached: its bounds, or as good as
    np.testing.assert_allclose(wild.min(0), np.array(low, dtype), rtol=0, atol=near)
    np.testing.assert_allclose(wild.max(0), np.array(high, dtype), rtol=0, atol=near)

    def predicted(observation: Any) -> Any:
        with torch.inference_mode():
            decision = learner.method.act(learner.net, torch.from_numpy(observation)[None], None, None)
        return decision.environment_action[0].numpy()

    with torch.no_grad():
        learner.net.distribution.log_std.fill_(-40.0)  # type: ignore[union-attr]
    for play in (
        lambda: Actor(learner.method, learner.net, env, range(2), 16).rollout(),
        lambda: evaluation(learner, env),
    ):
        seen.clear()
        play()
        assert len(seen) >= 10
        for observation, action in seen:
            # Not to the last bit: a network may round otherwise for one observation than for two.
            np.testing.assert_allclose(
                action, predicted(observation), rtol=0, atol=1e-3 if dtype == np.float16 else 1e-6
            )
    raw = env._one()  # the environment itself takes it as it is
    observation, _ = raw.reset(seed=3)
    raw.step(predicted(observation))


def evaluation(learner: Learner, env: Gymnasium) -> None:
    evaluate(learner.method, learner.net, env, episodes=2)


def test_US_07_integers_are_rounded_to_the_nearest() -> None:
    policy = Normal(Box(np.array([-1, 10]), np.array([1, 20]), torch.int32))
    chosen = torch.tensor([[-1.2, -1.2], [-0.6, -0.92], [-0.4, 0.08], [0.6, 0.12], [9.0, 9.0]])
    given = policy.environment_action(chosen)
    assert isinstance(given, Tensor)
    assert given.dtype == torch.int32
    assert given.tolist() == [[-1, 10], [-1, 10], [0, 15], [1, 16], [1, 20]]


def test_US_07_integers_that_float32_has_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="of integers beyond"):
        distribution_over(Box(np.array([0]), np.array([2**24 + 1]), torch.int64))
    top = Normal(Box(np.array([0]), np.array([2**24]), torch.int64))
    given = top.environment_action(torch.ones(1))
    assert isinstance(given, Tensor)
    assert given.tolist() == [2**24]
