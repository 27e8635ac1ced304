"""SyncGradients: every worker learns, and all together learn what one would from all their rollouts."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from headrace import (
    A2C,
    PPO,
    ConfigError,
    Env,
    Inline,
    Learner,
    NonFinite,
    Processes,
    RoleFailed,
    Rollout,
    Spec,
    SyncBatches,
)
from headrace.channel import role
from headrace.envs.base import CheckedVectorEnv
from headrace.envs.toy import Scripted, Sleepy, Target
from headrace.errors import HeadraceError
from headrace.plans.schedule import Schedule
from headrace.plans.sync_gradients import SyncGradients

pytestmark = pytest.mark.timeout(60)

SHARED = "headrace_test_shared_gradients"


@pytest.fixture
def shared() -> Iterator[types.ModuleType]:
    """A module that the roles of one process find in sys.modules under the name SHARED."""
    module = types.ModuleType(SHARED)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture(scope="session")
def Paced() -> Any:
    """Paced(env, seconds): every step of environment i takes seconds[i] of the placement's clock."""

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
            self.vector, self.seconds = env.env.make(indices), sum(env.seconds[index] for index in indices)

        def _reset(self, seed: int) -> Any:
            return self.vector.reset(seed)

        def _step(self, action: Any) -> Any:
            role().sleep(self.seconds)
            return self.vector.step(action)

    return Paced


def run(
    plan: Any,
    method: Any,
    env: Env,
    place: Any,
    updates: int,
    each: Callable[[Any], None] = lambda report: None,
    learner: Learner | None = None,
    **given: Any,
) -> tuple[Learner, list[Any]]:
    """The learner after so many updates, and their reports."""
    learner, reports = learner or Learner(method, env.spec, seed=1), []
    with closing(plan.run(learner, env, place, env_steps=10**9, horizon=10_000, **given)) as running:
        for report in running:
            reports.append(report)
            each(report)
            if len(reports) == updates:
                break
    return learner, reports


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
        ({"num_steps": True}, "num_steps=True"),
        ({"verify_every": 0}, "verify_every=0"),
        ({"workers": 3, "num_envs": 8}, "8 cannot be divided evenly among 3 workers. Nearest: num_envs 6 or 9"),
        ({"cut_off": 0}, "cut_off=0"),
        ({"cut_off": 1.5}, "cut_off=1.5"),
        ({"env_timeout": 0.0}, "env_timeout=0.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields: Any, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        SyncGradients(**fields)
    assert said in str(found.value)


def test_what_does_not_fit_is_refused_before_a_role_starts(task: Any) -> None:
    method, env = task("ppo", "continuous", num_minibatches=7)
    plan, learner = SyncGradients(num_steps=4), Learner(method, env.spec)
    with pytest.raises(ConfigError, match="minibatches"):
        plan.run(learner, env, Inline(), env_steps=100)
    method, env = task("a2c", "continuous")
    learner = Learner(method, env.spec)
    with pytest.raises(ConfigError, match="no schedule"):
        plan.run(learner, env, Inline(), env_steps=100, schedule=Schedule({}, (), {}))
    with pytest.raises(ConfigError, match="state has nothing"):
        plan.run(learner, env, Inline(), env_steps=100, state={})


# The same as one learner ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a2c", "ppo"])
def test_one_worker_alone_is_a_synchronous_batch(name: str, task: Any) -> None:
    method, env = task(name, "discrete")
    one, told = run(SyncGradients(1, 6, 8), method, env, Inline(), 4)
    other, expected = run(SyncBatches(1, 6, 8), method, env, Inline(), 4)
    assert one.digest() == other.digest()
    assert [report.env_steps for report in told] == [report.env_steps for report in expected]
    assert [report.metrics for report in told] == [report.metrics for report in expected]


LAWS = {
    "a2c": A2C(hidden=(8,), learning_rate=0.3, normalize_advantage=True, max_grad_norm=None),
    "ppo": PPO(hidden=(8,), learning_rate=0.3, update_epochs=2, num_minibatches=1, target_kl=10.0),
    "gru": A2C(hidden=(8,), learning_rate=0.3, memory="gru", normalize_advantage=True),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("cut_off", [pytest.param(None, marks=pytest.mark.slow), 0.6])
def test_workers_learn_what_one_learner_would(name: str, cut_off: float | None, shared: Any, Paced: Any) -> None:
    """From all rollouts as one batch, however unequal they are: those of the slowest worker are cut to a half."""

    @dataclasses.dataclass(frozen=True)
    class Noting(type(LAWS[name])):  # type: ignore[misc]
        def prepare(self, net: Any, rollout: Any) -> Any:
            sys.modules[SHARED].seen.append(rollout.clone())  # type: ignore[attr-defined]
            return super().prepare(net, rollout)

    shared.seen = []
    method = descending(Noting(**vars(LAWS[name])))
    env = Paced(Target(dimensions=2, length=3), (1.0, 1.0, 1.0, 2.0, 0.1, 0.1, 1.0, 0.5))
    plan = SyncGradients(4, 8, 8, cut_off=cut_off)
    learner, reports = run(plan, method, env, Inline(), 3)
    one = Learner(descending(LAWS[name]), env.spec, seed=1)
    short = []
    for number, report in enumerate(reports):
        rollouts = sorted(shared.seen[4 * number : 4 * number + 4], key=lambda rollout: int(rollout.rank[0]))
        short += [int((rollout.version[:, 0] >= 0).sum()) for rollout in rollouts if (rollout.version < 0).any()]
        whole = Rollout.cat(rollouts)
        one.anneal(one.env_steps / 10_000)
        expected = one.update(one.prepare(whole))
        for key in expected.metrics.keys() - {"losses/explained_variance"}:  # a mean of each worker's own
            assert report.metrics[key] == pytest.approx(expected.metrics[key], rel=1e-4, abs=1e-5)
        for field in ("env_steps", "samples_learned", "gradient_steps", "version", "running_return"):
            assert getattr(report, field) == pytest.approx(getattr(expected, field))
        assert sorted(report.episode_returns) == pytest.approx(sorted(expected.episode_returns))
        assert (report.lags == 0).all()
        assert len(report.lags) == len(expected.lags)
    assert bool(short) is (cut_off is not None)
    assert all(2 <= rows < 8 for rows in short)
    moved = Learner(method, env.spec, seed=1).net.state_dict()
    for key, tensor in one.net.state_dict().items():
        torch.testing.assert_close(learner.net.state_dict()[key], tensor, rtol=1e-6, atol=1e-6)
    assert max(float((moved[key] - tensor).abs().max()) for key, tensor in one.net.state_dict().items()) > 1e-3


# The same everywhere --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "workers"), [("ppo", "discrete", 3), ("a2c", "continuous", 2), ("ppo", "recurrent", 2)]
)
def test_one_hash_on_all_placements(name: str, kind: str, workers: int, task: Any, places: Any) -> None:
    normalized = {} if kind == "recurrent" else {"normalize_observation": True}
    method, env = task(name, kind, normalize_reward=True, **normalized)
    plan = SyncGradients(workers, 12, 8, verify_every=1)
    runs = {
        where: run(plan, method, env if where == "inline" else Sleepy(env, 0.002), place, 6)
        for where, place in places.items()
    }
    assert len({learner.digest() for learner, _ in runs.values()}) == 1
    told = [[(report.metrics, report.env_steps, report.samples_learned) for report in reports]
            for _, reports in runs.values()]  # fmt: skip
    assert told == told[:1] * len(told)
    assert run(plan, method, env, Inline(), 6, learner=Learner(method, env.spec, seed=2))[0].digest() not in {
        learner.digest() for learner, _ in runs.values()
    }


def test_a_run_goes_on_from_a_snapshot(task: Any, within: Any) -> None:
    method, env = task("ppo", "discrete")
    plan, states = SyncGradients(2, 6, 8), []
    learner, reports = run(plan, method, env, within, 3, each=lambda report: states.append(report.snapshot()))
    with pytest.raises(ConfigError, match="gone on"):
        reports[0].snapshot()
    assert states[-1]["learner"]["counters"]["version"] == 3
    (first, ours), (second, theirs) = (run(plan, method, env, within, 2, state=states[-1]) for _ in range(2))
    assert first.digest() == second.digest() != learner.digest()
    assert ours[-1].version == theirs[-1].version == 5
    assert ours[0].env_steps > reports[-1].env_steps
    assert ours[0].samples_learned > reports[-1].samples_learned


def test_the_caller_s_learner_is_whole_at_every_report(task: Any) -> None:
    """Its optimizer's state too: after a report it may be used, or saved, like any other."""
    method, env = task("ppo", "discrete")
    digests: list[str] = []

    def look(report: Any) -> None:
        state = report.snapshot()["learner"]
        copy = Learner(method, env.spec, seed=9)
        copy.load_state(state)
        digests.append(copy.digest())
        assert all(float(held["step"]) == report.gradient_steps for held in state["optimizers"]["net"].values())

    learner, _ = run(SyncGradients(2, 6, 8), method, env, Inline(), 3, each=look)
    assert digests[-1] == learner.digest()
    assert len(set(digests)) == 3


def test_the_run_ends_with_its_steps(task: Any) -> None:
    method, env = task("a2c", "continuous")
    learner = Learner(method, env.spec, seed=1)
    reports = list(SyncGradients(3, 6, 5).run(learner, env, Inline(), env_steps=100))
    assert reports[-2].env_steps < 100 <= reports[-1].env_steps == learner.env_steps


def test_episodes_of_all_workers_are_reported() -> None:
    env = Scripted([((1.0, 2.0), "terminated")], [[((5.0,), "truncated")]])  # environment i plays script i mod 2
    _, reports = run(SyncGradients(2, 4, 6), A2C(hidden=(4,)), env, Inline(), 1)
    assert sorted(reports[0].episode_returns) == [3.0] * 4 + [5.0] * 6
    assert reports[0].env_steps == 2 * (2 * 2) + 2 * 3


# Cuts -----------------------------------------------------------------------------------------------------------------


def test_a_straggler_s_rollout_is_cut_and_the_run_can_be_made_again(Paced: Any, task: Any) -> None:
    method, env = task("a2c", "discrete")
    plan, lines = SyncGradients(4, 4, 16, cut_off=0.6), list[str]()
    slow = Paced(env, (1.0, 1.0, 5.0, 1.0))
    clock: list[float] = []
    first, reports = run(
        plan, method, slow, Inline(), 6, journal=lines.append, each=lambda report: clock.append(role().clock())
    )
    schedule = Schedule.read(lines)
    rows = [turn.rows for turn in schedule.turns if turn.rank == 2]
    assert all(4 <= count < 16 for count in rows)
    assert all(turn.rows == 16 for turn in schedule.turns if turn.rank != 2)
    assert clock[-1] - clock[0] <= 1.5 * 5 * 16  # as long as those of equal workers, and not five times
    assert {report.metrics["perf/cut"] for report in reports} == {0.25}
    again, others = run(plan, method, env, Inline(), 7, schedule=schedule)
    assert again.digest() == first.digest()
    assert len(others) == 6
    with pytest.raises(ConfigError, match=r"plan\.cut_off was 0\.6, is 0\.8"):
        run(dataclasses.replace(plan, cut_off=0.8), method, env, Inline(), 6, schedule=schedule)


@pytest.mark.slow
def test_what_was_cut_on_processes_is_the_same_on_inline(Paced: Any, task: Any) -> None:
    method, env = task("ppo", "discrete")
    plan, lines = SyncGradients(3, 6, 16, cut_off=0.6), list[str]()
    slow = Paced(env, (0.001, 0.001, 0.004, 0.004, 0.001, 0.001))
    first, _ = run(plan, method, slow, Processes(), 30, journal=lines.append)
    schedule = Schedule.read(lines)
    assert any(turn.rows < 16 for turn in schedule.turns)
    assert sum(len(line) + 1 for line in lines[1:]) <= 64 * len(schedule.turns)
    assert run(plan, method, env, Inline(), 30, schedule=schedule)[0].digest() == first.digest()


# Failures -------------------------------------------------------------------------------------------------------------


def test_workers_whose_weights_differ_are_named(task: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Drifting(A2C):
        def after_update(self, net: Any, version: int) -> None:
            if role().rank == 1 and version == 3:
                with torch.no_grad():
                    next(net.parameters())[0, 0] += 1e-3

    _, env = task("a2c", "discrete")
    plan, reports = SyncGradients(4, 4, 8, verify_every=2), list[Any]()
    with pytest.raises(HeadraceError, match=r"after update 4 the weights of rank 1 of 4 are not those"):
        run(plan, Drifting(hidden=(4,)), env, Inline(), 9, each=reports.append)
    assert len(reports) == 3


@pytest.mark.parametrize("index", [0, 5])
def test_a_number_that_is_not_finite_is_found_at_any_worker(index: int) -> None:
    rewards = [((1.0, 2.0, float("inf")), "terminated")]
    fine = [[((1.0, 2.0, 3.0), "terminated")]] * 5
    scripts = [rewards, *fine] if index == 0 else [fine[0], *fine[1:], rewards]
    env = Scripted(scripts[0], scripts[1:])
    with pytest.raises((NonFinite, RoleFailed), match=f"reward of environment {index} is inf"):
        run(SyncGradients(2, 6, 4), A2C(hidden=(4,)), env, Inline(), 2)
    learner = Learner(A2C(hidden=(4,)), env.spec, seed=1, non_finite="skip")
    before = learner.digest()
    _, reports = run(SyncGradients(2, 6, 3, verify_every=1), learner.method, env, Inline(), 1, learner=learner)
    assert learner.digest() == before
    assert reports[0].dropped == {"non_finite": 18}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_worker_that_fails_ends_the_run_and_is_named(how: str, task: Any, Failing: Any) -> None:
    method, env = task("ppo", "discrete")
    learner = Learner(method, env.spec, seed=1)
    failing = Failing(env, 2, at=20, how=how)
    with pytest.raises(RoleFailed) as found:
        for _ in SyncGradients(3, 6, 8).run(learner, failing, Processes(), env_steps=10**9):
            pass
    assert (found.value.role, found.value.rank) == ("work", 1)
    assert learner.version == 2
