"""What holds a run up, in a line with one suggestion: the first rule that fits, or nothing while none does.

The rules look at shares of time, so they know no plan: who is busy, who waits for input (starved) or for room
(blocked), and how full the channels are. docs/live-view.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.view.moment import Queue, Stage

__all__ = ["verdict"]

SILENT = 10.0  # seconds at the start of a run in which nothing is said: processes start, caches are cold
WAITS = 0.3  # a role that waits for more of its time than this is held up by another one
BUSY = 0.6  # a role that works for less of its time than this holds up nobody
EMPTY, FULL = 0.2, 0.8  # fill of a channel below and above which it is one or the other
IN_TURN = 0.2  # in lock-step: a part that takes less of the time than this is not worth overlapping
SPREAD = 0.3  # a copy of a role that is busy for this much more of its time than the others is a straggler
CORES = 0.95  # a CPU of which this share is used is full: nobody measures exactly 1


@dataclass(frozen=True)
class _Facts:
    """Who does what in a run. The learner is the driver, unless roles named "learn" learn for it."""

    actors: tuple[Stage, ...]
    learners: tuple[Stage, ...]
    inference: tuple[Stage, ...]
    fill: float
    cores_busy: float
    cores: int
    lock_step: bool
    one_at_a_time: bool

    @property
    def acting(self) -> float:
        return _mean([stage.busy for stage in self.actors])

    @property
    def learning(self) -> float:
        return _mean([stage.busy for stage in self.learners])

    @property
    def actors_wait(self) -> float:
        return _mean([stage.starved + stage.blocked for stage in self.actors])

    @property
    def learner_waits(self) -> float:
        return _mean([stage.starved for stage in self.learners])

    @property
    def cpu_is_full(self) -> bool:
        return self.cores_busy >= CORES * self.cores

    @property
    def straggler(self) -> Stage | None:
        """An actor that is far busier than the others, who wait."""
        if len(self.actors) < 2:
            return None
        busiest = max(self.actors, key=lambda stage: stage.busy)
        others = [stage for stage in self.actors if stage is not busiest]
        waiting = _mean([stage.starved + stage.blocked for stage in others])
        apart = busiest.busy - max(stage.busy for stage in others) > SPREAD
        return busiest if apart and busiest.busy > BUSY and waiting > WAITS else None


def verdict(
    stages: Sequence[Stage],
    queues: Sequence[Queue],
    seconds: float,
    cores_busy: float,
    cores: int,
    lock_step: bool,
    one_at_a_time: bool = False,
) -> str | None:
    """What holds the run up and what to try, in a line; None in the first 10 s and where no rule fits.

    stages, queues: of the last seconds; a longer interval flickers less. seconds: since the run began. cores_busy:
    cores' worth of CPU time that the run's processes use, of `cores` that they may. lock_step: the plan lets nobody act
    while the learner learns (max_lag 0). one_at_a_time: the placement runs one role at a time (inline).
    """
    learners = tuple(s for s in stages if s.name == "learn") or tuple(s for s in stages if s.name == "driver")
    inference = tuple(s for s in stages if s.name == "infer")
    actors = tuple(s for s in stages if s.name not in ("driver", "learn", "infer"))
    if seconds < SILENT or not learners or not actors:
        return None
    fill = _mean([queue.fill for queue in queues])
    facts = _Facts(actors, learners, inference, fill, cores_busy, cores, lock_step, one_at_a_time)
    return next((line for rule in RULES if (line := rule(facts)) is not None), None)


def _shares(run: _Facts) -> str | None:
    """Where one role runs at a time nobody is waited for: what counts is what takes the time."""
    if not run.one_at_a_time:
        return None
    acting, learning = sum(stage.busy for stage in run.actors), run.learning
    told = f"one role works at a time (acting {_percent(acting)} of it, learning {_percent(learning)})"
    if min(acting, learning) > IN_TURN and run.cores > 1:
        return f"{told}. Try --place processes --plan.max-lag 1: they overlap."
    return f"{told}. Try {'more --plan.num-envs' if acting > learning else FEWER}."


def _lock_step(run: _Facts) -> str | None:
    """Both wait for each other, and no queue can show it."""
    acting = max(stage.busy for stage in run.actors)
    if not run.lock_step or run.straggler or min(acting, run.learning) <= IN_TURN:
        return None
    shares = f"acting {_percent(acting)} of the time, learning {_percent(run.learning)}"
    return f"actors and learner wait for each other in turn ({shares}). Try --plan.max-lag 1: they overlap."


def _actors(run: _Facts) -> str | None:
    if run.straggler or run.cpu_is_full or run.acting <= BUSY or run.learner_waits <= WAITS or run.fill >= EMPTY:
        return None
    evidence = f"busy {_percent(run.acting)}, the learner waits {_percent(run.learner_waits)}"
    return f"the actors are the bottleneck ({evidence}). Try --plan.actors {2 * len(run.actors)}."


def _learner(run: _Facts) -> str | None:
    """In lock-step the queue tells nothing: the next rollout is not begun before the update is over."""
    full = run.fill > FULL or run.lock_step
    if run.learning <= BUSY or run.actors_wait <= WAITS or not full:
        return None
    evidence = f"busy {_percent(run.learning)}, the actors wait {_percent(run.actors_wait)}"
    return f"the learner is the bottleneck ({evidence}). Try {FEWER}; more actors would only wait."


def _inference(run: _Facts) -> str | None:
    busy = _mean([stage.busy for stage in run.inference])
    waiting = _mean([stage.starved for stage in run.actors])
    if busy <= BUSY or waiting <= WAITS:
        return None
    evidence = f"busy {_percent(busy)}, the actors wait {_percent(waiting)}"
    return f"inference is the bottleneck ({evidence}). Try more --plan.num-envs: more in one call."


def _hand_over(run: _Facts) -> str | None:
    busiest = max((*run.actors, *run.learners, *run.inference), key=lambda stage: stage.busy)
    if busiest.busy > BUSY or run.lock_step:
        return None
    evidence = f"the busiest, {busiest.name}[{busiest.rank}], works {_percent(busiest.busy)} of its time"
    return f"handing over costs most ({evidence}). Try more --plan.num-steps: fewer, larger messages."


def _straggler(run: _Facts) -> str | None:
    slow = run.straggler
    if slow is None:
        return None
    others = _percent(_mean([stage.starved + stage.blocked for stage in run.actors if stage is not slow]))
    told = f"{slow.name}[{slow.rank}] holds up the others (busy {_percent(slow.busy)}, they wait {others})"
    return f"{told}. Try fewer --plan.actors: each with more environments."


def _cpu(run: _Facts) -> str | None:
    if not run.cpu_is_full:
        return None
    told = f"the CPU is full ({run.cores_busy:.1f} of {run.cores} cores busy)"
    if len(run.actors) + len(run.learners) > run.cores:
        return f"{told}. Try --plan.actors {max(1, run.cores - len(run.learners))}: a core for each."
    return f"{told}. It goes as fast as this machine lets it; a cheaper environment or more cores would help."


FEWER = "a lower --update-epochs or --plan.ratio, whichever there is"
RULES: tuple[Callable[[_Facts], str | None], ...] = (
    _shares,
    _lock_step,
    _actors,
    _learner,
    _inference,
    _hand_over,
    _straggler,
    _cpu,
)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
