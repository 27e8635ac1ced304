"""A run as a value, its loop, and what it leaves in its folder."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import (
    A2C,
    PPO,
    CheckpointError,
    ConfigError,
    Env,
    Gymnasium,
    Inline,
    Learner,
    Processes,
    RoleFailed,
    Run,
    SyncBatches,
    Threads,
    evaluate,
)
from headrace.envs.toy import Recall, Target
from headrace.record.folder import RunFolder

pytestmark = pytest.mark.timeout(60)

SMALL = A2C(hidden=(8,), learning_rate=1e-2)
PLAN = SyncBatches(num_envs=4, num_steps=8)
TARGET = Target(dimensions=1, length=5)


def small(**fields: Any) -> Run:
    return Run(**{"method": SMALL, "env": TARGET, "plan": PLAN, "total_timesteps": 300, "seed": 1, **fields})


def plain(run: Run, env_steps: int) -> Learner:
    """The same learned without a run: a plan, a learner and a loop."""
    learner = Learner(run.method, run.env.spec, seed=run.seed)
    for _ in run.plan.run(learner, run.env, Inline(), env_steps=env_steps):
        pass
    return learner


@pytest.mark.parametrize("place", [Inline(), Threads(), pytest.param(Processes(), marks=pytest.mark.slow)])
def test_what_a_run_learns_is_what_its_parts_learn(place: Any) -> None:
    run = small(place=place)
    with run.reports() as reports:
        told = [report.env_steps for report in reports]
    assert told[-1] >= 300 > told[-2]
    assert run.learner.digest() == plain(run, 300).digest()


def test_a_run_in_two_parts_has_the_schedules_of_the_whole() -> None:
    rates, endless = [], Target(dimensions=1, length=10**6)  # where a new start loses no row
    for run, parts in ((small(env=endless), [300]), (small(env=endless), [100, 300])):
        state, found = None, []
        for until in parts:
            with run.reports(state, until) as reports:
                for report in reports:
                    found.append(report.learning_rates["net"])
                    if report.env_steps >= until:
                        state = report.snapshot()
        rates.append(found)
    assert rates[0] == rates[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"total_timesteps": 0}, "total_timesteps=0: give an integer from 1 on"),
        ({"total_timesteps": 1e5}, "total_timesteps=100000.0: give an integer"),
        ({"seed": -1}, "seed=-1: give an integer from 0 on"),
    ],
)
def test_what_a_run_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**fields)


def test_what_does_not_fit_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    run = small(method=PPO(num_minibatches=7))
    with pytest.raises(ConfigError, match="cannot be cut into 7 equal minibatches"):
        run.train(tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_folder_of_a_run(tmp_path: Path) -> None:
    run = small()
    result = run.train(tmp_path / "run", eval_every=100, eval_episodes=2, checkpoint_every=100)
    folder = RunFolder(tmp_path / "run")
    assert result.status == "finished"
    assert result.signal is None
    assert dict(result.summary) == folder.result()
    assert result.summary["weights_sha256"] == plain(run, 300).digest()
    assert result.summary["env_steps"] == run.learner.env_steps
    final = evaluate(run.method, run.learner.net, TARGET, 20, seed=1)
    assert result.summary["final_return"] == pytest.approx(float(final.mean()), rel=1e-6)
    assert result.summary["solved"] is None  # nobody says from when on it is
    assert result.summary["deterministic"] is True
    config = folder.config()
    assert config["learning_rate"] == 0.01
    assert config["plan.num_envs"] == 4
    assert config["origins"]["seed"] == "python"
    evaluated = [row["global_step"] for row in folder.metrics() if "eval/episodic_return" in row]
    assert len(evaluated) >= 3
    assert evaluated == sorted(evaluated)
    last = folder.checkpoints.latest()
    assert last is not None
    assert last.step == run.learner.env_steps


@pytest.mark.slow
def test_evaluations_and_checkpoints_change_nothing_that_is_learned(tmp_path: Path) -> None:
    method = PPO(hidden=(8,), num_minibatches=2, normalize_observation=True, normalize_reward=True, memory="gru")
    hashes = set()
    for every in (0, 32, 100):
        run = small(method=method, env=Recall(length=4))
        result = run.train(tmp_path / f"{every}", eval_every=every, eval_episodes=3, checkpoint_every=every)
        hashes.add(result.summary["weights_sha256"])
        rows = [row for row in RunFolder(tmp_path / f"{every}").metrics() if "eval/episodic_return" in row]
        assert bool(rows) == bool(every)
        assert all(row["eval/n"] == 3 and row["eval/version"] > 0 for row in rows)
    assert len(hashes) == 1


@pytest.mark.slow
def test_metrics_are_the_same_again_but_for_the_time(tmp_path: Path) -> None:
    told = []
    for name in "ab":
        small().train(tmp_path / name)
        rows = RunFolder(tmp_path / name).metrics()
        timed = ("time", "charts/SPS", "perf/", "stage/")
        told.append([{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows])
    assert told[0] == told[1]


class Interrupting(Exception):
    """Ends a run from within its loop."""


def after(run: Run, updates: int, act: Any) -> Any:
    """Have the learner call `act` at the end of so many updates."""
    update = run.learner.update

    def counted(batch: Any, *more: Any) -> Any:
        report = update(batch, *more)
        if run.learner.version == updates:
            act()
        return report

    run.learner.update = counted  # type: ignore[method-assign]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_update_and_it_goes_on_later(number: int, tmp_path: Path) -> None:
    """What it goes on to is what goes on from the snapshot of that update in memory."""
    run = after(small(), 4, lambda: signal.raise_signal(number))
    result = run.train(tmp_path / "run")
    assert (result.status, result.signal) == ("interrupted", number)
    assert run.learner.version == 4
    assert result.summary["final_return"] is None
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)

    reference, state = small(), None
    with reference.reports() as reports:
        for report in reports:
            if report.version == 4:
                state = report.snapshot()
                break
    again = small().train(tmp_path / "run", resume=True)
    assert again.status == "finished"
    straight = small()
    with straight.reports(state) as reports:
        told = [report.env_steps for report in reports]
    assert again.summary["env_steps"] == told[-1]
    assert again.summary["weights_sha256"] == straight.learner.digest()
    assert again.summary["deterministic"] is False
    steps = [row["global_step"] for row in RunFolder(tmp_path / "run").metrics() if "charts/episodes_finished" in row]
    assert steps == sorted(set(steps))


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    run = after(small(), 4, twice)
    with pytest.raises(KeyboardInterrupt):
        run.train(tmp_path / "run")
    result = RunFolder(tmp_path / "run").result()
    assert result is not None
    assert result["status"] == "interrupted"
    assert result["updates"] == 3  # the fourth was never told of


@pytest.mark.slow
def test_a_run_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(small().train(tmp_path / "run")))
    thread.start()
    thread.join(50)
    assert results[0].status == "finished"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    small().train(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"learning_rate was 0.01, and is 0.5"):
        small(method=dataclasses.replace(SMALL, learning_rate=0.5)).train(tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="is not empty: a run overwrites nothing"):
        small().train(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_has_finished_is_not_gone_on_with(tmp_path: Path) -> None:
    small().train(tmp_path / "run")
    before = RunFolder(tmp_path / "run").result()
    with pytest.raises(ConfigError, match=r"has finished: it has learned from \d+ environment steps of 300"):
        small().train(tmp_path / "run", resume=True)
    assert RunFolder(tmp_path / "run").result() == before


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path) -> None:
    after(small(), 8, lambda: signal.raise_signal(signal.SIGTERM)).train(tmp_path / "run", checkpoint_every=32)
    *_, before, newest = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    with open(newest / "state.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    run = small()
    result = run.train(tmp_path / "run", resume=True)
    assert result.status == "finished"
    log = (tmp_path / "run" / "logs" / "run.log").read_text()
    assert f"passed over: {newest}" in log
    rows = [row["global_step"] for row in RunFolder(tmp_path / "run").metrics() if "charts/episodes_finished" in row]
    assert rows == sorted(set(rows))
    assert int(before.name.removeprefix("step_")) in rows


@pytest.mark.slow
def test_a_run_is_made_longer_and_says_that_its_schedules_have_ended(tmp_path: Path) -> None:
    small().train(tmp_path / "run")
    result = small(total_timesteps=600, horizon=300).train(tmp_path / "run", resume=True)
    assert result.status == "finished"
    assert result.summary["env_steps"] >= 600
    log = (tmp_path / "run" / "logs" / "run.log").read_text()
    assert "schedules ended at 300 steps; the learning rate stays at 0" in log


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    first = small()
    first.train(tmp_path / "one")
    second = small(seed=2, init_from=tmp_path / "one")
    assert second.learner.digest() == first.learner.digest()
    assert second.learner.version == 0
    with pytest.raises(CheckpointError, match="is of another network"):
        small(method=A2C(hidden=(9,)), init_from=tmp_path / "one").train(tmp_path / "three")
    assert not (tmp_path / "three").exists()


class Falling(Env):
    """Target, whose environments raise in some calls: `made` says how often it was made before, in this process."""

    def __init__(self, falls: tuple[int, ...], episodes: int) -> None:
        self.falls, self.episodes, self.made = falls, episodes, 0

    @property
    def spec(self) -> Any:
        return TARGET.spec

    def make(self, indices: range) -> Any:
        if len(indices) == self.episodes:  # an evaluation's
            self.made += 1
            if self.made in self.falls:
                raise OSError("the evaluation's machine is gone")
        return TARGET.make(indices)


@pytest.mark.slow
def test_HC_20_an_evaluation_that_fails_is_told_of_and_tried_again(tmp_path: Path) -> None:
    env = Falling((2, 3), episodes=3)
    result = small(env=env).train(tmp_path / "run", eval_every=60, eval_episodes=3)
    assert result.status == "finished"
    assert result.summary["weights_sha256"] == plain(small(), 300).digest()
    rows = [row for row in RunFolder(tmp_path / "run").metrics() if any(key.startswith("eval/") for key in row)]
    failed = ["eval/failed" in row for row in rows]
    assert failed[:4] == [False, True, True, False]
    for row, fails in zip(rows, failed, strict=True):
        assert ("eval/episodic_return" in row) is not fails
        if fails:
            assert "the evaluation's machine is gone" in row["eval/failed"]


def test_HC_20_after_three_in_a_row_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the evaluation's machine is gone"):
        small(env=Falling((1, 2, 3), episodes=3)).train(tmp_path / "run", eval_every=60, eval_episodes=3)
    result = RunFolder(tmp_path / "run").result()
    assert result is not None
    assert result["status"] == "failed"
    assert "the evaluation's machine is gone" in json.dumps(result["error"])


@pytest.mark.parametrize("place", [Inline(), pytest.param(Processes(), marks=pytest.mark.slow)])
def test_a_run_whose_environment_raises(place: Any, tmp_path: Path) -> None:
    import gymnasium

    class Breaks(gymnasium.Wrapper[Any, Any, Any, Any]):
        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps == 5:
                raise ZeroDivisionError("the fifth step")
            return super().step(action)

    run = small(method=A2C(hidden=(4,)), env=Gymnasium("CartPole-v1", wrappers=[Breaks]), place=place)
    with pytest.raises(RoleFailed, match="fifth"):
        run.train(tmp_path / "run")
    result = RunFolder(tmp_path / "run").result()
    assert result is not None
    assert result["status"] == "failed"
    error = result["error"]
    assert "fifth step" in error["message"]
    assert (error["environment"], error["episode"], error["step"]) == (0, 0, 5)
    assert "ZeroDivisionError" in error["traceback"]


@pytest.mark.slow
def test_roles_of_processes_are_named_with_their_pids_and_have_logs(tmp_path: Path) -> None:
    import gymnasium

    class Talks(gymnasium.Wrapper[Any, Any, Any, Any]):
        def reset(self, **given: Any) -> Any:
            print("an episode begins", os.getpid())
            return super().reset(**given)

    env = Gymnasium("CartPole-v1", wrappers=[Talks])
    small(env=env, place=Processes(), plan=SyncBatches(actors=2, num_envs=4, num_steps=8)).train(tmp_path / "run")
    roles = json.loads((tmp_path / "run" / "roles.json").read_text())
    assert {(role["name"], role["rank"], role["incarnation"]) for role in roles} >= {
        ("collect", 0, 0),
        ("collect", 1, 0),
    }
    for role in roles:
        if role["name"] == "collect":
            log = (tmp_path / "run" / "logs" / f"collect-{role['rank']}.log").read_text()
            assert f"an episode begins {role['pid']}" in log


@pytest.mark.slow
def test_greedy_returns_come_from_the_weights_at_the_end(tmp_path: Path) -> None:
    run = small()
    result = run.train(tmp_path / "run")
    torch.manual_seed(0)
    np.testing.assert_allclose(
        result.summary["final_return"], evaluate(run.method, run.learner.acting, TARGET, 20, 1).mean(), rtol=1e-6
    )
