"""AsyncGradients: each gradient is applied as it comes; its lag is measured, and bounded where that is asked."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headrace import (
    A2C,
    ConfigError,
    Env,
    Inline,
    Learner,
    NonFinite,
    Processes,
    RoleFailed,
    Spec,
    SyncBatches,
    Threads,
)
from headrace.channel import role
from headrace.envs.base import CheckedVectorEnv
from headrace.envs.toy import Scripted, Sleepy
from headrace.plans.async_gradients import AsyncGradients
from headrace.plans.schedule import Schedule, Turn

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="session")
def Paced() -> Any:
    """Paced(env, seconds): every step of worker i takes seconds[i] of the placement's clock."""

    @dataclasses.dataclass(frozen=True)
    class Paced(Env):
        env: Env
        seconds: tuple[float, ...]

        @property
        def spec(self) -> Spec:
            return self.env.spec

        def make(self, indices: range) -> Any:
            return _Paced(self, indices)

    class _Paced(CheckedVectorEnv):
        def __init__(self, env: Any, indices: range) -> None:
            super().__init__(len(indices), env.spec.action)
            self.vector, self.seconds = env.env.make(indices), env.seconds[role().rank]

        def _reset(self, seed: int) -> Any:
            return self.vector.reset(seed)

        def _step(self, action: Any) -> Any:
            role().sleep(self.seconds)
            return self.vector.step(action)

    return Paced


@dataclasses.dataclass
class Run:
    learner: Learner
    reports: list[Any] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    digests: dict[int, str] = dataclasses.field(default_factory=dict)
    states: list[Any] = dataclasses.field(default_factory=list)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return Schedule.read(self.lines).turns


def run(
    plan: Any, method: Any, env: Env, place: Any, updates: int, learner: Learner | None = None, **given: Any
) -> Run:
    """Run the plan for so many updates and note everything."""
    learner = learner or Learner(method, env.spec, seed=1)
    noted = Run(learner)
    if not isinstance(plan, SyncBatches):
        given = {"journal": noted.lines.append, **given}
    with closing(plan.run(learner, env, place, env_steps=10**9, horizon=10_000, **given)) as reports:
        for report in reports:
            noted.reports.append(report)
            noted.digests[report.version] = learner.digest()
            noted.states.append(report.snapshot())
            if len(noted.reports) == updates:
                break
    return noted


def descending(method: Any) -> Any:
    """The same method with plain gradient descent, which shows a gradient as it is."""

    @dataclasses.dataclass(frozen=True)
    class Descending(type(method)):  # type: ignore[misc]
        def optimizers(self, net: nn.Module) -> Any:
            return {"net": torch.optim.SGD(net.parameters(), lr=self.learning_rate)}

    return Descending(**vars(method))


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"workers": 0}, "workers=0"),
        ({"batch_gradients": 0}, "batch_gradients=0"),
        ({"max_lag": -1}, "max_lag=-1"),
        ({"workers": 3, "num_envs": 8}, "among 3 workers"),
        ({"env_timeout": 0.0}, "env_timeout=0.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields: Any, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        AsyncGradients(**fields)
    assert said in str(found.value)


def test_several_steps_a_batch_are_refused_before_a_role_starts(task: Any) -> None:
    method, env = task("ppo", "continuous")
    with pytest.raises(ConfigError, match="in 4 minibatches and has 1 optimizers; only one gradient step"):
        AsyncGradients(2, 4, 8).run(Learner(method, env.spec), env, Inline(), env_steps=100)


# What is learned ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["discrete", "continuous", "recurrent"])
def test_one_worker_alone_learns_what_a_synchronous_batch_teaches(kind: str, task: Any) -> None:
    """To the bit: gradients, clipping, the optimizer's state, annealing, and statistics."""
    method, env = task(
        "a2c", kind, normalize_reward=True, **({"normalize_observation": True} if kind != "recurrent" else {})
    )
    ours = run(AsyncGradients(1, 6, 8), method, env, Inline(), 5)
    theirs = run(SyncBatches(1, 6, 8), method, env, Inline(), 5)
    assert ours.digests == theirs.digests
    assert len(set(ours.digests.values())) == 5
    for one, other in zip(ours.reports, theirs.reports, strict=True):
        for name in ("env_steps", "samples_learned", "gradient_steps", "version", "running_return", "learning_rates"):
            assert getattr(one, name) == getattr(other, name)
        assert {name: one.metrics[name] for name in other.metrics} == pytest.approx(other.metrics)
        assert one.episode_returns.tolist() == other.episode_returns.tolist()


def test_the_mean_of_all_workers_gradients_is_that_of_one_batch(task: Any) -> None:
    """With a lag of 0 and a gradient of each, it is the synchronous plan: to 1e-6, in another order of sums."""
    method, env = task("a2c", "discrete", normalize_reward=True, normalize_observation=True, learning_rate=0.1)
    method = descending(method)
    ours = run(AsyncGradients(3, 6, 8, batch_gradients=3, max_lag=0), method, env, Inline(), 4)
    theirs = run(SyncBatches(3, 6, 8), method, env, Inline(), 4)
    first = Learner(method, env.spec, seed=1).net.state_dict()
    for name, tensor in theirs.learner.net.state_dict().items():
        torch.testing.assert_close(ours.learner.net.state_dict()[name], tensor, rtol=1e-6, atol=1e-6)
        assert not torch.equal(first[name], tensor) or name.endswith((".low", ".high"))
    assert ours.reports[-1].env_steps == theirs.reports[-1].env_steps
    assert ours.reports[-1].metrics["losses/entropy"] == pytest.approx(theirs.reports[-1].metrics["losses/entropy"])


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_whoever_sent_a_gradient_goes_on_with_the_weights_that_it_moved(batch: int, Paced: Any, task: Any) -> None:
    method, env = task("a2c", "discrete")
    plan = AsyncGradients(3, 3, 4, batch_gradients=batch)
    noted = run(plan, method, Paced(env, (1.0, 1.7, 3.1)), Inline(), 30)
    applied: dict[int, list[int]] = {0: [], 1: [], 2: []}  # the version that each of a worker's gradients made
    ahead = -(-batch // 3)  # how many a worker has to make of one batch
    for number, turn in enumerate(noted.turns):
        made = applied[turn.rank]
        if len(made) >= ahead:
            assert turn.version >= made[-ahead]
        made.append(number // batch + 1)
    assert all(len(made) >= 4 for made in applied.values())


# Lag ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [None, 4, 1, 0])
def test_lag_is_measured_and_bounded_and_nobody_waits_without_a_bound(
    max_lag: int | None, Paced: Any, task: Any
) -> None:
    """Worker 3 is 8 times slower than the three others."""
    method, env = task("a2c", "discrete")
    noted = run(AsyncGradients(4, 4, 4, max_lag=max_lag), method, Paced(env, (1.0, 1.0, 1.0, 8.0)), Inline(), 60)
    lags = [number - turn.version for number, turn in enumerate(noted.turns[:60])]
    for report, lag in zip(noted.reports, lags, strict=True):
        assert (report.lags == lag).all()
        assert report.lag.max == lag
    ranks = [turn.rank for turn in noted.turns[:60]]
    if max_lag is None:
        assert max(lags) >= 20  # while the slow one computes, each of the others applies 8
        assert 1 <= ranks.count(3) <= 4
    else:
        assert 0 <= min(lags) <= max(lags) <= max_lag
        assert set(ranks) == {0, 1, 2, 3}
    told = np.concatenate([report.lags for report in noted.reports])
    assert told.max() == max(lags)


# Again ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_the_same_again(task: Any, Paced: Any) -> None:
    method, env = task("a2c", "recurrent", normalize_reward=True)
    slow = Paced(env, (1.0, 2.3, 0.7))
    for plan in (AsyncGradients(3, 6, 8), AsyncGradients(3, 6, 8, batch_gradients=2, max_lag=2)):
        first = run(plan, method, slow, Inline(), 12)
        again = run(plan, method, env, Inline(), 12, schedule=Schedule.read(first.lines))
        assert again.digests == first.digests
        assert len(set(first.digests.values())) == 12
        assert again.lines == first.lines
        assert run(plan, method, env, Inline(), 12).digests != first.digests  # it is the schedule that makes them so


@pytest.mark.slow
def test_two_hundred_gradients_of_processes_are_the_same_everywhere(task: Any) -> None:
    method, env = task("a2c", "discrete", normalize_observation=True)
    plan = AsyncGradients(3, 6, 8)
    first = run(plan, method, Sleepy(env, 0.001), Processes(), 200)
    schedule = Schedule.read(first.lines)
    assert sum(len(line) + 1 for line in first.lines[1:]) <= 64 * len(schedule.turns)
    assert run(plan, method, env, Inline(), 200, schedule=schedule).digests == first.digests
    assert run(plan, method, Sleepy(env, 0.001), Threads(), 200, schedule=schedule).digests == first.digests


def test_what_a_schedule_does_not_fit_is_named(task: Any) -> None:
    method, env = task("a2c", "continuous")
    plan = AsyncGradients(2, 4, 8)
    schedule = Schedule.read(run(plan, method, env, Inline(), 4).lines)
    with pytest.raises(ConfigError, match=r"plan\.batch_gradients was 1, is 2"):
        run(dataclasses.replace(plan, batch_gradients=2), method, env, Inline(), 4, schedule=schedule)
    with pytest.raises(ConfigError, match="update 1 made weights"):
        run(plan, dataclasses.replace(method, learning_rate=0.5), env, Inline(), 4, schedule=schedule)


def test_a_run_goes_on_from_a_snapshot(task: Any, within: Any) -> None:
    method, env = task("a2c", "discrete")
    plan = AsyncGradients(2, 4, 8)
    before = run(plan, method, env, within, 3)
    first = run(plan, method, env, within, 4, state=before.states[-1])
    assert first.reports[0].version == 4
    assert first.reports[0].env_steps > before.reports[-1].env_steps
    schedule = Schedule.read(first.lines)
    assert run(plan, method, env, Inline(), 4, state=before.states[-1], schedule=schedule).digests == first.digests
    with pytest.raises(ConfigError, match="gone on"):
        first.reports[0].snapshot()


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_is_found_or_left_out() -> None:
    """The third rollout of the second worker."""
    fine, bad = ((1.0, 2.0, 3.0), "terminated"), ((1.0, 2.0, float("inf")), "terminated")
    env = Scripted([fine], [[fine, fine, bad]])
    plan = AsyncGradients(2, 2, 4)
    with pytest.raises(RoleFailed) as found:
        run(plan, A2C(hidden=(4,)), env, Inline(), 20)
    assert isinstance(found.value.__cause__, NonFinite)
    assert "reward of environment 1 is inf" in str(found.value.__cause__)
    learner = Learner(A2C(hidden=(4,)), env.spec, seed=1, non_finite="skip")
    noted = run(plan, learner.method, env, Inline(), 12, learner=learner)
    skipped = [version for version, digest in noted.digests.items() if noted.digests.get(version - 1) == digest]
    assert skipped
    assert noted.reports[-1].dropped == {"non_finite": 3 * len(skipped)}
    assert all(parameter.isfinite().all() for parameter in learner.net.parameters())


@pytest.mark.slow
def test_a_worker_s_failure_comes_again(task: Any, Failing: Any) -> None:
    method, env = task("a2c", "discrete")
    plan, learner, lines = AsyncGradients(3, 3, 8), Learner(task("a2c", "discrete")[0], env.spec, seed=1), list[str]()
    with pytest.raises(RoleFailed) as found:
        run(plan, method, Failing(Sleepy(env, 0.002), 1, at=100), Processes(), 10**6, learner, journal=lines.append)
    schedule = Schedule.read(lines)
    assert 1 in {turn.rank for turn in schedule.turns if turn.fate == "begun"}
    again = Learner(method, env.spec, seed=1)
    with pytest.raises(RoleFailed) as same:
        run(plan, method, Failing(env, 1, at=100), Inline(), 10**6, again, schedule=schedule)
    assert again.digest() == learner.digest()
    assert (same.value.role, same.value.rank) == (found.value.role, found.value.rank) == ("work", 1)
    assert "the ball rolled off the table" in str(same.value)
