"""Who may start a rollout and whose may be taken, so that none is learned from too late and nobody waits for ever.

Time is counted in rounds: a round is one batch and what is learned from it. A rollout that acted with the weights of
round r is due in round r + max_lag. Those that are outstanding (promised, running or ready) *fit* at round R, with
`free` places left in its batch, if all of them can still be taken in time: for every round d

    outstanding ones that are due by d  ≤  free + batch_rollouts · (d − R)

A start and a take are allowed exactly where the others fit afterwards. So whoever is due first may always be taken, and
where nothing is outstanding a start always fits: there is no deadlock, and no bound is broken, whatever the speeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["Admission"]


class Admission:
    """The outstanding rollouts of every actor, oldest first, each by the round of its weights.

    An actor is promised starts ahead, at most `ahead` of them, so that it need not wait for a learner that learns. It
    takes a promise up by itself, with the newest weights there are. Until then the rollout counts as one of the round
    that runs; `started`, how many promises each actor has taken up so far, says which are dated for good.
    max_lag None: no bound. Every start fits, and every rollout may be taken.
    """

    def __init__(self, actors: int, batch_rollouts: int, max_lag: int | None, ahead: int) -> None:
        self.round, self.free = 0, batch_rollouts
        self._batch, self._max_lag, self._ahead = batch_rollouts, max_lag, ahead
        self._dates: list[deque[int]] = [deque() for _ in range(actors)]
        self._promised = [0] * actors
        self._last = list(range(actors))  # when each was promised a start last, as a running number
        self._number = actors

    def promise(self, started: Sequence[int], delivered: Sequence[int]) -> list[int]:
        """The actors that may start one more rollout each, as often as they are named; idle ones come first."""
        chosen = []
        while self._fits_one_more():
            idle = [
                (promised - delivered[rank], self._last[rank], rank)
                for rank, promised in enumerate(self._promised)
                if promised - started[rank] < self._ahead
            ]
            if not idle:
                break
            _, _, rank = min(idle)
            self._promised[rank] += 1
            self._dates[rank].append(self.round)
            self._last[rank] = self._number = self._number + 1
            chosen.append(rank)
        return chosen

    def may_take(self) -> list[int]:
        """The actors whose oldest outstanding rollout may be taken now, or as soon as it is ready."""
        limit = self._tight()
        return [rank for rank, dates in enumerate(self._dates) if dates and (limit is None or dates[0] <= limit)]

    def first_due(self, ranks: Sequence[int]) -> list[int]:
        """Those of these actors whose oldest rollout is due first."""
        first = min((self._dates[rank][0] for rank in ranks), default=0)
        return [rank for rank in ranks if self._dates[rank][0] == first]

    def take(self, rank: int) -> None:
        """The oldest rollout of this actor has been taken out, for whatever is to become of it."""
        self._dates[rank].popleft()

    def fill(self) -> None:
        """A place in this round's batch is taken."""
        self.free -= 1

    def advance(self, started: Sequence[int]) -> None:
        """The next round has begun, and its weights are there: promises that are not taken up yet are of this one."""
        self.round, self.free = self.round + 1, self._batch
        for rank, dates in enumerate(self._dates):
            for place in range(self._promised[rank] - started[rank]):
                dates[-1 - place] = self.round

    def _fits_one_more(self) -> bool:
        """Whether one that acts with this round's weights would fit. It is due last of all."""
        if self._max_lag is None:
            return True
        return sum(map(len, self._dates)) < self.free + self._batch * self._max_lag

    def _tight(self) -> int | None:
        """The first date whose rollouts need all places there are: later ones have to wait. None: there is none."""
        if self._max_lag is None:
            return None
        dates = sorted(date for dates in self._dates for date in dates)
        for count, date in enumerate(dates, 1):
            if count >= self.free + self._batch * (date + self._max_lag - self.round):
                return date
        return None
