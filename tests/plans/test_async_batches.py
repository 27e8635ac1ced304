"""AsyncBatches: lag that is bounded and true, for all three policies, at any speeds of the actors."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headrace import (
    A2C,
    Box,
    ConfigError,
    Decision,
    Env,
    Inline,
    Learner,
    Loss,
    Method,
    Processes,
    Spec,
    SyncBatches,
    Threads,
)
from headrace.channel import role
from headrace.envs.base import CheckedVectorEnv
from headrace.envs.toy import Identity, Scripted, Sleepy
from headrace.plans.arrivals import Arrivals
from headrace.plans.async_batches import AsyncBatches
from headrace.plans.schedule import Schedule

pytestmark = pytest.mark.timeout(60)

SAME = 1e-5
OTHER = 1e-4
"""Versions next to each other differ by more than this somewhere in a rollout."""


@pytest.fixture(scope="session")
def Paced() -> Any:
    """Paced(env, seconds, jitter=0): every step takes as long as the actor's rank says, give or take a share."""

    @dataclasses.dataclass(frozen=True)
    class Paced(Env):
        env: Env
        seconds: tuple[float, ...]
        jitter: float = 0.0

        @property
        def spec(self) -> Spec:
            return self.env.spec

        def make(self, indices: range) -> Any:
            return _Paced(self, indices)

    class _Paced(CheckedVectorEnv):
        def __init__(self, env: Any, indices: range) -> None:
            super().__init__(len(indices), env.spec.action)
            self.vector, self.seconds, self.jitter = env.env.make(indices), env.seconds[role().rank], env.jitter
            self.random = random.Random(role().rank)

        def _reset(self, seed: int) -> Any:
            return self.vector.reset(seed)

        def _step(self, action: Any) -> Any:
            role().sleep(self.seconds * self.random.uniform(1 - self.jitter, 1 + self.jitter))
            return self.vector.step(action)

    return Paced


@dataclasses.dataclass
class Run:
    learner: Learner
    plan: AsyncBatches
    reports: list[Any] = dataclasses.field(default_factory=list)
    batches: list[Any] = dataclasses.field(default_factory=list)
    weights: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    lines: list[str] = dataclasses.field(default_factory=list)

    @property
    def turns(self) -> Any:
        return Schedule.read(self.lines).turns

    def rollouts(self) -> Iterator[tuple[int, Any]]:
        """(version that learns first, rollout) of all that was learned from."""
        for number, batch in enumerate(self.batches):
            for rollout in batch.split(self.plan.num_envs // self.plan.actors, "B"):
                yield number * self.plan.passes, rollout


def learn(
    plan: AsyncBatches,
    method: Any,
    env: Env,
    place: Any,
    updates: int,
    each: Callable[[Any], None] = lambda report: None,
    state: Any = None,
) -> Run:
    """Run the plan and note everything."""
    learner = Learner(method, env.spec, seed=1)
    run = Run(learner, plan)
    prepare = learner.prepare

    def prepared(rollout: Any) -> Any:
        run.batches.append(rollout.clone())
        return prepare(rollout)

    learner.prepare = prepared  # type: ignore[method-assign]
    run.weights[0] = {name: tensor.clone() for name, tensor in learner.net.state_dict().items()}
    reports = plan.run(learner, env, place, env_steps=10**9, state=state, journal=run.lines.append)
    with closing(reports):  # type: ignore[type-var]
        for report in reports:
            run.weights[report.version] = {name: tensor.clone() for name, tensor in learner.net.state_dict().items()}
            run.reports.append(report)
            each(report)
            if len(run.reports) == updates:
                break
    return run


def tell_time(clock: list[float], report: Any) -> None:
    """Note the placement's time at a report."""
    clock.append(role().clock())


def lag_is_true(run: Run, method: Any, spec: Spec, log_probs: Any) -> None:
    """Work out the log-probabilities of every rollout again, under the weights that it says to be of."""
    measured = []
    for learned_at, rollout in run.rollouts():
        made = rollout.version[:, 0] >= 0
        version = int(rollout.version[0, 0])
        assert (rollout.version[made] == version).all()
        assert not rollout.valid[~made].any()

        def distance(other: int, rollout: Any = rollout) -> float:
            found = log_probs(method, spec, run.weights[other], rollout) - rollout.log_prob
            return float(found[rollout.valid].abs().max())

        assert distance(version) <= SAME
        if made.all():
            for other in (version - 1, version + 1):
                if other in run.weights:
                    assert distance(other) > OTHER, f"versions {version} and {other} cannot be told apart"
        last = learned_at + run.plan.passes - 1
        assert 0 <= last - version <= run.plan.max_lag
        measured.append(last - version)
    assert max(report.lag.max for report in run.reports) == max(measured)


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"actors": 0}, "actors=0"),
        ({"batch_rollouts": 0}, "batch_rollouts=0"),
        ({"max_lag": -1}, "max_lag=-1"),
        ({"num_steps": True}, "num_steps=True"),
        ({"on_stale": "ignore"}, '"wait", "cut" or "drop"'),
        ({"actors": 3, "num_envs": 8}, "num_envs 6 or 9"),
        ({"passes": 3, "max_lag": 1}, "max_lag of 2"),
        ({"env_timeout": 0.0}, "env_timeout=0.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields: Any, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        AsyncBatches(**fields)
    assert said in str(found.value)


def test_what_does_not_fit_is_refused_before_a_role_starts(task: Any) -> None:
    method, env = task("ppo", "continuous", num_minibatches=7)
    learner = Learner(method, env.spec)
    with pytest.raises(ConfigError, match="minibatches"):
        AsyncBatches(num_steps=4).run(learner, env, Inline(), env_steps=100)
    _, other = task("a2c", "recurrent")
    with pytest.raises(ConfigError, match="built for"):
        AsyncBatches(num_steps=28, num_envs=4, actors=1).run(learner, other, Inline(), env_steps=100)
    with pytest.raises(ConfigError, match="state"):
        AsyncBatches(num_steps=28, num_envs=4, actors=1).run(learner, env, Inline(), env_steps=100, state={})


# Lag ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("max_lag", "on_stale", "kind"), [(1, "wait", "recurrent"), (4, "cut", "discrete")])
def test_the_recorded_version_acted(
    max_lag: int, on_stale: Any, kind: str, task: Any, Paced: Any, log_probs: Any
) -> None:
    method, env = task("a2c", kind)
    plan = AsyncBatches(3, 6, 8, batch_rollouts=2, max_lag=max_lag, on_stale=on_stale)
    run = learn(plan, method, Paced(env, (0.01, 0.01, 0.08), 0.5), Inline(), updates=16)
    lag_is_true(run, method, env.spec, log_probs)
    assert max(report.lag.max for report in run.reports) == max_lag
    assert ({turn.rows for turn in run.turns} == {8}) == (on_stale == "wait")


@pytest.mark.slow
@pytest.mark.parametrize(("on_stale", "max_lag"), [("wait", 1), ("wait", 4), ("wait", 16), ("cut", 4), ("drop", 4)])
def test_the_recorded_version_acted_under_load_while_an_actor_is_suspended(
    max_lag: int, on_stale: Any, task: Any, log_probs: Any
) -> None:
    """It is resumed once everything has come to wait for it, or, where nothing does, 40 updates later."""
    method, env = task("a2c", "discrete")
    plan = AsyncBatches(3, 6, 8, batch_rollouts=2, max_lag=max_lag, on_stale=on_stale)

    def suspended() -> Any:
        told, resumed = [0.0], []

        def resume(pid: int) -> None:
            while time.monotonic() - told[0] < 0.5:
                time.sleep(0.01)
            os.kill(pid, signal.SIGCONT)

        def each(report: Any) -> None:
            told[0] = time.monotonic()
            pid = next(member.pid for member in report.crew.members if member.rank == 1)
            if report.version == 5:
                os.kill(pid, signal.SIGSTOP)
                if on_stale != "drop":
                    resumed.append(threading.Thread(target=resume, args=(pid,)))
                    resumed[0].start()
            elif report.version == 45 and on_stale == "drop":
                os.kill(pid, signal.SIGCONT)

        run = learn(plan, method, Sleepy(env, 0.001), Processes(), 80, each)
        for thread in resumed:
            thread.join()
        return run

    for _ in range(4):  # an actor that is stopped between two rollouts is waited for by nobody
        run = suspended()
        lag_is_true(run, method, env.spec, log_probs)
        if on_stale == "drop" or max(report.lag.max for report in run.reports) == max_lag:
            break
    else:
        pytest.fail(f"no run of four reached a lag of {max_lag}")
    for rank in range(3):  # each has gone on with new weights
        assert max(turn.version for turn in run.turns if turn.rank == rank) > 80 - 2 * max_lag - 10


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [1, 4, 16])
def test_the_recorded_version_acted_on_threads(max_lag: int, task: Any, log_probs: Any) -> None:
    method, env = task("ppo", "continuous")
    plan = AsyncBatches(3, 6, 8, batch_rollouts=1, max_lag=max_lag)
    run = learn(plan, method, Sleepy(env, 0.002), Threads(), updates=40)
    lag_is_true(run, method, env.spec, log_probs)


def at_any_speed(seed: int, Paced: Any) -> None:
    rng = random.Random(seed)
    actors = rng.randint(1, 5)
    on_stale = rng.choice(["wait", "cut", "drop"])
    passes = rng.choice([1, 1, 2])
    max_lag = rng.randint(passes - 1, 6)
    batch = rng.randint(1, 4)
    plan = AsyncBatches(actors, actors, 4, batch, max_lag, on_stale, passes)
    speeds = tuple(10 ** rng.uniform(-2, 0) for _ in range(actors))
    env = Paced(Scripted([((1, 2, 3), "terminated")]), speeds, rng.random())
    run = learn(plan, A2C(hidden=(2,)), env, Inline(), updates=24)
    for learned_at, rollout in run.rollouts():
        assert 0 <= learned_at + passes - 1 - int(rollout.version[0, 0]) <= max_lag, (seed, plan)
    assert all(report.lag.max <= max_lag for report in run.reports)
    versions = {rank: [turn.version for turn in run.turns if turn.rank == rank] for rank in range(actors)}
    for rank in versions:
        assert versions[rank] == sorted(versions[rank])
        if on_stale != "drop" and max_lag <= 4:  # where it may be dropped, nobody waits for it
            assert versions[rank][-1] > 0, (seed, plan)


@pytest.mark.parametrize("seed", [2, 3])
def test_no_deadlock_no_breach_and_all_advance_at_any_speeds(seed: int, Paced: Any) -> None:
    at_any_speed(seed, Paced)


@pytest.mark.slow
def test_no_deadlock_no_breach_and_all_advance_at_many_speeds(Paced: Any) -> None:
    for seed in range(4, 24):
        at_any_speed(seed, Paced)


def test_a_rollout_may_come_at_any_moment(Endless: Any, Paced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two looks of the learner, which here take longer than a rollout does."""
    look = Arrivals._has_one

    def slowly(self: Arrivals, rank: int) -> bool:
        found = look(self, rank)
        role().sleep(1.0)
        return found

    monkeypatch.setattr(Arrivals, "_has_one", slowly)
    plan = AsyncBatches(1, 1, 4, batch_rollouts=1, max_lag=0)
    run = learn(plan, A2C(hidden=(2,)), Paced(Endless(), (0.1,)), Inline(), updates=3)
    assert [report.lag.max for report in run.reports] == [0, 0, 0]


# The policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_straggler_is_waited_for_cut_or_dropped(Endless: Any, Paced: Any) -> None:
    """One actor ten times slower, lag 2: what it costs in time, in rows and in data, on the virtual clock."""
    found = {}
    for on_stale in ("wait", "cut", "drop"):
        plan = AsyncBatches(3, 6, 10, batch_rollouts=1, max_lag=2, on_stale=on_stale)
        env, clock = Paced(Endless(), (0.1, 0.1, 1.0)), list[float]()
        run = learn(plan, A2C(hidden=(2,)), env, Inline(), 40, partial(tell_time, clock))
        report = run.reports[-1]
        turns = [turn for turn in run.turns if turn.fate == "learned"][:40]
        assert report.env_steps == sum(turn.rows for turn in turns) * 2  # environments of an actor
        dropped = [turn for turn in run.turns if turn.fate == "dropped"]
        assert report.dropped.get("stale", 0) == sum(turn.rows for turn in dropped) * 2
        assert bool(dropped) == (on_stale == "drop")
        assert (min(turn.rows for turn in turns) < 10) == (on_stale == "cut")
        assert {turn.rank for turn in turns if turn.rows < 10} <= {2}
        assert all(turn.version < 40 for turn in run.turns)
        found[on_stale] = clock[-1]
    assert found["wait"] > 3 * found["cut"]
    assert found["wait"] > 3 * found["drop"]


def test_the_time_and_the_rank_that_an_update_waited_for(Endless: Any, Paced: Any) -> None:
    """On the virtual clock all time passes while the learner waits; a rollout of actor 1 takes ten times as long."""
    clock: list[float] = []
    plan = AsyncBatches(2, 2, 5, batch_rollouts=2, max_lag=1)
    env = Paced(Endless(), (0.1, 1.0))
    run = learn(plan, A2C(hidden=(2,)), env, Inline(), 8, partial(tell_time, clock))
    assert sum(report.metrics["perf/waited_seconds"] for report in run.reports) == pytest.approx(clock[-1])
    learned = [turn.rank for turn in run.turns if turn.fate == "learned"]
    slow = [1 in learned[2 * k : 2 * k + 2] for k in range(8)]
    assert [report.metrics["perf/waited_rank"] for report in run.reports] == slow
    assert set(slow) == {True, False}


def test_the_age_of_weights_in_seconds(Endless: Any, Paced: Any) -> None:
    """One actor, whose rollouts take a second each and are learned from in no time: one after the other."""
    plan = AsyncBatches(1, 1, 10, batch_rollouts=1, max_lag=0)
    run = learn(plan, A2C(hidden=(2,)), Paced(Endless(), (0.1,)), Inline(), updates=4)
    for report in run.reports:
        assert [report.metrics[f"lag/seconds_{name}"] for name in ("p50", "p95", "max")] == pytest.approx([1.0] * 3)


@pytest.mark.slow
def test_rollouts_that_are_cut_lose_nothing(Paced: Any) -> None:
    """What the learner gets of an environment, put together, is its script: no step is repeated or left out."""
    script = [((1, 2, 3), "terminated"), ((10, 20), "truncated"), ((5, 6, 7, 8, 9), "terminated")]
    plan = AsyncBatches(3, 3, 8, batch_rollouts=1, max_lag=2, on_stale="cut")
    run = learn(plan, A2C(hidden=(2,), memory="gru"), Paced(Scripted(script), (0.1, 0.1, 0.7)), Inline(), updates=60)
    rewards: dict[int, list[float]] = {rank: [] for rank in range(3)}
    lengths: list[int] = []
    for _, rollout in run.rollouts():
        (rank,) = rollout.rank.unique().tolist()
        rewards[rank] += rollout.reward[rollout.valid].tolist()
        lengths += rollout.episode_length[rollout.episode_length > 0].tolist()
        for leaf in rollout.leaves():
            assert not leaf.is_floating_point() or leaf.isfinite().all()
    assert min(turn.rows for turn in run.turns) < 8
    whole = [reward for episode, _ in script * 40 for reward in episode]
    for told in rewards.values():
        assert told == whole[: len(told)]
        assert len(told) > 20
    assert set(lengths) == {3, 2, 5}
    assert run.reports[-1].env_steps == sum(map(len, rewards.values()))


def test_passes_over_a_batch(task: Any) -> None:
    method, env = task("a2c", "discrete")
    plan = AsyncBatches(2, 6, 8, batch_rollouts=2, max_lag=4, passes=3)
    run = learn(plan, method, env, Inline(), updates=12)
    for k, report in enumerate(run.reports):
        assert report.version == k + 1
        assert report.gradient_steps == k + 1
        assert report.env_steps == sum(int(batch.valid.sum()) for batch in run.batches[: k // 3 + 1])
        assert len(report.lags) == run.batches[k // 3].valid.sum()
        first = run.reports[k // 3 * 3]
        assert report.lags.tolist() == (first.lags + k % 3).tolist()
        assert report.lag.max <= 4


# Going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 2])
def test_a_run_goes_on_from_a_snapshot(passes: int, task: Any, log_probs: Any) -> None:
    method, env = task("ppo", "continuous")
    plan = AsyncBatches(2, 6, 8, batch_rollouts=2, max_lag=3, passes=passes)
    taken: list[Any] = []
    first = learn(plan, method, env, Inline(), 5, lambda report: taken.append(report.snapshot()))
    with pytest.raises(ConfigError, match="gone on"):
        first.reports[0].snapshot()
    state = taken[2]
    assert [note.version for note, _ in state["weights"]] == [3]
    second = learn(plan, method, env, Inline(), 4, state=state)
    assert [report.version for report in second.reports] == [4, 5, 6, 7]
    assert second.reports[0].env_steps > first.reports[2].env_steps
    rollout = second.batches[0].at(B=slice(0, 3))
    assert int(rollout.version[0, 0]) == 3
    found = log_probs(method, env.spec, first.weights[3], rollout) - rollout.log_prob
    assert found[rollout.valid].abs().max() <= SAME


@pytest.mark.slow
def test_a_run_that_is_left_leaves_nothing(task: Any, place: Any) -> None:
    method, env = task("a2c", "discrete")
    reports = AsyncBatches(2, 6, 8).run(Learner(method, env.spec), env, place, env_steps=10**9)
    next(reports)
    reports.close()  # type: ignore[attr-defined]


# Cases ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_LC_08_the_last_step_of_a_rollout_is_learned_from(spied: Any) -> None:
    """An episode of 20 steps with a reward of 10 on its last one; every (episode, step) enters the loss once."""

    @dataclasses.dataclass(frozen=True)
    class Late(Env):
        env: Env = dataclasses.field(default_factory=lambda: Identity(lengths=(20,)))

        @property
        def spec(self) -> Spec:
            return self.env.spec

        def make(self, indices: range) -> Any:
            return _Late(self.env, indices)

    class _Late(CheckedVectorEnv):
        def __init__(self, env: Any, indices: range) -> None:
            super().__init__(len(indices), env.spec.action)
            self.vector = env.make(indices)

        def _reset(self, seed: int) -> Any:
            return self.vector.reset(seed)

        def _step(self, action: Any) -> Any:
            observation, reward, terminated, truncated = self.vector.step(action)
            return observation, np.where(reward == 20, 10, 0).astype(np.float32), terminated, truncated

    method = spied(A2C)(hidden=(2,), gamma=0.0, gae_lambda=0.0)
    plan = AsyncBatches(2, 2, 20, batch_rollouts=1, max_lag=3)
    run = learn(plan, method, Late(), Inline(), updates=60)
    met: Counter[tuple[int, ...]] = Counter()
    for _, batch in method.seen:
        counted = batch.weight > 0
        met.update(tuple(map(int, row)) for row in batch.observation[counted][:, 1:])
    assert set(met.values()) == {1}
    assert sum(met.values()) == run.reports[-1].samples_learned
    ended = [(int(env), int(episode)) for env, episode, step in met if step == 19]
    assert len(ended) >= 50
    assert {(env, episode, step) for env, episode in ended[:50] for step in range(20)} <= set(met)
    gained = sum(int((rollout.reward == 10).sum()) for _, rollout in run.rollouts())
    assert gained == len(ended)


@pytest.mark.slow
def test_LC_52_every_actor_gets_new_weights(tmp_path: Path) -> None:
    """The policy's parameter is the version, the action is the parameter; of 8 actors one is ten times slower."""

    class Tag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.version = nn.Parameter(torch.zeros(1))

    @dataclasses.dataclass(frozen=True)
    class Tagged(Method):
        def build(self, spec: Any, rng: Any) -> Any:
            return Tag()

        def act(self, net: Any, observation: Any, memory: Any, noise: Any) -> Decision:
            return Decision(action=net.version.detach().expand(len(observation), 1).clone())

        def losses(self, net: Any, batch: Any, step: int) -> Iterator[Loss]:
            yield Loss(total=-net.version.sum(), weight=1.0)  # a gradient of −1

        def optimizers(self, net: Any) -> Any:
            return {"net": torch.optim.SGD(net.parameters(), lr=1.0)}

    @dataclasses.dataclass(frozen=True)
    class Slow(Env):
        folder: Path

        @property
        def spec(self) -> Spec:
            box = Box(np.full(1, -np.inf), np.full(1, np.inf), torch.float32)
            return Spec(observation=box, action=box)

        def make(self, indices: range) -> Any:
            return _Slow(self, indices)

    class _Slow(CheckedVectorEnv):
        def __init__(self, env: Any, indices: range) -> None:
            super().__init__(len(indices), env.spec.action)
            self.rank, self.folder, self.held = role().rank, env.folder, 0.0

        def _reset(self, seed: int) -> Any:
            return np.zeros((1, 1), np.float32)

        def _step(self, action: Any) -> Any:
            self.held = float(action[0, 0])
            role().sleep(0.1 if self.rank == 3 else 0.01)
            no = np.zeros(1, np.bool_)
            return self._reset(0), np.zeros(1, np.float32), no, no

        def _close(self) -> None:
            (self.folder / str(self.rank)).write_text(str(self.held))

    plan = AsyncBatches(8, 8, 2, batch_rollouts=2, max_lag=4)
    run = learn(plan, Tagged(), Slow(tmp_path), Inline(), updates=200)
    for learned_at, rollout in run.rollouts():
        assert torch.equal(rollout.action[..., 0], rollout.version.float())
        assert learned_at - int(rollout.version.min()) <= 4
    assert max(report.lag.max for report in run.reports) == 4
    assert run.reports[-1].dropped == {}
    held = {int(file.name): float(file.read_text()) for file in tmp_path.iterdir()}
    assert sorted(held) == list(range(8))
    assert min(held.values()) >= 196
    assert {turn.rank for turn in run.turns} == set(range(8))


def steps_per_second(plan: Any, env: Env, place: Any, seconds: float) -> float:
    """Environment steps learned from per second of the placement's clock, the first updates left out."""
    learner = Learner(A2C(hidden=(2,)), env.spec)
    began = 0.0
    reports = plan.run(learner, env, place, env_steps=10**9)
    with closing(reports):
        for report in reports:
            now = role().clock()
            if report.version == 5:
                began, before = now, report.env_steps
            elif report.version > 5 and now - began > seconds:
                return float((report.env_steps - before) / (now - began))
    raise AssertionError("it goes on for ever")


@pytest.mark.slow
def test_PF_02_more_actors_bring_more(Paced: Any) -> None:
    """Steps of 10 ms, on the virtual clock, on which only environments take time: what the plan makes of it."""
    rates = []
    for actors in (1, 4, 16):
        plan = AsyncBatches(actors, actors, 8, batch_rollouts=2, max_lag=16)
        rates.append(steps_per_second(plan, Paced(Identity(), (0.01,) * actors, 0.5), Inline(), seconds=1.0))
    assert rates[1] >= 3.4 * rates[0]
    assert rates[2] >= 10 * rates[0]


@pytest.mark.slow
def test_PF_02_outliers_are_not_waited_for() -> None:
    """On the virtual clock, on which only the environments take time: what the plan makes of it, not the machine."""

    @dataclasses.dataclass(frozen=True)
    class Outliers(Env):
        env: Env

        @property
        def spec(self) -> Spec:
            return self.env.spec

        def make(self, indices: range) -> Any:
            return _Outliers(self.env, indices)

    class _Outliers(CheckedVectorEnv):
        def __init__(self, env: Any, indices: range) -> None:
            super().__init__(len(indices), env.spec.action)
            self.vector, self.random = env.make(indices), random.Random(indices.start)

        def _reset(self, seed: int) -> Any:
            return self.vector.reset(seed)

        def _step(self, action: Any) -> Any:
            role().sleep(0.1 if self.random.random() < 0.01 else 0.01)
            return self.vector.step(action)

    env = Outliers(Identity())
    sync = steps_per_second(SyncBatches(24, 24, 2), env, Inline(), 1)
    asynchronous = steps_per_second(AsyncBatches(24, 24, 2, batch_rollouts=24, max_lag=4), env, Inline(), 1)
    assert asynchronous >= 2 * sync


@pytest.mark.slow
def test_a_straggler_costs_asynchronous_batches_little(Paced: Any) -> None:
    """Of 4 actors one is 5 times slower, and max_lag (4 − 1) · 5 / 2; on the virtual clock."""
    env = Paced(Identity(), (0.01, 0.01, 0.01, 0.05))
    sync = steps_per_second(SyncBatches(4, 4, 8), env, Inline(), 2)
    asynchronous = steps_per_second(AsyncBatches(4, 4, 8, batch_rollouts=2, max_lag=8), env, Inline(), 2)
    assert asynchronous >= 2 * sync
