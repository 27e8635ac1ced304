"""What a crew's roles and channels did, second by second, as stages and queues."""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.channel import Activity, Crew, Interval
from headrace.record.machine import Usage
from headrace.view.moment import Machine, Queue, Stage

__all__ = ["Timeline"]

SAMPLES = 10  # looks over which the fill of a channel and the steady stages are averaged
PROMISES = "starts"  # what an asynchronous plan tells its actors with; how full it is says nothing of who waits
_RANKED = re.compile(r"(.+)\[(\d+)\]")


class Timeline:
    """Looks at a crew from time to time.

    interval, stages, queues, machine: of the last look. steady: the stages of the last few looks, averaged. restarts:
    roles that were started again so far. roles: the driver and every role, as in roles.json.
    """

    def __init__(self) -> None:
        self.interval = 0.0
        self.stages: tuple[Stage, ...] = ()
        self.steady: tuple[Stage, ...] = ()
        self.queues: tuple[Queue, ...] = ()
        self.restarts = 0
        self.roles: list[dict[str, Any]] = []
        self._usage = Usage()
        self.machine: Machine = self._usage.look([os.getpid()])
        self._fills: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._looks: deque[tuple[Stage, ...]] = deque(maxlen=SAMPLES)
        self._busy: defaultdict[int, float] = defaultdict(float)  # seconds, by process
        self._seconds = 0.0

    def look(self, crew: Crew | None) -> None:
        """Note what has happened since the last look; without a crew, only what this process uses."""
        members = crew.members if crew else ()
        self.roles = [{"name": "driver", "rank": 0, "incarnation": 0, "pid": os.getpid()}]
        self.roles += [
            {"name": each.name, "rank": each.rank, "incarnation": each.incarnation, "pid": each.pid} for each in members
        ]
        self.restarts = sum(each.incarnation for each in members)
        self.machine = self._usage.look(role["pid"] for role in self.roles)
        if crew is not None:
            self._take(crew.timeline())

    def skip(self, crew: Crew | None) -> None:
        """Forget what has happened since the last look: the driver did something else than to learn."""
        if crew is not None:
            crew.timeline()

    @property
    def roof_fraction(self) -> float | None:
        """The share of the time in which the process worked that waited least; None where nothing was seen.

        At 1 that process never waited, and the run is as fast as it can be with roles that take as long as these.
        """
        if not self._seconds or not self._busy:
            return None
        return min(1.0, max(self._busy.values()) / self._seconds)

    def _take(self, interval: Interval) -> None:
        seconds = max(interval.seconds, 1e-9)
        stages, queues = [], []
        pids = {(role["name"], role["rank"]): role["pid"] for role in self.roles}
        for activity in interval.activities:
            if activity.kind == "role":
                name, rank = _parts(activity.name)
                self._busy[pids.get((name, rank), os.getpid())] += activity.busy
                life = activity.busy + activity.starved + activity.blocked
                if life > 0:
                    stages.append(_stage(name, rank, activity, life, seconds))
            elif activity.kind == "channel" and _parts(activity.name)[0] != PROMISES:
                fills = self._fills[activity.name]
                fills.append(activity.held / activity.capacity)
                fill = sum(fills) / len(fills)
                queues.append(
                    Queue(activity.name, round(activity.items / seconds, 3), round(fill, 4), activity.capacity)
                )
        self.interval, self.stages, self.queues = interval.seconds, tuple(stages), tuple(queues)
        self._looks.append(self.stages)
        self.steady = tuple(
            _mean([stage for look in self._looks for stage in look if _same(stage, now)]) for now in stages
        )
        self._seconds += interval.seconds


def _stage(name: str, rank: int, activity: Activity, life: float, seconds: float) -> Stage:
    starved, blocked = round(activity.starved / life, 4), round(activity.blocked / life, 4)
    busy = round(1.0 - starved - blocked, 4)  # so that the three sum to 1
    return Stage(name, rank, round(activity.items / seconds, 3), busy, starved, blocked)


def _same(stage: Stage, other: Stage) -> bool:
    return (stage.name, stage.rank) == (other.name, other.rank)


def _mean(stages: Sequence[Stage]) -> Stage:
    """One copy of a role over several looks."""
    names = ("per_second", "busy", "starved", "blocked")
    means = {name: sum(getattr(stage, name) for stage in stages) / len(stages) for name in names}
    return replace(stages[0], **means)


def _parts(name: str) -> tuple[str, int]:
    """The name and the rank of a role, from "collect[1]"."""
    found = _RANKED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)
