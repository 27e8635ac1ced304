"""A record: what becomes of reports, evaluations and checkpoints, and that nothing that fails stops a run."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import A2C, EnvironmentFault, Inline, Learner, Processes, RoleFailed, SyncBatches
from headrace.channel import Activity, Interval, Member
from headrace.checkpoint import load
from headrace.envs.toy import Identity
from headrace.errors import ConfigError
from headrace.record.folder import RunFolder
from headrace.record.record import Record
from headrace.report import Report
from headrace.view.moment import Evaluation, Header, Queue, Stage

Telling = Callable[..., Report]
Recording = Callable[..., Record]

TIMING = ("time", "charts/SPS", "perf/", "stage/")
RESULT = (
    *("status", "env_steps", "updates", "gradient_steps", "samples_learned", "dropped", "wall_seconds"),
    *("steps_per_second", "roof_fraction", "final_return", "solved", "weights_sha256", "deterministic", "error"),
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


PAGE = Path(__file__).parents[2] / "docs" / "run-folder.md"


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow: every write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(TIMING)} for row in rows]


class Crew:
    """What a record asks of a crew, with what each look is to find."""

    def __init__(self, *intervals: Interval) -> None:
        self.intervals = list(intervals)
        self.members = (Member("collect", 0, 2, 0, os.getpid()), Member("collect", 1, 2, 0, os.getpid()))

    def timeline(self) -> Interval:
        return self.intervals.pop(0)


def role(name: str, items: int, busy: float, starved: float, blocked: float) -> Activity:
    return Activity(name, "role", items, 0, busy, starved, blocked)


def test_every_update_is_a_row_and_the_folder_reads_it_back(
    record: Recording, told: Telling, view: Any, folder: RunFolder
) -> None:
    with record() as kept:
        for version in range(1, 11):
            kept.report(told(version, [float(version)], metrics={"losses/entropy": 0.5}))
        result = kept.finish("finished", final_returns=np.array([9.0, 11.0]), solved=True, weights_sha256="abc")
    rows = folder.metrics()
    assert [row["global_step"] for row in rows] == [100 * version for version in range(1, 11)]
    assert [row["charts/return_mean100"] for row in rows] == [(version + 1) / 2 for version in range(1, 11)]
    assert {"time", "charts/SPS", "losses/entropy", "health/checkpoint_failures"} <= set(rows[0])
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    assert view.headers == [folder.header()]
    assert result == folder.result()
    assert set(RESULT) <= set(result)
    assert (result["status"], result["env_steps"], result["final_return"]) == ("finished", 1_000, 10.0)
    assert (result["final_return_std"], result["solved"], result["weights_sha256"]) == (1.0, True, "abc")
    assert result["error"] is None
    assert not list(folder.path.glob(".*"))
    keys = {key for key in (*rows[0], *rows[-1], *result) if not key.startswith("losses/")}
    assert [key for key in keys if f"`{key}`" not in PAGE.read_text()] == []


def test_what_is_said_is_in_the_log_and_in_the_view(record: Recording, view: Any, folder: RunFolder) -> None:
    with record() as kept:
        kept.say("a line")
    assert folder.log_path.read_text().splitlines()[0].endswith(" a line")
    assert "a line" in view.lines


def test_without_matplotlib_it_is_said_how_to_get_the_plot(record: Recording, view: Any) -> None:
    with record() as kept:
        kept.finish("finished")
    assert [line for line in view.lines if 'pip install "headrace[plot]"' in line] == view.lines


def test_an_evaluation_is_a_row_of_its_own_and_a_failure_is_never_a_number(
    record: Recording, told: Telling, view: Any, folder: RunFolder
) -> None:
    with record() as kept:
        kept.report(told(1))
        kept.evaluated(100, 1, np.array([1.0, 2.0, 6.0]), None)
        kept.evaluated(200, 2, None, "Stalled: too long")
        kept.evaluated(300, 3, np.array([1.0, math.nan]), None)
        kept.evaluated(400, 4, np.array([]), None)
        kept.report(told(9))
        kept.finish("finished")
    _, first, *failed, _ = folder.metrics()
    assert first["global_step"] == 100
    assert (first["eval/episodic_return"], first["eval/n"], first["eval/version"]) == (3.0, 3, 1)
    assert first["eval/episodic_return_std"] == pytest.approx(math.sqrt(14 / 3))
    assert [row["eval/failed"] for row in failed] == [
        "Stalled: too long",
        "a return is not finite: [ 1. nan]",
        "no episode was played",
    ]
    assert not any("eval/episodic_return" in row for row in failed)
    assert view.moments[-1].evaluation == Evaluation(3.0, pytest.approx(math.sqrt(14 / 3)), 3, 100)
    assert len(view.lines) == 3 + 1


def test_the_timeline_has_stages_queues_and_roles(
    record: Recording, told: Telling, view: Any, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.record.record.EVERY", 0.0)
    first = (
        role("driver[0]", 5, 1.0, 3.0, 0.0),
        role("collect[0]", 10, 1.5, 0.0, 0.5),
        role("collect[1]", 10, 2.0, 2.0, 0.0),
        Activity("rollouts[0]", "channel", 10, 99, 0.0, 0.0, 0.0, held=1, capacity=4),
        Activity("weights", "weights", 3, 99, 0.0, 0.0, 0.0),
    )
    ended = role("collect[1]", 0, 0.0, 0.0, 0.0)
    second = (role("driver[0]", 0, 1.0, 1.0, 0.0), ended, *first[3:4])
    full = Activity("rollouts[0]", "channel", 0, 0, 0.0, 0.0, 0.0, held=4, capacity=4)
    crew = Crew(Interval(4.0, first), Interval(2.0, second), Interval(2.0, (full,)))
    with record() as kept:
        kept.report(told(1, crew=crew))
        kept.report(told(2, crew=crew))
        assert [entry["name"] for entry in json.loads(folder.roles_path.read_text())] == [
            "driver",
            "collect",
            "collect",
        ]
        crew.members = (*crew.members[:1], Member("collect", 1, 2, 1, os.getpid()))
        kept.report(told(3, crew=crew))
        kept.finish("finished")
    moments = folder.timeline()
    assert moments[0].stages == (
        Stage("driver", 0, 1.25, 0.25, 0.75, 0.0),
        Stage("collect", 0, 2.5, 0.75, 0.0, 0.25),
        Stage("collect", 1, 2.5, 0.5, 0.5, 0.0),
    )
    assert moments[0].queues == (Queue("rollouts[0]", 2.5, 0.25, 4),)
    assert moments[1].stages == (Stage("driver", 0, 0.0, 0.5, 0.5, 0.0),)
    assert moments[2].queues == (Queue("rollouts[0]", 0.0, 0.5, 4),)  # the mean of 1, 1 and 4 of 4
    assert (moments[0].interval, moments[0].machine.cores) == (4.0, len(os.sched_getaffinity(0)))
    assert [moment.restarts for moment in moments] == [0, 0, 1, 1]
    rows = folder.metrics()
    assert (rows[1]["stage/collect/busy"], rows[1]["stage/collect/wait_in"]) == (0.625, 0.25)
    assert rows[1]["stage/collect/wait_out"] == 0.125
    roles = json.loads(folder.roles_path.read_text())
    assert roles[0] == {"name": "driver", "rank": 0, "incarnation": 0, "pid": os.getpid()}
    assert [role["incarnation"] for role in roles[1:]] == [0, 1]
    # Driver and collectors are of one process here: (1 + 1.5 + 2) + 1 seconds of 8.
    assert folder.result()["roof_fraction"] == pytest.approx(5.5 / 8)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ZeroDivisionError("by zero"), {"type": "ZeroDivisionError", "message": "by zero"}),
        (
            EnvironmentFault("it raised", environment=range(2, 5), episode=3, step=17, seed=8),
            {"type": "EnvironmentFault", "environment": [2, 4], "episode": 3, "step": 17, "seed": 8},
        ),
    ],
)
def test_a_run_that_fails_leaves_its_result(
    record: Recording, told: Telling, folder: RunFolder, error: Exception, wanted: dict[str, Any]
) -> None:
    failed = RoleFailed("collect[1] raised", role="collect", rank=1, traceback="in the role")
    failed.__cause__ = error
    kept = record()
    with pytest.raises(RoleFailed), kept:  # noqa: PT012
        kept.report(told(1))
        raise failed
    result = folder.result()
    assert result is not None
    assert set(RESULT) <= set(result)
    assert (result["status"], result["env_steps"], result["final_return"]) == ("failed", 100, None)
    assert result["error"]["traceback"] == "in the role"
    own = {"type": "RoleFailed", "message": "collect[1] raised", "role": "collect", "rank": 1}
    where = {key: value for key, value in wanted.items() if key not in ("type", "message")}
    assert own | where == {key: result["error"][key] for key in own | where}


def test_an_error_of_the_driver_has_its_own_traceback(record: Recording, folder: RunFolder) -> None:
    with pytest.raises(KeyError), record():
        raise KeyError("where")
    result = folder.result()
    assert result is not None
    assert "raise KeyError(" in result["error"]["traceback"]
    with pytest.raises(KeyboardInterrupt), record():
        raise KeyboardInterrupt
    assert (folder.result() or {})["status"] == "interrupted"


def test_another_status_is_refused(record: Recording) -> None:
    with record() as kept:
        with pytest.raises(ConfigError, match='"finished", "interrupted" or "failed"'):
            kept.finish("done")
        kept.finish("finished")


def test_going_on_cuts_off_what_comes_again(record: Recording, told: Telling, folder: RunFolder) -> None:
    """A run that is interrupted and goes on from an older checkpoint has the rows of one that never stopped."""

    def reports(first: int, last: int, into: Record) -> None:
        for version in range(first, last + 1):
            into.report(told(version, [float(version)]))
            if version % 3 == 0:
                into.evaluated(100 * version, version, np.array([float(version)]), None)

    with record() as kept:
        reports(1, 10, kept)
        kept.finish("finished")
    straight = folder.metrics()
    shutil.rmtree(folder.path)
    with record() as kept:
        reports(1, 4, kept)
        assert kept.checkpoint(told(4))
        reports(5, 6, kept)
        kept.finish("interrupted")
    newest = folder.checkpoints.latest()
    assert newest is not None
    state = load(newest.folder)
    assert newest.info["method"] == "ppo"
    assert state["learner"]["net"]["weight"].tolist() == [4.0, 4.0]
    with record(state=state["record"]) as kept:
        assert folder.result() is None
        assert kept.evaluation == Evaluation(3.0, 0.0, 1, 300)
        reports(5, 10, kept)
        result = kept.finish("finished")
    assert untimed(folder.metrics()) == untimed(straight)
    assert result["wall_seconds"] >= state["record"]["seconds"]
    assert [moment.env_steps for moment in folder.timeline()][-1] == 1_000
    assert len(list(folder.path.glob("events.out.tfevents.*"))) == 2


def test_a_record_that_begins_counts_no_row_that_lies_there(
    record: Recording, told: Telling, folder: RunFolder
) -> None:
    for _ in range(2):
        with record() as kept:
            kept.report(told(1))
            kept.finish("finished")
    assert len(folder.metrics()) == 1


def test_CR_14_training_goes_on_while_nothing_can_be_written(
    record: Recording, told: Telling, view: Any, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.record.record.EVERY", 0.0)
    with record() as kept:
        kept.report(told(1, [1.0]))
        assert kept.checkpoint(told(1), 1.0)
        with full_disk():
            for version in range(2, 5):
                kept.report(told(version, [1.0]))
                assert not kept.checkpoint(told(version))
                kept.evaluated(100 * version, version, np.array([1.0]), None)
                kept.say(f"line {version}")
        assert kept.checkpoint_failures == 3
        kept.report(told(5, [1.0]))
        assert kept.checkpoint(told(5))
        result = kept.finish("finished")
    assert [row["global_step"] for row in folder.metrics()] == [100, 500]
    assert folder.metrics()[-1]["health/checkpoint_failures"] == 3
    assert folder.metrics()[-1]["charts/episodes_finished"] == 5
    assert [moment.env_steps for moment in folder.timeline()] == [100, 500, 500]
    steps = [load(path)["learner"]["net"]["weight"][0].item() for path in sorted(folder.checkpoints.folder.iterdir())]
    assert steps == [1.0, 5.0]
    failures = [line for line in view.lines if "could not be written" in line]
    kinds = sorted(line.partition(" could not")[0] for line in failures)
    assert kinds == ["TensorBoard events", "a checkpoint", "logs/run.log", "metrics.jsonl", "timeline.jsonl"]
    assert result["write_failures"]["a checkpoint"] == result["checkpoint_failures"] == 3
    assert result["write_failures"]["metrics.jsonl"] == 6  # three updates, three evaluations
    assert [f"line {version}" in view.lines for version in range(2, 5)] == [True] * 3


def test_CR_14_a_result_that_cannot_be_written_is_said_and_returned(
    record: Recording, told: Telling, view: Any, folder: RunFolder
) -> None:
    with record() as kept:
        kept.report(told(1))
        with full_disk():
            result = kept.finish("finished")
    assert result["env_steps"] == 100
    assert folder.result() is None
    assert any(line.startswith("result.json could not be written") for line in view.lines)


def test_a_folder_that_vanishes_stops_nothing_and_may_come_back(
    record: Recording, told: Telling, folder: RunFolder
) -> None:
    with record() as kept:
        kept.report(told(1))
        shutil.rmtree(folder.path)
        folder.path.write_text("in its place")
        assert not kept.checkpoint(told(1))
        folder.path.unlink()
        assert kept.checkpoint(told(2))
        kept.finish("finished")
    assert folder.result() is not None


def test_tensorboard_has_the_same_names(
    record: Recording, told: Telling, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with record(total_timesteps=1_000) as kept:
        kept.report(told(1, [1.0], metrics={"losses/entropy": 1.0}, dropped={"stale": 3}))
        kept.report(told(2, [5.0], metrics={"losses/entropy": 2.0}, dropped={"stale": 4}))
        kept.report(told(3, [9.0], metrics={"losses/entropy": 4.0}, dropped={"stale": 9}))
        kept.evaluated(300, 3, np.array([7.0, 9.0]), None)
        kept.finish("finished")
    events = list(events_of(folder.path))
    assert events[0].file_version == "brain.Event:2"
    told_of = [(event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in events[1:]]
    assert [step for step, _ in told_of] == [100, 300, 300]
    (_, first), (_, mean), (_, evaluation) = told_of
    assert (first["charts/episodic_return"], first["losses/entropy"], first["dropped/stale"]) == (1.0, 1.0, 3.0)
    assert (mean["charts/episodic_return"], mean["losses/entropy"]) == (7.0, 3.0)  # means
    assert (mean["charts/return_mean100"], mean["dropped/stale"], mean["updates"]) == (5.0, 9.0, 3.0)  # the last
    assert (evaluation["eval/episodic_return"], evaluation["eval/n"]) == (8.0, 2.0)
    assert not any("global_step" in values for _, values in told_of)


def events_of(path: Path) -> Iterator[Any]:
    """The events in a folder's files, read as TensorBoard does, checksums and all."""
    import struct

    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    for file in sorted(path.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
            content, (checksum,) = data[12 : 12 + size], struct.unpack("<I", data[12 + size : 16 + size])
            assert checksum == masked_crc32c(content)
            event = Event()
            event.ParseFromString(content)
            yield event
            data = data[16 + size :]


@pytest.mark.slow
@pytest.mark.parametrize("place", [Inline(), Processes()])
def test_a_run_is_the_same_with_and_without_a_record_and_a_full_disk(place: Any, folder: RunFolder, view: Any) -> None:
    env, plan = Identity(), SyncBatches(actors=2, num_envs=4, num_steps=16)
    digests = []
    for kept in (None, folder):
        learner = Learner(A2C(), env.spec, seed=1)
        reports = plan.run(learner, env, place, env_steps=600)
        if kept is None:
            for _ in reports:
                pass
        else:
            kept.path.mkdir()
            header = Header("a2c", "Identity", "sync-batches", "here", "cpu", "", str(kept.path), 1, 600, 4.0)
            with Record(kept, total_timesteps=600, view=view, header=header) as record:
                for report in reports:
                    if report.version == 5:
                        with full_disk():
                            record.report(report)
                            assert not record.checkpoint(report)
                    else:
                        record.report(report)
                record.finish("finished", weights_sha256=learner.digest())
        digests.append(learner.digest())
    assert digests[0] == digests[1] == (folder.result() or {})["weights_sha256"]
    rows = folder.metrics()
    assert rows[-1]["global_step"] == learner.env_steps
    assert sum(len(row.get("episodes", [])) for row in rows) > 0
    roof = (folder.result() or {})["roof_fraction"]
    assert 0 < roof <= 1
    moment = folder.timeline()[0]
    assert {(stage.name, stage.rank) for stage in moment.stages} == {("driver", 0), ("collect", 0), ("collect", 1)}
    assert all(abs(stage.busy + stage.starved + stage.blocked - 1) < 1e-3 for stage in moment.stages)
    assert [queue.capacity for queue in moment.queues] == [1, 1]
    pids = {role["pid"] for role in json.loads(folder.roles_path.read_text())}
    assert len(pids) == (3 if isinstance(place, Processes) else 1)
    assert folder.plot_path.read_bytes()[:4] == b"\x89PNG"
