"""The record of a run: every report, evaluation and checkpoint goes through it, into the run folder and to the view."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from headrace.checkpoint import Checkpoints
from headrace.errors import CheckpointError, ConfigError
from headrace.record.disk import Failures, Lines, json_text, replace
from headrace.record.events import Events, Window
from headrace.record.folder import RunFolder
from headrace.record.metrics import Metrics
from headrace.record.plot import draw_return
from headrace.record.timeline import Timeline
from headrace.record.track import Tracker, check_tracking
from headrace.report import Report
from headrace.view.moment import Evaluation, Header, Moment
from headrace.view.verdict import verdict
from headrace.view.view import View

__all__ = ["Record"]

EVERY = 1.0  # seconds from one look at the crew to the next, and from one event to the next
SHOW_EVERY = 0.2  # seconds; no view draws more often
LOG = "logs/run.log"


class Record:
    """What becomes of a run's reports. A context manager, which begins the view; whoever made the view closes it.

    Nothing that cannot be written stops training: the first failure of each kind is said, all are counted, and the next
    write is tried as if nothing had been. keep: as of `Checkpoints`. track: also send metrics to W&B; raises
    ConfigError where that is not installed. state: what the checkpoint from which the run goes on holds as "record";
    rows from after it are cut off, since they come again. None: the run begins, and no row that lies there counts.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        total_timesteps: int,
        view: View,
        header: Header,
        keep: int | None = 3,
        track: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if track:
            check_tracking()
        self.folder, self.header, self.view = folder, header, view
        self.metrics = Metrics(total_timesteps)
        self.evaluation: Evaluation | None = None
        self.checkpoint_failures = 0
        self._failures = Failures(self._tell)
        self._checkpoints = Checkpoints(folder.path / "checkpoints", keep)
        self._timeline = Timeline()
        self._window = Window()
        self._track = track
        self._tracker: Tracker | None = None
        self._report: Report | None = None
        self._before = 0.0  # seconds of earlier lives
        self._counters: dict[str, Any] = {"env_steps": 0, "updates": 0, "gradient_steps": 0, "samples_learned": 0}
        self._counters |= {"dropped": {}}
        self._going_on = state is not None
        self._kept = (0, 0)  # rows and moments of earlier lives
        if state is not None:
            self.metrics.load_state(state["metrics"])
            self._before, self._counters = state["seconds"], dict(state["counters"])
            self._kept = state["rows"], state["moments"]
            self.evaluation = Evaluation(*state["evaluation"]) if state["evaluation"] else None
        self._roles: list[dict[str, Any]] = []  # as roles.json has them
        self._stages: dict[str, float] = {}  # of the last look, until a row has told of them
        self._highest_lag = 0
        self._verdict: str | None = None
        self._rate = 0.0
        self._finished = False

    def __enter__(self) -> Self:
        self.view.begin(self.header)
        folder, failures = self.folder, self._failures
        self._log = Lines(folder.log_path, LOG, failures)
        for path in (folder.log_path.parent, folder.plot_path.parent):
            with failures.counted(f"{path.name}/"):
                path.mkdir(parents=True, exist_ok=True)
        rows, moments = self._kept
        self._rows = Lines(folder.metrics_path, "metrics.jsonl", failures, rows)
        self._moments = Lines(folder.timeline_path, "timeline.jsonl", failures, moments)
        self._schedule = Lines(folder.schedule_path, "schedule.txt", failures, keep=0)  # of this life
        with failures.counted("result.json"):
            folder.result_path.unlink(missing_ok=True)  # of an earlier life
        self._replace(folder.header_path, json_text(self.header.to_json(), indent=1) + "\n")
        if self._track:
            self._tracker = Tracker(folder.path, folder.config(), self.say)
        steps = self._counters["env_steps"]
        self._events = Events(folder.path, failures, self.say, steps if self._going_on else None)
        self._began = self._marked = self._looked = self._last = time.monotonic()
        self._next_look = self._next_show = self._began
        self._marked_steps = self._looked_steps = self._began_steps = steps
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever was not finished has failed."""
        if not self._finished:
            self.finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error=error)

    def report(self, report: Report) -> None:
        """Take in an update: its metrics, and once in a while how the crew stands."""
        now = self._last = time.monotonic()
        self._report = report
        row = self.metrics.add(report)
        if row is not None:
            self._write(row, now)
        if now >= self._next_look:
            self._look(report, now)
        if now >= self._next_show:
            self._next_show = now + SHOW_EVERY
            self.view.show(self._moment(report, now), tuple(self.metrics.curve))

    def journal(self, line: str) -> None:
        """Take in a line of an asynchronous plan's schedule."""
        self._schedule.write(line)

    def evaluated(
        self, env_steps: int, version: int, returns: np.ndarray[Any, Any] | None, error: str | None = None
    ) -> None:
        """Take in an evaluation of these weights: the returns of its episodes, or why there are none."""
        if error is None and (returns is None or not returns.size):
            error = "no episode was played"
        elif error is None and returns is not None and not np.isfinite(returns).all():
            error = f"a return is not finite: {returns}"
        row: dict[str, Any] = {
            "global_step": env_steps,
            "time": round(self._seconds(time.monotonic()), 4),
            "eval/version": version,
        }
        if error is not None or returns is None:
            row["eval/failed"] = error
            self.say(f"the evaluation at step {env_steps:,} failed: {error}")
        else:
            mean, std = float(returns.mean(dtype=np.float64)), float(returns.std(dtype=np.float64))
            self.evaluation = Evaluation(mean, std, returns.size, env_steps)
            row |= {"eval/episodic_return": mean, "eval/episodic_return_std": std, "eval/n": returns.size}
        self._rows.write(json_text(row))
        self._publish(row, env_steps)
        self._skip()

    def checkpoint(self, report: Report, score: float | None = None) -> bool:
        """Save the report's snapshot and this record. Returns whether they could be written."""
        info: dict[str, Any] = {name: getattr(self.header, name) for name in ("method", "env", "plan", "seed")}
        info["version"] = report.version
        state = {**report.snapshot(copied=False), "record": self.state()}
        try:
            self._checkpoints.save(report.env_steps, state, info, score)
        except CheckpointError as error:
            self.checkpoint_failures += 1
            self._failures.add("a checkpoint", error)
            return False
        finally:
            self._skip()
        return True

    def say(self, line: str) -> None:
        """A line for the log and for whoever follows the run."""
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
        self.view.say(line)

    def finish(
        self,
        status: str,
        *,
        error: BaseException | None = None,
        final_returns: np.ndarray[Any, Any] | None = None,
        solved: bool | None = None,
        weights_sha256: str | None = None,
        deterministic: bool = True,
    ) -> dict[str, Any]:
        """Write what is still to be written, the picture, and result.json, which is returned.

        status: "finished", "interrupted" or "failed".
        """
        if status not in ("finished", "interrupted", "failed"):
            raise ConfigError(f'status={status!r}: give "finished", "interrupted" or "failed".')
        self._finished = True
        if (row := self.metrics.flush()) is not None:
            self._write(row, self._last)
        if self._report is not None:
            self._count(self._report)
            moment = self._moment(self._report, self._last)
            self._moments.write(json_text(moment.to_json()))
            self.view.show(moment, tuple(self.metrics.curve))
        self._tell_window(self._counters["env_steps"])
        if self._tracker is not None:
            self._tracker.close()
        seconds = self._last - self._began
        told = None if final_returns is None else np.asarray(final_returns, np.float64)
        result = {
            "status": status,
            **self._counters,
            "episodes_finished": self.metrics.episodes_finished,
            "return_mean100": self.metrics.return_mean100,
            "wall_seconds": round(self._seconds(time.monotonic()), 3),
            "steps_per_second": (self._counters["env_steps"] - self._began_steps) / seconds if seconds > 0 else None,
            "roof_fraction": self._timeline.roof_fraction,
            "final_return": None if told is None else float(told.mean()),
            "final_return_std": None if told is None else float(told.std()),
            "final_episodes": 0 if told is None else told.size,
            "solved": solved,
            "weights_sha256": weights_sha256,
            "deterministic": deterministic,
            "checkpoint_failures": self.checkpoint_failures,
            "write_failures": dict(self._failures.counts),
            "error": None if error is None else _told_of(error),
        }
        self._replace(self.folder.result_path, json_text(result, indent=1) + "\n")
        self._draw()
        for lines in (self._rows, self._moments, self._schedule, self._log):
            lines.close()
        return result

    def state(self) -> dict[str, Any]:
        """What a record goes on from: plain values, for a checkpoint."""
        if self._report is not None:
            self._count(self._report)
        evaluation = self.evaluation
        return {
            "metrics": self.metrics.state(),
            "counters": dict(self._counters),
            "seconds": self._seconds(time.monotonic()),
            "evaluation": evaluation and [evaluation.mean, evaluation.std, evaluation.episodes, evaluation.env_steps],
            "rows": self._rows.count,
            "moments": self._moments.count,
        }

    def _skip(self) -> None:
        """Leave what the driver has just done, beside learning, out of the timeline."""
        self._timeline.skip(None if self._report is None else self._report.crew)

    def _draw(self) -> None:
        title = f"{self.header.method} on {self.header.env}, seed {self.header.seed}"
        try:
            draw_return(self.folder.plot_path, self.folder.metrics(), title, self.header.threshold, self.say)
        except Exception as error:  # of somebody else's program, of any kind: the run is done, and has its result
            self._failures.add("plots/return.png", error)

    def _seconds(self, now: float) -> float:
        """Since the run began, without the time between its lives."""
        return self._before + now - self._began

    def _tell(self, kind: str, line: str) -> None:
        """Say a failure to write; that of the log itself only to the view."""
        (self.view.say if kind == LOG else self.say)(line)

    def _count(self, report: Report) -> None:
        for name in self._counters:
            self._counters[name] = getattr(report, name)
        self._counters["dropped"] = dict(report.dropped)

    def _write(self, row: dict[str, Any], now: float) -> None:
        """Complete a row by what depends on time, and write it."""
        steps, seconds = row["global_step"], now - self._marked
        row["time"] = round(self._seconds(now), 4)
        if seconds > 0:
            row["charts/SPS"] = round((steps - self._marked_steps) / seconds, 2)
        row |= self._stages
        row["health/checkpoint_failures"] = self.checkpoint_failures
        row["health/write_failures"] = sum(self._failures.counts.values())
        row["health/restarts"] = self._timeline.restarts
        self._stages = {}
        self._marked, self._marked_steps = now, steps
        self._rows.write(json_text(row))
        self._window.add(row)

    def _look(self, report: Report, now: float) -> None:
        """See how the crew stands; write and send what has gathered since the last look."""
        timeline = self._timeline
        timeline.look(report.crew)
        self._rate = (report.env_steps - self._looked_steps) / max(now - self._looked, 1e-9)
        self._looked, self._looked_steps = now, report.env_steps
        self._highest_lag = max(self._highest_lag, report.lag.max)
        self._verdict = verdict(
            timeline.steady,
            timeline.queues,
            self._seconds(now),
            timeline.machine.cpu,
            timeline.machine.cores,
            self._highest_lag == 0,
            self.header.place.startswith("inline"),
        )
        if timeline.roles != self._roles and self._replace(
            self.folder.roles_path, json_text(timeline.roles, indent=1) + "\n"
        ):
            self._roles = timeline.roles
        for name in sorted({stage.name for stage in timeline.stages}):
            copies = [stage for stage in timeline.stages if stage.name == name]
            for told, share in (("busy", "busy"), ("wait_in", "starved"), ("wait_out", "blocked")):
                self._stages[f"stage/{name}/{told}"] = sum(getattr(copy, share) for copy in copies) / len(copies)
        self._moments.write(json_text(self._moment(report, now).to_json()))
        self._tell_window(report.env_steps)
        self._next_look = time.monotonic() + EVERY

    def _tell_window(self, env_steps: int) -> None:
        values = self._window.take()
        self._events.write(env_steps, values)
        if self._tracker is not None:
            self._tracker.write(env_steps, values)

    def _publish(self, row: Mapping[str, Any], env_steps: int) -> None:
        """Send an evaluation now, by itself, after what came before it."""
        self._tell_window(env_steps)
        self._window.add(row)
        self._tell_window(env_steps)

    def _moment(self, report: Report, now: float) -> Moment:
        metrics, timeline, lag = self.metrics, self._timeline, report.lag
        return Moment(
            seconds=round(self._seconds(now), 4),
            interval=round(timeline.interval, 4),
            env_steps=report.env_steps,
            updates=report.updates,
            gradient_steps=report.gradient_steps,
            samples_learned=report.samples_learned,
            total_timesteps=metrics.total_timesteps,
            steps_per_second=round(self._rate, 2),
            return_mean100=metrics.return_mean100,
            best_return=metrics.best_return,
            episodes_finished=metrics.episodes_finished,
            running_return=report.running_return,
            running_length=report.running_length,
            evaluation=self.evaluation,
            lag_p50=lag.p50,
            lag_p95=lag.p95,
            lag_max=lag.max,
            dropped=dict(report.dropped),
            replay_ratio=report.replay_ratio,
            stages=timeline.stages,
            queues=timeline.queues,
            machine=timeline.machine,
            restarts=timeline.restarts,
            verdict=self._verdict,
        )

    def _replace(self, path: Path, text: str) -> bool:
        """Write a whole file. Returns whether that could be done."""
        before = sum(self._failures.counts.values())
        with self._failures.counted(path.name):
            replace(path, text)
        return sum(self._failures.counts.values()) == before


def _told_of(error: BaseException) -> dict[str, Any]:
    """An error as result.json holds it: with what it and its causes say of where it was."""
    own = getattr(error, "traceback", "") or "".join(traceback.format_exception(error))
    told: dict[str, Any] = {"type": type(error).__name__, "message": str(error), "traceback": own}
    cause: BaseException | None = error
    while cause is not None:
        for name in ("role", "rank", "signal", "exit_code", "environment", "episode", "step", "seed"):
            value = getattr(cause, name, None)
            if value is not None and name not in told:
                told[name] = [value.start, value.stop - 1] if isinstance(value, range) else value
        cause = cause.__cause__
    return told
