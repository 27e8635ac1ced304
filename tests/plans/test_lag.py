"""Which weights acted: proven by working out the log-probabilities again, not read off the data."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from headrace import ConfigError, Inline, Learner, Processes, SyncBatches, Threads
from headrace.envs.toy import Sleepy

pytestmark = pytest.mark.timeout(60)

SAME = 1e-5
OTHER = 1e-4
"""Versions next to each other differ by more than this somewhere in a rollout."""

TABLE = list(product(("a2c", "ppo"), (0, 1, 2), (1, 2, 3), ("discrete", "continuous", "recurrent")))
FEW = [
    ("a2c", 0, 2, "recurrent", Inline()),
    ("ppo", 0, 3, "continuous", Processes()),
    ("ppo", 1, 2, "discrete", Threads()),
    ("ppo", 1, 1, "recurrent", Processes()),
    ("a2c", 2, 3, "continuous", Inline()),
    ("ppo", 2, 2, "recurrent", Processes()),
]


def name(row: Any) -> str:
    return "-".join(str(value) for value in row if isinstance(value, str | int))


def acted_with(version: int, rollout: Any, weights: Any, method: Any, spec: Any, log_probs: Any) -> None:
    """Check that this version, and no version beside it, gives the log-probabilities that the actor stored."""
    valid = rollout.valid

    def distance(other: int) -> float:
        return float((log_probs(method, spec, weights[other], rollout) - rollout.log_prob)[valid].abs().max())

    assert (rollout.version == version).all()
    assert distance(version) <= SAME
    for other in (version - 1, version + 1):
        if other in weights:
            assert distance(other) > OTHER, f"versions {version} and {other} cannot be told apart"


def lag_is_exact(row: Any, task: Any, train: Any, log_probs: Any) -> None:
    method_name, max_lag, actors, kind, place = row
    method, env = task(method_name, kind)
    run = train(method, Sleepy(env, 0.001), place, updates=5, max_lag=max_lag, actors=actors)
    assert sorted(run.weights) == list(range(6))
    for k, (rollout, report) in enumerate(zip(run.rollouts, run.reports, strict=True)):
        version = max(0, k - max_lag)
        assert (rollout.sequence == k).all()
        acted_with(version, rollout, run.weights, method, env.spec, log_probs)
        assert set(report.lags.tolist()) == {k - version}
        assert len(report.lags) == rollout.valid.sum()


@pytest.mark.parametrize("row", FEW, ids=name)
def test_the_weights_of_version_k_minus_max_lag_acted(row: Any, task: Any, train: Any, log_probs: Any) -> None:
    lag_is_exact(row, task, train, log_probs)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=name)
def test_the_weights_of_version_k_minus_max_lag_acted_in_all_of_the_table(
    row: Any, task: Any, train: Any, log_probs: Any
) -> None:
    lag_is_exact((*row, Processes()), task, train, log_probs)


# Going on from a snapshot ---------------------------------------------------------------------------------------------


def contents(tree: Any) -> Any:
    """A snapshot as plain values, which compare."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.tolist()
    if isinstance(tree, dict):
        return {key: contents(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [contents(value) for value in tree]
    if hasattr(tree, "version"):
        return tree.version, dict(tree.values)
    return tree


def begun(method: Any, env: Any, place: Any, train: Any, *, at: int, **plan: Any) -> tuple[Any, Any]:
    """A run that goes on beyond version `at`, and its snapshot there."""
    taken: list[Any] = []

    def each(report: Any) -> None:
        if report.version == at:
            taken.append((report.snapshot(), report.snapshot()))

    run = train(method, env, place, updates=at + 2, each=each, **plan)
    ((snapshot, again),) = taken
    assert contents(snapshot) == contents(again)
    return run, snapshot


@pytest.mark.parametrize(
    ("max_lag", "at", "kind"),
    [(0, 2, "discrete"), (1, 2, "recurrent"), (2, 3, "continuous"), (2, 1, "discrete")],
)
def test_a_run_goes_on_from_a_snapshot(
    max_lag: int, at: int, kind: str, task: Any, train: Any, log_probs: Any, digest: Any
) -> None:
    method, env = task("ppo", kind)
    plan = {"actors": 2, "max_lag": max_lag}
    first, snapshot = begun(method, env, Inline(), train, at=at, **plan)
    before = contents(snapshot)
    found = []
    for place in (Inline(), Processes()):
        run = train(method, env, place, updates=3, state=snapshot, **plan)
        assert contents(snapshot) == before
        assert [report.version for report in run.reports] == [at + 1, at + 2, at + 3]
        assert min(run.weights) == at
        for name, tensor in run.weights[at].items():
            assert torch.equal(tensor, first.weights[at][name])
        weights = {**{version: first.weights[version] for version in range(at)}, **run.weights}
        env_steps = first.reports[at - 1].env_steps
        for k, (rollout, report) in enumerate(zip(run.rollouts, run.reports, strict=True), at):
            assert (rollout.sequence == k).all()
            acted_with(max(0, k - max_lag), rollout, weights, method, env.spec, log_probs)
            env_steps += int(rollout.valid.sum())
            assert report.env_steps == env_steps
            assert report.lag.max == min(k, max_lag)
            assert report.gradient_steps == 4 * (k + 1)
            assert report.samples_learned == 2 * env_steps
        found.append(digest(run.learner))
    assert found[0] == found[1]


def test_a_resumed_run_does_not_repeat_what_came_before(task: Any, train: Any) -> None:
    """Environments begin anew, with numbers of their own: nothing is learned a second time."""
    method, env = task("ppo", "continuous")
    first, snapshot = begun(method, env, Inline(), train, at=2, actors=2)
    run = train(method, env, Inline(), updates=2, state=snapshot, actors=2)
    seen = {row.numpy().tobytes() for rollout in first.rollouts for row in rollout.observation.flatten(0, 1)}
    assert seen
    for rollout in run.rollouts:
        assert not seen & {row.numpy().tobytes() for row in rollout.observation.flatten(0, 1)}


def test_a_snapshot_is_a_copy(task: Any, train: Any) -> None:
    """What training does afterwards does not reach it."""
    method, env = task("ppo", "discrete")
    run, snapshot = begun(method, env, Inline(), train, at=2, actors=2, max_lag=1)
    for name, tensor in snapshot["learner"]["net"].items():
        assert torch.equal(tensor, run.weights[2][name])
    assert [note.version for note, _ in snapshot["weights"]] == [1, 2]
    for note, tensors in snapshot["weights"]:
        held = list(run.weights[note.version].values())
        assert len(tensors) == len(held)
        assert all(any(torch.equal(tensor, other) for other in held) for tensor in tensors)


def test_a_learner_goes_on_with_all_of_a_state(task: Any, train: Any) -> None:
    """Network, optimizer, generator and counters: what it holds is then what was loaded."""
    method, env = task("ppo", "discrete")
    _, snapshot = begun(method, env, Inline(), train, at=2)
    learner = Learner(method, env.spec, seed=8)
    assert contents(learner.state()) != contents(snapshot["learner"])
    learner.load_state(snapshot["learner"])
    assert contents(learner.state()) == contents(snapshot["learner"])
    assert learner.version == 2


def test_the_learning_rate_is_the_method_s_not_the_state_s(task: Any, train: Any) -> None:
    method, env = task("ppo", "discrete", learning_rate=1e-2, anneal_lr=False)
    _, snapshot = begun(method, env, Inline(), train, at=1)
    learner = Learner(replace(method, learning_rate=1e-5), env.spec)
    learner.load_state(snapshot["learner"])
    assert [group["lr"] for group in learner._optimizers["net"].param_groups] == [1e-5]


def test_a_larger_max_lag_begins_with_the_oldest_weights_there_are(task: Any, train: Any) -> None:
    method, env = task("a2c", "discrete")
    _, snapshot = begun(method, env, Inline(), train, at=3, max_lag=1)
    run = train(method, env, Inline(), updates=4, state=snapshot, max_lag=2)
    assert [rollout.version.unique().tolist() for rollout in run.rollouts] == [[2], [2], [3], [4]]


@pytest.mark.parametrize("state", [{}, {"learner": 1}, {"learner": {}, "weights": []}, {"learner": 7, "weights": []}])
def test_a_state_that_is_none_is_refused(state: Any, task: Any, train: Any) -> None:
    method, env = task("a2c", "discrete")
    with pytest.raises(ConfigError, match="state"):
        train(method, env, Inline(), updates=1, state=state)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_smaller_max_lag_goes_on_from_a_snapshot(max_lag: int, task: Any, train: Any) -> None:
    method, env = task("a2c", "discrete")
    _, snapshot = begun(method, env, Inline(), train, at=3, max_lag=2)
    run = train(method, env, Inline(), updates=3, state=snapshot, max_lag=max_lag)
    assert [report.lag for report in run.reports] == [(max_lag,) * 3] * 3


def test_another_number_of_actors_goes_on_from_a_snapshot(task: Any, train: Any, place: Any) -> None:
    method, env = task("a2c", "recurrent")
    _, snapshot = begun(method, env, Inline(), train, at=2, actors=2, max_lag=1)
    run = train(method, env, place, updates=3, state=snapshot, actors=3, max_lag=1)
    assert [rollout.sequence.tolist() for rollout in run.rollouts] == [[k] * 6 for k in (2, 3, 4)]
    assert [rollout.version.unique().tolist() for rollout in run.rollouts] == [[1], [2], [3]]


def test_a_snapshot_can_be_taken_only_while_the_plan_waits_there(task: Any) -> None:
    method, env = task("a2c", "discrete")
    plan = SyncBatches(actors=2, num_envs=6, num_steps=8)
    reports = plan.run(Learner(method, env.spec), env, Inline(), env_steps=10**9)
    first = next(reports)
    assert first.snapshot()["learner"]["counters"]["version"] == 1
    second = next(reports)
    with pytest.raises(ConfigError, match="gone on"):
        first.snapshot()
    assert second.snapshot()["learner"]["counters"]["version"] == 2
    reports.close()
    for report in (first, second):
        with pytest.raises(ConfigError):
            report.snapshot()


def test_a_report_of_a_learner_by_itself_has_no_snapshot(task: Any) -> None:
    method, env = task("a2c", "discrete", memory=None)
    learner = Learner(method, env.spec)
    report = learner.update(learner.prepare(learner.example(8, 6)))
    with pytest.raises(ConfigError, match="plan"):
        report.snapshot()


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_a_learner_that_has_learned_runs_again(task: Any, train: Any, log_probs: Any, max_lag: int) -> None:
    """Without a snapshot, past versions are unknown: the newest weights act first, and the lag says so."""
    method, env = task("ppo", "discrete")
    first = train(method, env, Inline(), updates=2, actors=2, max_lag=max_lag)
    run = train(method, env, Inline(), updates=4, learner=first.learner, actors=2, max_lag=max_lag)
    assert [report.version for report in run.reports] == [3, 4, 5, 6]
    for k, rollout in enumerate(run.rollouts, 2):
        acted_with(max(2, k - max_lag), rollout, run.weights, method, env.spec, log_probs)


def test_a_state_of_another_method_is_refused(task: Any, train: Any) -> None:
    method, env = task("ppo", "discrete")
    _, snapshot = begun(method, env, Inline(), train, at=1)
    for other, _ in (task("ppo", "discrete", hidden=(9,)), task("ppo", "discrete", shared=True)):
        with pytest.raises(ConfigError, match="state"):
            train(other, env, Inline(), state=snapshot)
