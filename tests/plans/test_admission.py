"""The rule of AsyncBatches by itself: against its definition, and in a simulation of any speeds, without a network."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from headrace.plans.admission import Admission


def fits(dates: list[int], free: int, batch: int, max_lag: int, now: int) -> bool:
    """The definition, word for word."""
    dues = [date + max_lag for date in dates]
    return all(
        sum(due <= d for due in dues) <= free + batch * (d - now) for d in range(now, max(dues, default=now) + 1)
    )


@dataclass
class Books:
    """What is outstanding, kept by hand."""

    actors: int
    dates: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dates = [[] for _ in range(self.actors)]

    def all_but(self, rank: int | None = None) -> list[int]:
        return [date for k, dates in enumerate(self.dates) for date in (dates[1:] if k == rank else dates)]


@pytest.mark.parametrize("seed", range(8))
def test_what_may_start_and_be_taken_is_what_the_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    actors, batch, max_lag = rng.randint(1, 5), rng.randint(1, 4), rng.randint(0, 4)
    ahead = rng.randint(1, 3)
    admission, books = Admission(actors, batch, max_lag, ahead), Books(actors)
    started, taken, promised = [0] * actors, [0] * actors, [0] * actors
    now, free, refused, blocked = 0, batch, 0, 0
    for _ in range(400):
        for rank in admission.promise(started, taken):
            assert promised[rank] - started[rank] < ahead
            promised[rank] += 1
            books.dates[rank].append(now)
            assert fits(books.all_but(), free, batch, max_lag, now)
        if any(promised[rank] - started[rank] < ahead for rank in range(actors)):  # then it was the rule that said no
            assert not fits([*books.all_but(), now], free, batch, max_lag, now)
            refused += 1
        for rank in range(actors):
            started[rank] = rng.randint(started[rank], promised[rank])
        if free == 0:
            now, free = now + 1, batch
            admission.advance(started)
            for rank, dates in enumerate(books.dates):
                for k in range(promised[rank] - started[rank]):
                    dates[-1 - k] = now
            continue
        allowed = [
            rank
            for rank in range(actors)
            if books.dates[rank] and fits(books.all_but(rank), free - 1, batch, max_lag, now)
        ]
        assert admission.may_take() == allowed
        blocked += len(allowed) < sum(map(bool, books.dates))
        ready = [rank for rank in allowed if started[rank] > taken[rank]]
        if ready:
            rank = rng.choice(ready)
            taken[rank] += 1
            books.dates[rank].pop(0)
            admission.take(rank)
            admission.fill()
            free -= 1
        assert [list(dates) for dates in admission._dates] == books.dates
    assert now > 10


@dataclass
class Simulation:
    """Actors and a learner with random speeds, which keep to the rule or, with `bound` None, do not."""

    seed: int
    bound: bool = True
    updates: int = 30

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.actors, self.batch, self.max_lag = rng.randint(1, 6), rng.randint(1, 5), rng.randint(0, 5)
        self.ahead = math.ceil(self.batch / self.actors)
        self.admission = Admission(self.actors, self.batch, self.max_lag if self.bound else None, self.ahead)
        self.speeds = [math.exp(rng.uniform(-3, 3)) for _ in range(self.actors)]
        self.pace = rng.choice([0.0, math.exp(rng.uniform(-3, 3))])
        self.events: list[tuple[float, int, str, int]] = []
        self.numbers = itertools.count()
        self.now = 0.0
        self.version, self.updating = 0, False
        self.promised, self.started, self.delivered, self.taken = ([0] * self.actors for _ in range(4))
        self.stages = ["idle"] * self.actors
        self.acting = [0] * self.actors  # with which version
        self.lanes: list[deque[int]] = [deque() for _ in range(self.actors)]
        self.lags: list[int] = []
        self.turn = 0

    def after(self, seconds: float, what: str, rank: int) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), what, rank))

    def run(self) -> None:
        self.settle()
        while self.version < self.updates:
            assert self.events, f"deadlock in simulation {self.seed}"
            self.now, _, what, rank = heapq.heappop(self.events)
            if what == "pull":  # a while after the promise was taken up; meanwhile weights may be published
                self.acting[rank] = self.version
                self.stages[rank] = "acting"
                self.after(self.speeds[rank] * self.rng.expovariate(1), "act", rank)
            elif what == "act":
                self.stages[rank] = "putting"
            else:
                self.version, self.updating = self.version + 1, False
                self.admission.advance(self.started)
            self.settle()

    def settle(self) -> None:
        """Let everybody go as far as they can without time passing."""
        changed = True
        while changed:
            changed = self.learn()
            for rank in range(self.actors):
                changed |= self.step(rank)

    def step(self, rank: int) -> bool:
        if self.stages[rank] == "putting" and len(self.lanes[rank]) < self.ahead:
            self.lanes[rank].append(self.acting[rank])
            self.delivered[rank] += 1
            self.stages[rank] = "idle"
            return True
        if self.stages[rank] == "idle" and self.promised[rank] > self.started[rank]:
            self.started[rank] += 1
            self.stages[rank] = "pulling"
            self.after(self.rng.choice([0.0, 1.0]) * self.rng.random(), "pull", rank)
            return True
        return False

    def learn(self) -> bool:
        if self.updating:
            return False
        fresh = self.admission.promise(self.started, self.delivered)
        for rank in fresh:
            self.promised[rank] += 1
        ready = [rank for rank in self.admission.may_take() if self.lanes[rank]]
        if not ready:
            return bool(fresh)
        rank = min(ready, key=lambda rank: (rank - self.turn) % self.actors)
        self.turn = rank + 1
        self.lags.append(self.version - self.lanes[rank].popleft())
        self.taken[rank] += 1
        self.admission.take(rank)
        self.admission.fill()
        if self.admission.free == 0:
            self.updating = True
            self.after(self.pace * self.rng.expovariate(1), "learn", 0)
        return True


def lag_is_bounded(seed: int) -> Simulation:
    run = Simulation(seed)
    run.run()
    assert max(run.lags) <= run.max_lag, seed
    assert run.updates * run.batch <= len(run.lags) <= (run.updates + 1) * run.batch
    # Nobody is left behind: what an actor makes, or goes on with, is no older than the bound.
    for rank, stage in enumerate(run.stages):
        held = [*run.lanes[rank], *([run.acting[rank]] if stage in ("acting", "putting") else [])]
        assert all(run.version - version <= run.max_lag for version in held), (seed, rank)
        assert run.promised[rank] > 0, (seed, rank)
    return run


def test_no_deadlock_and_no_breach_at_any_speeds() -> None:
    runs = [lag_is_bounded(seed) for seed in range(60)]
    assert any(max(run.lags) == run.max_lag > 2 for run in runs)  # the bound is reached, so that it binds


@pytest.mark.slow
def test_no_deadlock_and_no_breach_in_a_thousand_settings() -> None:
    for seed in range(60, 1060):
        lag_is_bounded(seed)


@pytest.mark.nightly
def test_no_deadlock_and_no_breach_in_ten_thousand_settings() -> None:
    for seed in range(1060, 11060):
        lag_is_bounded(seed)


def test_without_the_rule_the_bound_is_broken() -> None:
    """The same simulation, in which nothing is refused: what it proves of the rule is not true by itself."""
    broken = 0
    for seed in range(40):
        run = Simulation(seed, bound=False)
        run.run()
        broken += max(run.lags) > run.max_lag
    assert broken > 10


def test_idle_actors_are_promised_a_start_before_busy_ones() -> None:
    admission = Admission(actors=3, batch_rollouts=1, max_lag=2, ahead=1)
    assert admission.promise([0, 0, 0], [0, 0, 0]) == [0, 1, 2]  # as many as fit: 1 + 1 · 2
    assert admission.promise([1, 1, 1], [0, 0, 0]) == []
    admission.take(2)
    admission.fill()
    assert admission.promise([1, 1, 1], [0, 0, 1]) == []  # a place less, and one fewer that needs one
    admission.advance([1, 1, 1])
    assert admission.promise([1, 1, 1], [0, 0, 1]) == [2]


def test_what_was_promised_and_not_begun_acts_with_the_weights_of_the_next_round() -> None:
    admission = Admission(actors=1, batch_rollouts=1, max_lag=1, ahead=2)
    assert admission.promise([0], [0]) == [0, 0]
    admission.take(0)
    admission.fill()
    assert admission.promise([1], [1]) == []  # as much as one more round can take is outstanding
    assert [list(dates) for dates in admission._dates] == [[0]]
    admission.advance([1])
    assert [list(dates) for dates in admission._dates] == [[1]]  # the first has begun; the second has not
