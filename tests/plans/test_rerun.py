"""Asynchronous runs can be executed again, bit for bit, from the schedule that they wrote."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from headrace import A2C, ConfigError, Inline, Learner, NonFinite, Processes, RoleFailed, Threads
from headrace.envs.toy import Scripted, Sleepy
from headrace.plans.async_batches import AsyncBatches
from headrace.plans.schedule import Journal, Schedule, Turn

pytestmark = pytest.mark.timeout(60)

PLAN = {**asdict(AsyncBatches(3, 3, 8, batch_rollouts=2, max_lag=2)), "passes": 1}
HEADING = {"seed": 1, "start": 0, "weights": "0badcafe", "horizon": 1000, "plan": PLAN}
TURNS = [
    Turn(0, 0, "learned", 8),
    Turn(2, 0, "learned", 3),
    Turn(1, 0, "dropped", 8),
    Turn(0, 1, "learned", 8),
    Turn(2, 1, "begun", 8),
]


def written() -> list[str]:
    lines: list[str] = []
    journal = Journal(lines.append, HEADING)
    for number, turn in enumerate(TURNS):
        journal.add(turn)
        if number == 1:
            journal.updated(1, "0123456789abcdef")
    return lines


def test_a_schedule_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "schedule").write_text("".join(f"{line}\n" for line in written()))
    with open(tmp_path / "schedule") as file:
        schedule = Schedule.read(file)
    assert schedule.turns == tuple(TURNS)
    assert schedule.digests == {1: "01234567"}
    assert {**schedule.heading, "format": 1} == {"format": 1, **HEADING}
    schedule.check(HEADING)
    assert schedule.banks == 2  # the third rollout acted with version 0, and was taken at version 1


def test_a_rollout_takes_at_most_64_bytes() -> None:
    lines: list[str] = []
    journal = Journal(lines.append, HEADING)
    before = len(lines)
    journal.add(Turn(999, 9_999_999, "learned", 9_999))
    journal.updated(9_999_999, "f" * 64)
    assert sum(len(line) + 1 for line in lines[before:]) <= 64


@pytest.mark.parametrize("number", range(len(TURNS)))
@pytest.mark.parametrize("how", ["changed", "lost", "doubled"])
def test_a_damaged_schedule_is_refused(number: int, how: str) -> None:
    """Anywhere but at its end, where what is left is the schedule of a shorter run."""
    lines = written()
    if how == "changed":
        place = len(lines[number]) // 3
        lines[number] = lines[number][:place] + chr(ord(lines[number][place]) ^ 1) + lines[number][place + 1 :]
    elif how == "doubled":
        lines.insert(number, lines[number])
    else:
        del lines[number]
    with pytest.raises(ConfigError, match="damaged in line"):
        Schedule.read(lines)


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    lines = written()
    for rest in range(len(lines[-1])):
        assert Schedule.read([*lines[:-1], lines[-1][:rest]]).turns == tuple(TURNS[:-1])
    assert Schedule.read(lines[:-1]).turns == tuple(TURNS[:-1])
    with pytest.raises(ConfigError, match="empty"):
        Schedule.read([])


def test_a_schedule_of_another_run_is_refused() -> None:
    schedule = Schedule.read(written())
    with pytest.raises(ConfigError) as found:
        schedule.check({**HEADING, "seed": 2, "plan": {**PLAN, "max_lag": 3}})
    assert "plan.max_lag was 2, is 3; seed was 1, is 2" in str(found.value)
    with pytest.raises(ConfigError, match="update 1 made weights ffffffff, and 01234567"):
        schedule.check_weights(1, "f" * 64)
    schedule.check_weights(2, "f" * 64)  # of which the schedule says nothing


def run(
    plan: AsyncBatches,
    method: Any,
    env: Any,
    place: Any,
    updates: int,
    *,
    learner: Learner | None = None,
    **given: Any,
) -> dict[int, str]:
    """Run the plan; the digest of every version's weights."""
    learner = learner or Learner(method, env.spec, seed=1)
    found = {}
    reports = plan.run(learner, env, place, env_steps=10**9, horizon=10_000, **given)
    with closing(reports):  # type: ignore[type-var]
        for report in reports:
            found[report.version] = learner.digest()
            if len(found) == updates:
                break
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("on_stale", "passes"), [("wait", 1), ("drop", 1), ("wait", 2)])
def test_a_run_is_the_same_again(on_stale: Any, passes: int, task: Any) -> None:
    method, env = task("a2c", "recurrent")
    plan = AsyncBatches(3, 6, 8, batch_rollouts=2, max_lag=passes, on_stale=on_stale, passes=passes)
    lines: list[str] = []
    first = run(plan, method, Sleepy(env, 0.01), Inline(), 16, journal=lines.append)
    schedule = Schedule.read(lines)
    assert {turn.fate for turn in schedule.turns} == ({"learned", "dropped"} if on_stale == "drop" else {"learned"})
    again: list[str] = []
    assert run(plan, method, env, Inline(), 16, schedule=schedule, journal=again.append) == first
    assert again[: len(lines) - 1] == lines[: len(lines) - 1]
    others = [run(plan, method, Sleepy(env, 0.01), Inline(), 16) for _ in range(2)]
    assert any(other != first for other in others)  # so that it is the schedule which makes them the same


@pytest.mark.slow
@pytest.mark.parametrize(("on_stale", "updates"), [("wait", 200), ("cut", 60), ("drop", 60)])
def test_two_hundred_updates_of_processes_are_the_same_on_inline(on_stale: Any, updates: int, task: Any) -> None:
    method, env = task("ppo", "discrete")
    plan = AsyncBatches(4, 8, 8, batch_rollouts=2, max_lag=3, on_stale=on_stale)
    lines: list[str] = []
    first = run(plan, method, Sleepy(env, 0.002), Processes(), updates, journal=lines.append)
    schedule = Schedule.read(lines)
    assert sum(len(line) + 1 for line in lines[1:]) <= 64 * len(schedule.turns)
    assert run(plan, method, env, Inline(), updates, schedule=schedule) == first
    assert len(set(first.values())) == updates
    if on_stale == "wait":
        short = replace(schedule, turns=schedule.turns[:80])
        assert run(plan, method, Sleepy(env, 0.002), Threads(), updates, schedule=short) == {
            version: digest for version, digest in first.items() if version <= 40
        }


def test_what_the_schedule_does_not_fit_is_named(task: Any) -> None:
    method, env = task("a2c", "continuous")
    plan = AsyncBatches(2, 6, 8, batch_rollouts=2, max_lag=2)
    lines: list[str] = []
    run(plan, method, env, Inline(), 4, journal=lines.append)
    schedule = Schedule.read(lines)
    with pytest.raises(ConfigError, match=r"plan\.max_lag was 2, is 3"):
        run(replace(plan, max_lag=3), method, env, Inline(), 4, schedule=schedule)
    with pytest.raises(ConfigError, match="weights was"):
        run(
            plan,
            method,
            env,
            Inline(),
            4,
            schedule=schedule,
            learner=Learner(replace(method, hidden=(9,)), env.spec, seed=1),
        )
    with pytest.raises(ConfigError, match="update 1 made weights"):
        run(plan, replace(method, learning_rate=0.5), env, Inline(), 4, schedule=schedule)


@pytest.mark.slow
def test_a_run_that_went_on_from_a_snapshot_is_the_same_again(task: Any) -> None:
    method, env = task("a2c", "discrete")
    plan = AsyncBatches(2, 6, 8, batch_rollouts=2, max_lag=2)
    learner = Learner(method, env.spec, seed=1)
    reports = plan.run(learner, env, Inline(), env_steps=10**9, horizon=10_000)
    with closing(reports):  # type: ignore[type-var]
        state = [next(reports).snapshot() for _ in range(3)][-1]
    lines: list[str] = []
    first = run(plan, method, Sleepy(env, 0.01), Inline(), 6, state=state, journal=lines.append)
    assert min(first) == 4
    assert run(plan, method, env, Inline(), 6, state=state, schedule=Schedule.read(lines)) == first


# Failures -------------------------------------------------------------------------------------------------------------


def fails(plan: AsyncBatches, method: Any, env: Any, place: Any, error: type[Exception], **given: Any) -> Any:
    """The digests up to the failure, and the failure. An update that ended in it has no report, but made weights."""
    learner = Learner(method, env.spec, seed=1)
    found = {}
    try:
        for report in plan.run(learner, env, place, env_steps=10**9, horizon=10_000, **given):
            found[report.version] = learner.digest()
    except error as failure:
        return {**found, learner.version: learner.digest()}, failure
    raise AssertionError(f"no {error.__name__}")


@pytest.mark.slow
def test_a_learner_s_failure_comes_again(task: Any) -> None:
    """A reward that is not finite, on the fifth step of the tenth episode."""
    script = [((1.0, 2.0, 3.0), "terminated")] * 9 + [((1.0, 2.0, 3.0, 4.0, float("inf")), "terminated")]
    plan = AsyncBatches(3, 3, 4, batch_rollouts=2, max_lag=2)
    method, env = A2C(hidden=(4,)), Scripted(script)
    lines: list[str] = []
    first, error = fails(plan, method, Sleepy(env, 0.01), Inline(), NonFinite, journal=lines.append)
    again, same = fails(plan, method, env, Inline(), NonFinite, schedule=Schedule.read(lines))
    assert again == first
    assert str(same) == str(error)


@pytest.mark.slow
def test_an_actor_s_failure_comes_again(task: Any, Failing: Any) -> None:
    """Recorded on processes, where it kills one; seen again on Inline, where a debugger can be attached."""
    method, env = task("a2c", "discrete")
    plan = AsyncBatches(3, 3, 8, batch_rollouts=2, max_lag=2)
    lines: list[str] = []
    failing = Failing(Sleepy(env, 0.002), 1, at=100)
    first, error = fails(plan, method, failing, Processes(), RoleFailed, journal=lines.append)
    schedule = Schedule.read(lines)
    begun = [turn for turn in schedule.turns if turn.fate == "begun"]
    assert 1 in {turn.rank for turn in begun}
    again, same = fails(plan, method, Failing(env, 1, at=100), Inline(), RoleFailed, schedule=schedule)
    assert again == first
    assert (same.role, same.rank) == (error.role, error.rank) == ("collect", 1)
    assert "the ball rolled off the table" in str(same)
