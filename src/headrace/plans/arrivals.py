"""Whose rollout an asynchronous plan's learner takes next: as they come, or as a schedule says they came.

A rollout here is whatever an actor makes of one: the rollout itself, or the gradient that it computed from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from headrace.channel import Crew, Lanes, role, wait
from headrace.plans.admission import Admission
from headrace.plans.schedule import Turn

__all__ = ["NEWEST", "Ages", "Arrivals", "Repeated", "Rules", "Taken", "begun"]

NEWEST = -1
"""In place of a version: whichever is the newest when the actor gets there."""
_WORD = 2**32


class Made(Protocol):
    """What is taken: it says with which version it was made, and which of its actor's it is."""

    @property
    def version(self) -> Tensor: ...  # [T, B]
    @property
    def sequence(self) -> Tensor: ...  # [B]


M = TypeVar("M", bound=Made)


class Taken(NamedTuple, Generic[M]):
    """A turn, and a view of its rollout that is valid until the next take."""

    turn: Turn
    rollout: M


class Rules(NamedTuple):
    """By which rollouts are taken. batch: so many a round. max_lag: in updates, of which a round has `passes`.

    answered: who has handed a rollout in waits for the weights that it has moved before it begins another.
    """

    actors: int
    batch: int
    max_lag: int | None
    num_steps: int
    on_stale: str = "wait"
    passes: int = 1
    answered: bool = False


def begun(number: int, version: int) -> int:
    """The control word by which an actor says with which weights it made its rollout `number` begin."""
    return (number + 1) * _WORD + version


class Arrivals(Generic[M]):
    """Rollouts as they come, first come, first served, as far as the plan's bound on the lag allows.

    starts: a channel to each actor with its promises, (version, rows) each. Who takes one pulls the newest weights
    after that, so that what has not been taken when weights are published acts with these weights, or with later ones.
    """

    def __init__(self, rules: Rules, crew: Crew, like: M, name: str = "rollouts") -> None:
        ahead = -(-rules.batch // rules.actors)  # what an actor has to make of a batch while another is learned
        self._rules, self._clock = rules, role().clock
        # Of rounds, each of as many updates as there are passes; the last pass is the one that must not be too late.
        bound = None
        if rules.max_lag is not None and rules.on_stale != "drop":
            bound = (rules.max_lag - rules.passes + 1) // rules.passes
        self._admission = Admission(rules.actors, rules.batch, bound, ahead)
        self.starts: Lanes[tuple[int, int]] = crew.lanes(rules.actors, ahead, (0, 0), name="starts")
        self.lanes: Lanes[M] = crew.lanes(rules.actors, ahead, like, name=name)
        self._ends = self.lanes.to_take
        self._next = 0  # whose turn it is among those that are ready
        self._versions: list[dict[int, int]] = [{} for _ in range(rules.actors)]  # of rollouts that have begun
        self._answered = [0] * rules.actors  # how many of each are in the weights
        self._waited: dict[int, float] = {}  # seconds, by rank

    def take(self, version: int) -> Taken[M] | None:
        """The next rollout. version: of the learner's weights."""
        rules, rank = self._rules, self._ready()
        rollout = self.lanes[rank].take()
        acted = int(rollout.version[0, 0])
        bound = rules.max_lag if rules.on_stale == "drop" else None
        late = bound is not None and version + rules.passes - 1 - acted > bound
        rows = int((rollout.version[:, 0] >= 0).sum()) if rules.on_stale == "cut" else rules.num_steps
        self._versions[rank].pop(int(rollout.sequence[0]), None)
        self._admission.take(rank)
        if not late:
            self._admission.fill()
        self._promise()  # before the update that may come now
        return Taken(Turn(rank, acted, "dropped" if late else "learned", rows), rollout)

    def advance(self) -> None:
        """The weights of the next round have been published."""
        self._admission.advance(self._started())
        self._answered = [lane.taken for lane in self.lanes]
        self._promise()

    def tell(self) -> dict[str, float]:
        """How long it was waited for rollouts since the last time, and for whose most."""
        waited, self._waited = self._waited, {}
        longest = max(waited, key=waited.__getitem__)
        return {"perf/waited_seconds": sum(waited.values()), "perf/waited_rank": float(longest)}

    def under_way(self) -> Iterator[Turn]:
        """The rollouts that have begun and were not taken, as far as it is known with which weights."""
        self._look()
        for rank, versions in enumerate(self._versions):
            number = self.lanes[rank].taken
            while number in versions:
                yield Turn(rank, versions[number], "begun", self._rules.num_steps)
                number += 1

    def _ready(self) -> int:
        """The actor whose rollout is next, once it is there."""
        began = self._clock()
        while True:
            self._promise()
            allowed = self._admission.may_take()
            there = [self._has_one(rank) for rank in range(len(self._ends))]  # once: more may come at any moment
            ready = [rank for rank in allowed if there[rank]]
            if ready:
                rank = min(ready, key=lambda rank: (rank - self._next) % len(self._ends))
                self._next = rank + 1
                self._waited[rank] = self._waited.get(rank, 0.0) + self._clock() - began
                return rank
            # A rollout that comes too early to be taken changes what may start, so that it is waited for, too.
            pending = [rank for rank, is_there in enumerate(there) if not is_there]
            if self._rules.on_stale == "cut" and any(there):
                self._cut(allowed)
            wait(*(self._ends[rank] for rank in pending))
            for rank in pending:
                if self._ends[rank].ready() and not self._has_one(rank):
                    self.lanes[rank].take()  # it is closed, and the error says why

    def _cut(self, ranks: Sequence[int]) -> None:
        """Tell those whose rollouts are due first to hand in what they have."""
        for rank in self._admission.first_due(ranks):
            number = self.lanes[rank].taken
            if self.starts[rank].taken > number:
                self.lanes[rank].control = number + 1

    def _promise(self) -> None:
        self._look()
        delivered = [lane.delivered for lane in self.lanes]
        over = self._answered if self._rules.answered else self._started()
        for rank in self._admission.promise(over, delivered):
            self.starts[rank].put((NEWEST, self._rules.num_steps))

    def _look(self) -> None:
        """Note which rollouts have begun."""
        for start, versions in zip(self.starts, self._versions, strict=True):
            number, version = divmod(start.control, _WORD)
            if number > 0:
                versions[number - 1] = version

    def _started(self) -> list[int]:
        return [start.taken for start in self.starts]

    def _has_one(self, rank: int) -> bool:
        lane = self.lanes[rank]
        return lane.delivered != lane.taken


class Repeated(Generic[M]):
    """Rollouts in the order of a schedule, each of them made with the weights that it names."""

    AHEAD = 2
    """Starts that an actor knows of: what it makes, and what it goes on with."""

    def __init__(self, actors: int, crew: Crew, like: M, turns: Sequence[Turn], name: str = "rollouts") -> None:
        self._turns = deque(turn for turn in turns if turn.fate != "begun")
        self._left = [deque(turn for turn in turns if turn.rank == rank) for rank in range(actors)]
        self._promised = [0] * actors
        self.starts: Lanes[tuple[int, int]] = crew.lanes(actors, self.AHEAD, (0, 0), name="starts")
        self.lanes: Lanes[M] = crew.lanes(actors, 1, like, name=name)

    def take(self, version: int) -> Taken[M] | None:
        """The next rollout of the schedule; None after the last one. version: of the learner's weights."""
        if not self._turns:
            self._fail()
            return None
        self._promise()
        turn = self._turns.popleft()
        rollout = self.lanes[turn.rank].take()
        self._promise()
        return Taken(turn, rollout)

    def advance(self) -> None:
        """The weights of the next round have been published."""

    def tell(self) -> dict[str, float]:
        """Nothing: how long it takes to repeat a run says nothing of it."""
        return {}

    def under_way(self) -> Iterator[Turn]:
        """What the schedule says to have been under way when its run failed."""
        for left in self._left:
            yield from (turn for turn in left if turn.fate == "begun")

    def _promise(self) -> None:
        for rank, left in enumerate(self._left):
            while left and left[0].fate != "begun" and self._promised[rank] - self.lanes[rank].taken < self.AHEAD:
                self._start(rank, left.popleft())

    def _start(self, rank: int, turn: Turn) -> None:
        self.starts[rank].put((turn.version, turn.rows))
        self._promised[rank] += 1

    def _fail(self) -> None:
        """Let everybody make what was under way when the run failed. It may fail again, now that all else is done."""
        for turns in zip_longest(*self._left):
            ranks = [rank for rank, turn in enumerate(turns) if turn is not None]
            for rank in ranks:
                self._start(rank, turns[rank])
            for rank in ranks:
                self.lanes[rank].take()


class Ages:
    """How old weights are in seconds, from when they were published to when it is learned from what they made."""

    KEPT = 1000
    """Versions whose time is known. What acted with older ones counts as old as the oldest of these."""

    def __init__(self, clock: Callable[[], float], version: int) -> None:
        self._clock = clock
        self._times = deque([clock()], self.KEPT)
        self._newest = version

    def published(self, version: int) -> None:
        """This version is there from now on."""
        self._times.append(self._clock())
        self._newest = version

    def tell(self, turns: Sequence[Turn]) -> dict[str, float]:
        """Percentiles over these rollouts."""
        now = self._clock()
        ages = [now - self._times[max(0, len(self._times) - 1 - self._newest + turn.version)] for turn in turns]
        p50, p95 = np.percentile(ages, (50, 95))
        return {"lag/seconds_p50": float(p50), "lag/seconds_p95": float(p95), "lag/seconds_max": max(ages)}
