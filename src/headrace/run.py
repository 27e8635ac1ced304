"""A run: a method, an environment, a plan and a placement as one value, and what becomes of it in a folder.

run = Run(PPO(), Gymnasium("CartPole-v1"), SyncBatches(actors=2), Processes(), total_timesteps=200_000, seed=1)
with run.reports() as reports:  # the loop is yours, and nothing is written
    for report in reports:
        print(report.env_steps, report.episode_returns.mean())

result = run.train("runs/one")  # the loop of `headrace train`: metrics, checkpoints, evaluations, a result
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch

from headrace.actor import evaluate
from headrace.channel import Placement
from headrace.checkpoint import Checkpoint, load, load_weights
from headrace.configuration import configuration, differences
from headrace.envs.base import Env
from headrace.errors import CheckpointError, ConfigError
from headrace.learner import Learner
from headrace.method import Method
from headrace.place.inline import Inline
from headrace.place.processes import Processes
from headrace.plan import Plan
from headrace.plans.schedule import Schedule
from headrace.plans.sync_batches import SyncBatches
from headrace.plans.sync_replay import SyncReplay
from headrace.record.folder import RunFolder
from headrace.record.record import Record
from headrace.record.remarks import Remarks
from headrace.record.track import check_tracking
from headrace.report import Report
from headrace.view.choose import choose
from headrace.view.moment import Header
from headrace.view.view import View

__all__ = ["Result", "Run"]

FINAL_EPISODES = 20
LONGEST = 108_000  # environment steps of an episode of an evaluation: half an hour of Atari without frame skip
_TOLD = (
    "actors",
    "workers",
    "num_envs",
    "num_steps",
    "ratio",
    "max_lag",
    "cut_off",
)  # of a plan's settings, in the heading
PATIENCE = 3  # evaluations that may fail one after the other


@dataclass(frozen=True)
class Result:
    """How a run ended. summary: what stands in its result.json. signal: what it was interrupted by, else None."""

    folder: Path
    summary: Mapping[str, Any]
    signal: int | None = None

    @property
    def status(self) -> str:
        """ "finished" or "interrupted". A run that fails raises."""
        return str(self.summary["status"])


@dataclass(frozen=True)
class Run:
    """What is learned, where, how, and for how long."""

    method: Method
    env: Env
    plan: Plan = field(default_factory=SyncBatches)
    place: Placement = field(default_factory=Inline)
    _: KW_ONLY
    total_timesteps: int = 100_000
    """Environment steps to learn from."""
    seed: int = 1
    devices: tuple[str, ...] = ("cpu",)
    """Where the learner computes."""
    threads: int = 1
    """Torch threads of the learner; another number gives other bits."""
    non_finite: Literal["raise", "skip"] = "raise"
    """What becomes of an update with an infinite number or a NaN: an error, or it is left out and counted."""
    horizon: int | None = None
    """Environment steps after which schedules have ended; None: total_timesteps. A run that is made longer keeps it."""
    init_from: str | os.PathLike[str] | None = None
    """A run whose last weights this one begins with."""

    def __post_init__(self) -> None:
        for name, least in (("total_timesteps", 1), ("seed", 0), ("threads", 1)):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < least:
                raise ConfigError(f"{name}={given!r}: give an integer from {least} on.")

    @cached_property
    def learner(self) -> Learner:
        """The learner of this run, made when it is first asked for. Raises CheckpointError for weights of another."""
        learner = Learner(
            self.method, self.env.spec, self.devices, self.seed, threads=self.threads, non_finite=self.non_finite
        )
        if self.init_from is not None:
            checkpoint = self._last(RunFolder.find(os.fspath(self.init_from)))
            learner.net.load_state_dict(load_weights(checkpoint.folder, net=learner.net))
        return learner

    @property
    def _recorded(self) -> bool:
        """Whether what is learned depends on time too, and the plan writes a schedule of it."""
        return getattr(self.plan, "recorded", False)

    @contextmanager
    def reports(
        self,
        state: Mapping[str, Any] | None = None,
        until: int | None = None,
        journal: Callable[[str], object] | None = None,
        schedule: Schedule | None = None,
    ) -> Iterator[Iterator[Report]]:
        """The plan's reports, of every update, while the with-block lasts; no role outlives it.

        state: a report's `snapshot()`, to go on from. until: environment steps at which to stop, with schedules as they
        are for the whole run. journal, schedule: of an asynchronous plan, as its `run` says; a synchronous one needs
        none.
        """
        extra: dict[str, Any] = {}
        if self._recorded:
            extra = {"journal": journal, "schedule": schedule}
        elif schedule is not None:
            raise ConfigError("only an asynchronous plan has a schedule; run a synchronous one again with its seed.")
        reports = self.plan.run(
            self.learner,
            self.env,
            self.place,
            env_steps=self.total_timesteps if until is None else min(until, self.total_timesteps),
            horizon=self.horizon or self.total_timesteps,
            state=state,
            **extra,
        )
        with closing(reports):  # type: ignore[type-var]
            yield reports

    def train(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        resume: bool = False,
        view: View | None = None,
        eval_every: int | None = None,
        eval_episodes: int = 10,
        checkpoint_every: int | None = None,
        keep: int = 3,
        track: bool = False,
        preset: str = "",
        origins: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> Result:
        """Learn, and keep everything in a run folder; end with 20 episodes that are played greedily.

        folder: a new one, by default below runs/; with `resume`, that of a run to go on with from its last checkpoint.
        view: what is shown meanwhile. eval_every, checkpoint_every: environment steps from one evaluation and one
        checkpoint to the next, 0: never but at the end, None: a tenth of the run. keep: checkpoints that stay beside
        the best. track: report to Weights & Biases too. preset, origins, command: where the settings came from.

        Ctrl-C or SIGTERM ends the run after its running update, saved; a second Ctrl-C at once. What fails is noted in
        result.json and raised.
        """
        if track:
            check_tracking()
        held, state, skipped = self._begin(folder, resume, origins or {}, command)
        header = self._header(held, preset)
        shown = choose("off") if view is None else view
        record = Record(
            held,
            total_timesteps=self.total_timesteps,
            view=shown,
            header=header,
            keep=keep,
            track=track,
            state=None if state is None else state.get("record"),
        )
        # Whether the seed alone says what is learned; what an asynchronous run learned, its schedule says.
        repeats = not resume and (not self._recorded or isinstance(self.place, Inline))
        with record, _Stopping() as stopping:
            watch = _Watch(self, record, eval_every, eval_episodes, checkpoint_every)
            try:
                for passed in skipped:
                    record.say(f"passed over: {passed}")
                if isinstance(self.plan, SyncReplay):
                    for notice in self.plan.notices(self.learner, state):
                        record.say(notice)
                with Remarks(record.say), self._logged(held).reports(state, journal=record.journal) as reports:
                    for report in reports:
                        record.report(report)
                        watch.after(report, stopping.asked)
                        if stopping.asked:
                            break
                interrupted = self.learner.env_steps < self.total_timesteps
                final = None if interrupted else watch.play(FINAL_EPISODES, self.seed)
            except BaseException as error:
                status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                record.finish(status, error=error, weights_sha256=self.learner.digest(), deterministic=repeats)
                raise
            solved = None if final is None or header.threshold is None else bool(final.mean() >= header.threshold)
            summary = record.finish(
                "interrupted" if interrupted else "finished",
                final_returns=final,
                solved=solved,
                weights_sha256=self.learner.digest(),
                deterministic=repeats,
            )
            shown.end(_closing(self, held, summary, header))
        return Result(held.path, summary, stopping.signal if interrupted else None)

    def _begin(
        self,
        folder: str | os.PathLike[str] | None,
        resume: bool,
        origins: Mapping[str, str],
        command: Sequence[str],
    ) -> tuple[RunFolder, Mapping[str, Any] | None, tuple[CheckpointError, ...]]:
        """The run's folder, what to go on from, and what is wrong with newer checkpoints than that.

        Whatever cannot be built is found before a folder is made.
        """
        settings = configuration(
            self.method,
            self.env,
            self.plan,
            self.place,
            origins,
            total_timesteps=self.total_timesteps,
            horizon=self.horizon,
            seed=self.seed,
            device=",".join(self.devices),
            threads=self.threads,
            non_finite=self.non_finite,
            init_from=None if self.init_from is None else os.fspath(self.init_from),
        )
        with self.reports():  # which starts nothing, and refuses what does not fit
            pass
        if not resume:
            if folder is None:
                env, method, plan = (str(settings[key]) for key in ("env", "method", "plan"))
                held = RunFolder.new("runs", env, method, plan, self.seed)
            else:
                held = RunFolder.at(folder)
            held.write(settings, self.env.spec, command)
            return held, None, ()
        if folder is None:
            raise ConfigError("resume=True: give the folder of the run to go on with.")
        held = RunFolder.find(os.fspath(folder))
        if found := differences(held.config(), settings):
            raise ConfigError(
                f"{held.path} was begun with other settings: {'; '.join(found)}. Go on with the same, or begin a new "
                f"run with init_from={str(held.path)!r}."
            )
        last = self._last(held)
        if last.step >= self.total_timesteps:
            raise ConfigError(
                f"{held.path} has finished: it has learned from {last.step:,} environment steps of "
                f"{self.total_timesteps:,}. Give more total_timesteps (-n) to go on."
            )
        state = load(last.folder, net=self.learner.net)
        settings["init_from"] = held.config()["init_from"]
        held.write(settings, self.env.spec, command)
        return held, state, last.skipped

    def _last(self, held: RunFolder) -> Checkpoint:
        last = held.checkpoints.latest()
        if last is None:
            raise ConfigError(f"{held.path} has no checkpoint yet: there is nothing to go on from.")
        return last

    def _logged(self, held: RunFolder) -> Run:
        """This run, with what its roles print in the run's folder. It shares the learner."""
        if not isinstance(self.place, Processes) or self.place.logs is not None:
            return self
        logged = replace(self, place=replace(self.place, logs=str(held.path / "logs")))
        vars(logged)["learner"] = self.learner
        return logged

    def _header(self, held: RunFolder, preset: str) -> Header:
        config = held.config()
        told = [f"{name} {config[f'plan.{name}']}" for name in _TOLD if f"plan.{name}" in config]
        return Header(
            method=config["method"],
            env=config["env"],
            plan=" ".join([config["plan"], *told]),
            place=config["place"],
            device=config["device"],
            preset=preset,
            folder=str(held.path),
            seed=self.seed,
            total_timesteps=self.total_timesteps,
            threshold=self.env.reward_threshold,
        )


class _Watch:
    """What is done between updates, at environment steps that do not depend on time: evaluations and checkpoints."""

    def __init__(
        self, run: Run, record: Record, eval_every: int | None, eval_episodes: int, checkpoint_every: int | None
    ) -> None:
        tenth = max(1, run.total_timesteps // 10)
        self._run, self._record, self._episodes = run, record, eval_episodes
        self._eval_every = tenth if eval_every is None else eval_every
        self._checkpoint_every = tenth if checkpoint_every is None else checkpoint_every
        self._before = run.learner.env_steps
        self._missed = 0
        self._score: float | None = None
        self._noticed = False

    def after(self, report: Report, stops: bool) -> None:
        """Do what is due after an update. stops: the run ends here, whether or not it has all its steps."""
        run, steps = self._run, report.env_steps
        horizon, over = run.horizon or run.total_timesteps, steps >= run.total_timesteps
        if steps > horizon and not over and not self._noticed:
            rates = ", ".join(f"{rate:g}" for rate in report.learning_rates.values())
            self._record.say(f"schedules ended at {horizon:,} steps; the learning rate stays at {rates}")
            self._noticed = True
        if self._due(self._eval_every, steps) and not stops:
            self._evaluate(report)
        if self._due(self._checkpoint_every, steps) or (over and not report.more) or stops:
            self._record.checkpoint(report, self._score)
            self._score = None
        self._before = steps

    def play(self, episodes: int, seed: int) -> np.ndarray[Any, Any]:
        """The returns of fresh episodes, played greedily."""
        run, threads = self._run, torch.get_num_threads()
        torch.set_num_threads(run.learner.threads)  # shared by more, a batch as small as this waits for busy cores
        try:
            return evaluate(run.method, run.learner.acting, run.env, episodes, seed, LONGEST)
        finally:
            torch.set_num_threads(threads)

    def _due(self, every: int, steps: int) -> bool:
        return every > 0 and steps // every > self._before // every

    def _evaluate(self, report: Report) -> None:
        """Evaluate; a failure is told of, never replaced by a number, and ends the run only after several in a row."""
        try:
            returns = self.play(self._episodes, self._run.seed + 1)
        except Exception as error:  # of the environment, whatever it raises
            self._missed += 1
            self._record.evaluated(report.env_steps, report.version, None, f"{type(error).__name__}: {error}")
            if self._missed == PATIENCE:
                raise
        else:
            self._missed, self._score = 0, float(returns.mean())
            self._record.evaluated(report.env_steps, report.version, returns, None)


class _Stopping:
    """While it lasts, Ctrl-C and SIGTERM ask for an end, and a second Ctrl-C raises KeyboardInterrupt.

    Signals reach only the main thread; in another one this changes nothing.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> _Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked:
            raise KeyboardInterrupt
        self.signal = number


def _closing(run: Run, held: RunFolder, summary: Mapping[str, Any], header: Header) -> list[str]:
    """What is printed last: what came of it, and what to do next."""
    steps, seconds = summary["env_steps"], summary["wall_seconds"]
    after = f"after {steps:,} steps in {seconds:.1f} s ({summary['steps_per_second']:,.0f} steps/s)"
    name = held.called
    if summary["status"] == "interrupted":
        return [f"interrupted {after}; saved", f"next  headrace resume {name}"]
    score = f"greedy mean of {FINAL_EPISODES} episodes {summary['final_return']:.1f}"
    if summary["solved"]:
        score = f"solved: {score} ≥ {header.threshold:g}"
    elif summary["solved"] is False:
        score = f"not solved: {score} < {header.threshold:g}"
    again = f"headrace train {header.method} {header.env}"
    return [
        f"{score} {after}",
        f"next  headrace enjoy {name}   |   headrace plot {name}   |   {again} --seeds 5",
    ]
