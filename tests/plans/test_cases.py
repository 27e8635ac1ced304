"""Faults that others have reported of their libraries, through the whole plan: cases.jsonl, by id in the names."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from headrace import A2C, PPO, Box, Discrete, Env, Gymnasium, Inline, Learner, Spec, SyncBatches, evaluate
from headrace.envs.base import CheckedVectorEnv
from headrace.envs.toy import Recall, Scripted, Target

pytestmark = pytest.mark.timeout(60)


def constant(base: Any, value: float) -> Any:
    """The method with a critic that says `value` of everything, before the first update."""

    @dataclasses.dataclass(frozen=True)
    class Constant(base):  # type: ignore[misc]
        def build(self, spec: Any, rng: Any) -> Any:
            net = base.build(self, spec, rng)
            nn.init.zeros_(net.value.out.weight)
            nn.init.constant_(net.value.out.bias, value)
            return net

    return Constant


# Ends of episodes -----------------------------------------------------------------------------------------------------


def expected_advantages(rollout: Any, value: float, gamma: float, lam: float) -> np.ndarray:
    """Episode by episode: sums of temporal differences, written out; NaN where no step was taken."""
    steps, envs = rollout.reward.shape
    advantage = np.full((steps, envs), np.nan)
    for b in range(envs):
        pieces: list[list[int]] = [[]]
        for t in range(steps):
            if rollout.valid[t, b]:
                pieces[-1].append(t)
            if rollout.terminated[t, b] or rollout.truncated[t, b] or not rollout.valid[t, b]:
                pieces.append([])
        for piece in filter(None, pieces):
            last = piece[-1]
            after = 0.0 if rollout.terminated[last, b] else value  # truncated and cut: the episode would have gone on
            deltas = [float(rollout.reward[t, b]) + gamma * value - value for t in piece]
            deltas[-1] += gamma * (after - value)
            for k, t in enumerate(piece):
                advantage[t, b] = sum((gamma * lam) ** n * delta for n, delta in enumerate(deltas[k:]))
    return advantage


SCRIPTS = (
    [
        ((1, 2, 3), "terminated"),
        ((5,), "truncated"),
        ((7, 8), "truncated"),
        ((9, 1, 1, 1, 1, 1, 1, 1, 1), "terminated"),
    ],
    [((4, 4), "truncated"), ((2,), "terminated")],
    [((1, -1, 2, -2, 3, -3, 4), "terminated"), ((6, 6, 6), "truncated")],
)


@pytest.mark.parametrize(("gamma", "lam", "memory"), [(0.5, 0.8, None), (0.9, 1.0, "gru"), (0.9, 0.0, None)])
def test_rewards_rows_and_targets_are_those_of_the_episodes(
    gamma: float, lam: float, memory: str | None, places: Any, train: Any
) -> None:
    method = constant(A2C, 2.0)(hidden=(4,), gamma=gamma, gae_lambda=lam, memory=memory, learning_rate=0.0)
    place = places["processes" if memory else "inline"]
    run = train(method, Scripted(SCRIPTS[0], SCRIPTS[1:]), place, updates=8, actors=3, num_steps=7)
    met = set()
    for b in range(6):  # what the learner got of each environment, put together, is its script
        taken = [
            (float(rollout.reward[t, b]), bool(rollout.terminated[t, b]), bool(rollout.truncated[t, b]))
            for rollout in run.rollouts
            for t in range(7)
            if rollout.valid[t, b]
        ]
        script = [
            (float(reward), last and end == "terminated", last and end == "truncated")
            for rewards, end in SCRIPTS[b % 3] * 20
            for last, reward in zip([False] * (len(rewards) - 1) + [True], rewards, strict=True)
        ]
        assert taken == script[: len(taken)]
    for rollout, batch in zip(run.rollouts, run.batches, strict=True):
        ended = rollout.terminated | rollout.truncated
        assert torch.equal(rollout.valid[1:], ~ended[:-1])
        assert rollout.reward[~rollout.valid].eq(0).all()
        expected = expected_advantages(rollout, 2.0, gamma, lam)
        np.testing.assert_allclose(batch.advantage[rollout.valid], expected[rollout.valid], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(batch.target[rollout.valid], expected[rollout.valid] + 2, rtol=1e-5, atol=1e-5)
        assert torch.equal(batch.weight, rollout.valid.float())
        met |= {("cut", int(s)) for s in rollout.valid[-1].int() + ended[-1].int()}
        met |= {("first", bool(s)) for s in rollout.valid[0]}
        met |= {("end", int(s)) for s in (rollout.terminated.int() + 2 * rollout.truncated.int()).unique()}
    # The cut came on a reset row, inside an episode and at an end; a rollout began with a reset row and without.
    assert met == {("cut", 0), ("cut", 1), ("cut", 2), ("first", True), ("first", False)} | {
        ("end", kind) for kind in (0, 1, 2)
    }


@pytest.fixture
def Counter() -> type:
    class Counter(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.count = 0
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            self.count += 1
            return np.full(1, self.count, np.float32), float(self.count), self.count == 3, False, {}

    return Counter


@pytest.mark.parametrize("actors", [1, 2])
def test_LC_18_exactly_18_transitions_of_12_vector_steps(actors: int, place: Any, train: Any, Counter: type) -> None:
    run = train(A2C(hidden=(4,)), Gymnasium(Counter), place, updates=1, num_envs=2, actors=actors, num_steps=12)
    (rollout,), (report,), (batch,) = run.rollouts, run.reports, run.batches
    pairs = torch.stack((rollout.observation[:-1, ..., 0], rollout.observation[1:, ..., 0]), -1)[rollout.valid]
    assert len(pairs) == 18
    assert rollout.valid.sum(0).tolist() == [9, 9]
    assert set(map(tuple, pairs.tolist())) == {(0, 1), (1, 2), (2, 3)}  # and no (3, 0)
    assert batch.weight.sum() == 18
    assert report.env_steps == report.samples_learned == 18
    assert report.episode_lengths.tolist() == [3] * 6
    assert report.episode_returns.tolist() == [6] * 6


def test_LC_10_all_32_advantages_are_1(place: Any, train: Any, Endless: Any) -> None:
    method = constant(PPO, 0.0)(hidden=(4,), gamma=0.5, gae_lambda=0.0, normalize_advantage=False, learning_rate=0.0)
    run = train(method, Endless(), place, updates=3, num_envs=4, actors=2, num_steps=8)
    for rollout, batch in zip(run.rollouts, run.batches, strict=True):
        assert batch.advantage.tolist() == [[1.0] * 4] * 8
        assert batch.weight.tolist() == [[1.0] * 4] * 8
        assert rollout.reward.sum() == 32


def test_LC_17_what_an_environment_changes_in_place_was_copied(place: Any, train: Any) -> None:
    """It owns one array of each kind, for its whole life, and returns these every time."""

    @dataclasses.dataclass(frozen=True)
    class InPlace(Env):
        @property
        def spec(self) -> Spec:
            return Spec(observation=Box(np.zeros(1), np.full(1, 9), torch.float32), action=Discrete(2))

        def make(self, indices: range) -> Any:
            return _InPlace(self.spec, indices)

    class _InPlace(CheckedVectorEnv):
        def __init__(self, spec: Spec, indices: range) -> None:
            super().__init__(len(indices), spec.action)
            self.observation = np.zeros((len(indices), 1), np.float32)
            self.reward = np.zeros(len(indices), np.float32)
            self.terminated, self.truncated = np.zeros((2, len(indices)), np.bool_)

        def _reset(self, seed: int) -> Any:
            self.observation[:] = 0
            return self.observation

        def _step(self, action: Any) -> Any:
            if self.terminated[0]:
                self.observation[:], self.reward[:], self.terminated[:] = 0, 0, False
            else:
                self.observation += 1
                self.reward[:] = self.observation[:, 0]
                self.terminated[:] = self.observation[:, 0] == 4
            return self.observation, self.reward, self.terminated, self.truncated

    # Two rollouts of 6 rows: an episode of four steps takes five rows, and lies in both.
    run = train(A2C(hidden=(4,)), InPlace(), place, updates=2, actors=2, num_envs=4, num_steps=6, max_lag=1)
    valid = torch.cat([rollout.valid for rollout in run.rollouts])
    before = torch.cat([rollout.observation[:-1, :, 0] for rollout in run.rollouts])
    after = torch.cat([rollout.observation[1:, :, 0] for rollout in run.rollouts])
    reward = torch.cat([rollout.reward for rollout in run.rollouts])
    for b in range(4):
        kept = valid[:, b]
        assert before[kept, b].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
        assert after[kept, b].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
        assert reward[kept, b].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_steps", "end"), [(6, "terminated"), (6, "truncated"), (2, "truncated"), (1, "terminated")]
)
def test_LC_37_memory_begins_anew_with_an_episode(end: Any, num_steps: int, place: Any, train: Any) -> None:
    """h = ½h + x with x = 1. The episode's end takes a row of its own, in which V sees the final observation."""

    @dataclasses.dataclass(frozen=True)
    class One(Env):  # always shows 1
        env: Env

        @property
        def spec(self) -> Spec:
            return self.env.spec

        def make(self, indices: range) -> Any:
            return _One(self.env.make(indices), len(indices), self.spec)

    class _One(CheckedVectorEnv):
        def __init__(self, vector: Any, num_envs: int, spec: Spec) -> None:
            super().__init__(num_envs, spec.action)
            self.vector = vector

        def _reset(self, seed: int) -> Any:
            return np.ones_like(self.vector.reset(seed))

        def _step(self, action: Any) -> Any:
            observation, *others = self.vector.step(action)
            return np.ones_like(observation), *others

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight_hh = nn.Parameter(torch.zeros(1))  # where the memory's dtype and device are read from

        def forward(self, x: Any, memory: Any) -> Any:
            return 0.5 * memory + x

    @dataclasses.dataclass(frozen=True)
    class Fixed(A2C):
        def build(self, spec: Any, rng: Any) -> Any:
            net: Any = A2C.build(self, spec, rng)
            net.gru.cell = Halving()
            net.value.hidden = nn.ModuleList()
            net.value.out = nn.Linear(1, 1)
            nn.init.ones_(net.value.out.weight)
            nn.init.zeros_(net.value.out.bias)
            return net

        def act(self, net: Any, observation: Any, memory: Any, noise: Any) -> Any:
            decision = A2C.act(self, net, observation, memory, noise)
            return decision.replace(log_prob=decision.memory[:, 0])  # tells what it remembered

    method = Fixed(hidden=(1,), memory="gru", learning_rate=0.0)
    env = One(Scripted([((0, 0, 0), end), ((0, 0, 0, 0, 0), end)]))
    run = train(method, env, place, updates=6 // num_steps, num_envs=2, actors=2, num_steps=num_steps)
    valid = torch.cat([rollout.valid for rollout in run.rollouts])
    acting = torch.cat([rollout.log_prob for rollout in run.rollouts])
    learning = torch.cat([batch.value for batch in run.batches])
    for b in range(2):
        assert valid[:, b].tolist() == [True, True, True, False, True, True]
        assert acting[valid[:, b], b].tolist() == [1, 1.5, 1.75, 1, 1.5]
        assert learning[valid[:, b], b].tolist() == [1, 1.5, 1.75, 1, 1.5]
        assert acting[3, b] == learning[3, b] == 1.875  # the final observation still belongs to its episode
    kept = [method.initial_memory(run.learner.net, 2), *(rollout.memory for rollout in run.rollouts[1:])]
    for rollout, memory in zip(run.rollouts, kept, strict=True):
        assert torch.equal(rollout.memory, memory)


# Importance ratios ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [None, "gru"])
@pytest.mark.parametrize(
    ("env", "fields"),
    [
        (Recall(length=5), {}),
        (Target(dimensions=3, length=7, low=-2, high=2), {}),
        (Target(dimensions=3, length=7), {"squashed": True}),
    ],
    ids=["categorical", "normal", "squashed"],
)
def test_LC_24_the_ratio_is_1_before_the_first_gradient_step(
    env: Any, fields: dict[str, Any], memory: str | None, train: Any
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Looking(PPO):
        ratios: list[float] = dataclasses.field(default_factory=list, compare=False)

        def losses(self, net: Any, batch: Any, step: int) -> Any:
            with torch.no_grad():
                log_prob, _, _ = self.evaluate(net, batch)
                self.ratios.append(float(((log_prob - batch.log_prob).exp() - 1)[batch.weight > 0].abs().max()))
            yield from PPO.losses(self, net, batch, step)

    # One gradient step an update: every one of them is the first of its update.
    method = Looking(hidden=(16,), update_epochs=1, num_minibatches=1, learning_rate=1e-2, memory=memory, **fields)
    run = train(method, env, Inline(), updates=2, num_envs=4, actors=2, num_steps=64)
    assert len(method.ratios) == 2
    assert max(method.ratios) <= 1e-5
    for report in run.reports:
        assert abs(report.metrics["losses/approx_kl"]) <= 1e-6
        assert report.metrics["losses/clipfrac"] == 0
    # That is no matter of course: weights one update older give other ratios.
    train(method, env, Inline(), updates=2, num_envs=4, actors=2, num_steps=64, max_lag=1)
    assert method.ratios[-1] > 1e-3


# Randomness -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def Lottery() -> type:
    class Lottery(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float64)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.ticket = self.np_random.random(2)
            return self.ticket, {}

        def step(self, action: Any) -> Any:
            return self.ticket, 0.0, True, False, {}

    return Lottery


def test_LC_45_no_two_environments_share_their_random_numbers(places: Any, train: Any, Lottery: type) -> None:
    def shown(place: Any, seed: int, actors: int = 4) -> dict[tuple[int, int], tuple[float, ...]]:
        """(environment, episode) → what its reset showed, of five episodes each."""
        run = train(
            A2C(hidden=(4,)), Gymnasium(Lottery), place, updates=2, seed=seed, num_envs=12, actors=actors, num_steps=5
        )
        observation = torch.cat([rollout.observation[:-1] for rollout in run.rollouts])
        valid = torch.cat([rollout.valid for rollout in run.rollouts])
        assert valid.sum(0).tolist() == [5] * 12
        return {(b, e): tuple(row) for b in range(12) for e, row in enumerate(observation[valid[:, b], b].tolist())}

    first = shown(places["processes"], 7)
    assert len(set(first.values())) == len(first) == 60
    for place in places.values():
        assert shown(place, 7) == first
    for actors in (1, 6):  # how the environments are shared out changes none of them
        assert shown(places["inline"], 7, actors) == first
    assert not set(shown(places["inline"], 8).values()) & set(first.values())


def test_LC_45_no_two_actors_share_the_noise_of_their_policies(place: Any, train: Any, Endless: Any) -> None:
    """All environments look the same: only noise tells the actions apart."""
    run = train(A2C(hidden=(4,)), Endless(), place, updates=2, num_envs=8, actors=4, num_steps=32)
    actions = torch.cat([rollout.action for rollout in run.rollouts])
    assert len({tuple(column) for column in actions.T.tolist()}) == 8
    first, second = (rollout.action for rollout in run.rollouts)
    assert not torch.equal(first, second)


# Reports and evaluation -----------------------------------------------------------------------------------------------


def test_LC_43_returns_in_reports_are_raw(place: Any, train: Any) -> None:
    """As far as there is no scaling of rewards yet: what users see are the environment's own rewards."""
    env = Scripted([((1000, 1, -0.25), "terminated")])
    run = train(PPO(hidden=(4,), num_minibatches=2), env, place, updates=2, num_envs=2, actors=2, num_steps=12)
    for report in run.reports:
        assert report.episode_returns.tolist() == [1000.75] * 6


def test_LC_50_evaluation_is_greedy_and_changes_nothing(place: Any, train: Any, digest: Any) -> None:
    class Ten(gymnasium.Env):
        """Ten steps, each of which rewards action 0 with 1."""

        observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.steps = 0
            return np.ones(1, np.float32), {}

        def step(self, action: Any) -> Any:
            self.steps += 1
            return np.ones(1, np.float32), float(action == 0), self.steps == 10, False, {}

    @dataclasses.dataclass(frozen=True)
    class Leaning(PPO):
        """Prefers action 0 a little: greedily always, sampled not."""

        def build(self, spec: Any, rng: Any) -> Any:
            net: Any = PPO.build(self, spec, rng)
            net.policy.out.bias.data[0] = 0.5
            return net

    env = Gymnasium(Ten)
    method = Leaning(hidden=(4,), memory="gru", num_minibatches=2, update_epochs=2, learning_rate=1e-3)
    plan = {"num_envs": 4, "actors": 2, "num_steps": 11, "max_lag": 1, "updates": 3}
    plain = train(method, env, place, **plan)
    learner = Learner(method, env.spec, seed=1)

    def look(report: Any) -> None:
        before, generator = learner.state(), torch.get_rng_state()
        episodes = 200 if report.version == 1 and place == Inline() else 3
        assert evaluate(method, learner.net, env, episodes).tolist() == [10.0] * episodes
        after = learner.state()
        assert all(torch.equal(tensor, after["net"][name]) for name, tensor in before["net"].items())
        assert after["counters"] == before["counters"]
        assert torch.equal(after["rng"], before["rng"])
        assert torch.equal(torch.get_rng_state(), generator)

    run = train(method, env, place, learner=learner, each=look, **plan)
    assert np.concatenate([report.episode_returns for report in run.reports]).mean() < 9
    assert digest(run.learner) == digest(plain.learner)
    for rollout, other in zip(run.rollouts, plain.rollouts, strict=True):  # the training environments saw no difference
        assert torch.equal(rollout.observation, other.observation)
        assert torch.equal(rollout.action, other.action)


def test_LC_50_evaluation_plays_its_own_episodes() -> None:
    """The same seed, the same episodes; none of them is one of training's."""
    env = Target(dimensions=1, length=4)
    learner = Learner(A2C(hidden=(4,)), env.spec, seed=1)
    first, again, other = (evaluate(learner.method, learner.net, env, 8, seed=seed) for seed in (1, 1, 2))
    assert first.shape == (8,)
    assert first.dtype == np.float64
    assert first.tolist() == again.tolist()
    assert not set(first.tolist()) & set(other.tolist())
    assert len(set(first.tolist())) == 8


def test_LC_50_evaluation_counts_one_episode_of_each_environment() -> None:
    env = Scripted([((1, 2, 3), "terminated"), ((100,), "truncated")], [[((5, 5, 5, 5, 5, 5, 5), "truncated")]])
    for memory in (None, "gru"):
        learner = Learner(A2C(hidden=(4,), memory=memory), env.spec)
        assert evaluate(learner.method, learner.net, env, 4).tolist() == [6, 35, 6, 35]


# Memory of the machine, and its cores ---------------------------------------------------------------------------------


def test_MG_08_no_tensor_of_a_report_or_a_rollout_holds_a_graph(place: Any, train: Any) -> None:
    method = PPO(hidden=(4,), memory="gru", num_minibatches=2, update_epochs=2)
    run = train(method, Recall(length=4), place, updates=3, num_envs=4, actors=2)
    for report in run.reports:
        assert all(type(value) is float for value in report.metrics.values())
    for struct in (*run.rollouts, *run.batches):
        assert not any(tensor.requires_grad for tensor in struct.leaves())
    assert not any(parameter.requires_grad is False for parameter in run.learner.net.parameters())


class _Allocated(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def allocated() -> int:
    """Bytes that malloc has handed out in this process."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Allocated
    gc.collect()
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.slow
def test_MG_08_memory_is_flat_over_many_updates() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("this C library cannot tell what it has allocated")
    env = Recall(length=4)
    learner = Learner(PPO(hidden=(16,), memory="gru", num_minibatches=2, update_epochs=1), env.spec)
    plan = SyncBatches(num_envs=4, num_steps=8, actors=2, max_lag=1)
    kept, sizes, tensors = [], {}, {}
    for report in plan.run(learner, env, Inline(), env_steps=10**9):
        kept.append(report.metrics["losses/policy_loss"])  # what a user's logging does
        if report.version in (100, 600):
            sizes[report.version] = allocated()
            tensors[report.version] = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        if report.version == 600:
            break
    assert tensors[600] == tensors[100]
    assert sizes[600] < 1.01 * sizes[100], sizes
    assert all(type(value) is float for value in kept)


def test_PF_01_actors_compute_with_one_thread(place: Any, train: Any, tmp_path: Path, Noted: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(A2C(hidden=(4,)), Noted(Target(), tmp_path), place, updates=1, num_envs=4, actors=4)
    finally:
        torch.set_num_threads(before)
    assert [(tmp_path / str(rank)).read_text().split()[-1] for rank in range(4)] == ["1"] * 4


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_PF_01_four_actors_make_four_batches_in_little_more_than_their_share_of_the_cores(places: Any) -> None:
    """On two cores four batches of four actors take twice the time of one of one: at most 2.5 times, and thrice that
    on machines that have other things to do."""
    env = Gymnasium("CartPole-v1")

    def seconds(actors: int) -> float:
        learner = Learner(A2C(learning_rate=0.0), env.spec)
        plan = SyncBatches(actors=actors, num_envs=8 * actors, num_steps=256)
        found, began = [], 0.0
        for report in plan.run(learner, env, places["processes"], env_steps=10**9):
            if began:
                found.append(time.perf_counter() - began)
            began = time.perf_counter()
            if report.version == 12:
                break
        return statistics.median(found)

    alone, together = seconds(1), seconds(4)
    print(f"one batch {alone:.3f} s, four of four actors {together:.3f} s: {together / alone:.2f} times")
    assert together < 3 * 2.5 * alone


# Schedules ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[100, 500, 1200], [*range(100, 1001, 100), 1200]])
def test_CR_04_schedules_go_on_where_they_stood(parts: list[int]) -> None:
    """However a run of 1,000 updates is cut, and however far beyond its end it goes."""

    @dataclasses.dataclass(frozen=True)
    class Exploring(A2C):
        epsilon: float = 1.0

        def anneal(self, progress: float) -> Exploring:
            epsilon = 1 - 0.95 * min(1.0, progress / 0.2)
            return dataclasses.replace(super().anneal(progress), epsilon=epsilon)

        def describe(self, batch: Any) -> dict[str, torch.Tensor]:
            return {"charts/epsilon": torch.tensor(self.epsilon)}

    env, method = Target(dimensions=1, length=10**6), Exploring(hidden=(2,), learning_rate=1e-3)
    plan, state, reports = SyncBatches(num_envs=1, num_steps=2), None, []
    for until in parts:
        learner = Learner(method, env.spec, seed=1)
        for report in plan.run(learner, env, Inline(), env_steps=2 * until, horizon=2_000, state=state):
            reports.append(report)
            if report.version == until:
                state = report.snapshot()
    rates = [report.learning_rates["net"] for report in reports]
    assert len(rates) == 1200
    np.testing.assert_allclose(rates, [1e-3 * max(0.0, 1 - k / 1000) for k in range(1200)], rtol=1e-6)
    assert rates[500] == pytest.approx(5e-4)
    assert set(rates[1000:]) == {0.0}
    epsilons = [report.metrics["charts/epsilon"] for report in reports]
    assert epsilons[100] == pytest.approx(0.525)
    assert epsilons[300] == pytest.approx(0.05)
    np.testing.assert_allclose(epsilons, [max(0.05, 1 - 0.95 * k / 200) for k in range(1200)], rtol=1e-6)
