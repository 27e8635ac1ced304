"""What a role knows of itself, and how it waits."""

from __future__ import annotations

import os
import platform
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from numpy.random import SeedSequence

from headrace.channel import End
from headrace.errors import Closed, Stalled
from headrace.place import board as b
from headrace.place.beat import TICK, Beat
from headrace.place.board import Board
from headrace.place.memory import Memory

__all__ = ["Awaited", "Context", "Identity"]

_give_way, _now = os.sched_yield, time.monotonic_ns

# A yield that took so long gave a whole turn to another program. Who sleeps is woken at once even then; who asks for
# turns loses one after the other. So this many waits do not ask again.
TURN, CROWDED = 1_000_000, 100  # nanoseconds, waits

NOTED = 30.0  # seconds. So long a wait of the driver is noted, and again after as long

LONG = 100_000  # nanoseconds. After a wait that lasted so long the next one blocks at once: looking would be in vain


class Awaited(Protocol):
    """What a role can wait for: an end of a channel, a version, the other ranks of a group."""

    word: int  # STARVED or BLOCKED: what such a wait counts as

    def ready(self) -> bool:
        """Whether the wait is over."""

    def charge(self, nanoseconds: int) -> None:
        """Count a finished wait."""

    def orphaned(self) -> str:
        """Why nobody can ever end this wait, or the empty string."""

    def describe(self) -> str:
        """What is waited for, to follow "waits to"."""


class Overseer(Protocol):
    """Who looks after the roles when their driver waits: the crew."""

    def raise_failure(self) -> None:
        """Raise the first failure of a role, if there is one."""

    def look_after_roles(self) -> None:
        """Notice what no role rings for."""

    def note_wait(self, seconds: float, what: str) -> None:
        """Note that the driver has waited for so long."""


class Identity:
    """Which life of which role this is."""

    def __init__(self, name: str, rank: int, of: int, incarnation: int, device: str, index: int, seed: int) -> None:
        self.name, self.rank, self.of = name, rank, of
        self.incarnation, self.device, self.index, self.crew_seed = incarnation, device, index, seed

    def __str__(self) -> str:
        return f"{self.name}[{self.rank}]"


class Context:
    """A role from inside, where roles run beside each other; Inline waits in another way.

    spins: how often a wait looks again before it blocks. An idle virtual core takes 30 µs to wake.
    """

    def __init__(self, identity: Identity, crew: str, board: Board, memory: Memory, spins: int) -> None:
        self.identity = identity
        self.name, self.rank, self.of = identity.name, identity.rank, identity.of
        self.incarnation, self.device, self.index = identity.incarnation, identity.device, identity.index
        self.crew, self.board, self.memory = crew, board, memory
        self.heard = board.bell(self.index).heard
        # x86 keeps stores in order; elsewhere a semaphore operation stands between data and what shows them.
        self.fence = None if platform.machine() in ("x86_64", "AMD64") else board.bell(self.index).fence
        self.closers: list[Callable[[], None]] = []  # of the ends that this role owns
        self.bound: list[Callable[[], None]] = []  # lets go of each handle that this role has used
        self.overseer: Overseer | None = None  # for the driver: its crew
        self._spins = range(spins)
        self._crowded = 0  # how many more waits block at once
        self._waited = 0  # nanoseconds that the last wait took
        self._page = (self.index + 1) * b.WORDS

    @property
    def stopping(self) -> bool:
        return self.board.words[b.ALARM] == b.STOPPING

    @property
    def seed(self) -> SeedSequence:
        return SeedSequence((self.identity.crew_seed, zlib.crc32(self.name.encode()), self.rank, self.incarnation))

    def share_of(self, total: int) -> range:
        return range(total * self.rank // self.of, total * (self.rank + 1) // self.of)

    def clock(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        until = self.clock() + seconds
        self.board.words[self._page + b.BEAT] = 0
        bell = self.board.bell(self.index)
        while (left := until - self.clock()) > 0:
            if self.board.words[b.ALARM]:
                self.heed_alarm()
            if self.overseer is not None:
                self.overseer.look_after_roles()
            bell.wait(min(left, TICK))

    def heartbeat(self, text: str) -> None:
        self.board.say(self.index, text)

    def watch(self, doing: str, within: float | None = None, advice: str = "") -> Beat:
        return Beat(self.board, self.index, doing, within, advice)

    def wait(self, *ends: End, timeout: float | None = None) -> list[End]:
        awaited: tuple[Awaited, ...] = ends  # type: ignore[assignment]
        if self.board.words[b.ALARM]:
            self.heed_alarm()
        if not any(end.ready() for end in awaited):
            self.until(awaited, timeout)
        self.heard()
        return [end for end in ends if end.ready()]

    def until(self, ends: Sequence[Awaited], timeout: float | None) -> None:
        """Return when one of the ends is ready. Raises Stalled after `timeout` seconds, Closed, or a role's failure."""
        began = looked = _now()
        ready = ends[0].ready if len(ends) == 1 else lambda: any(end.ready() for end in ends)
        try:
            # For about as long as it takes to wake an idle core.
            for _ in self._spins if not self._crowded and self._waited < LONG else ():
                _give_way()  # a spinner that does not yield falls to a fifth where roles outnumber cores
                before, looked = looked, _now()
                if looked - before > TURN:
                    self._crowded = CROWDED
                if ready():
                    return
                if self._crowded:
                    break
            else:
                self._crowded = max(0, self._crowded - 1)
            self._block(ends, began, timeout)
        finally:
            self._waited = waited = _now() - began
            self.board.words[self._page + ends[0].word] += waited
            for end in ends:
                end.charge(waited)

    def _block(self, ends: Sequence[Awaited], began: int, timeout: float | None) -> None:
        bell, words = self.board.bell(self.index), self.board.words
        words[self._page + b.BEAT] = 0
        words[self._page + b.SINCE] = began
        words[self._page + b.WAITING] = ends[0].word
        noted = began
        try:
            while True:
                while bell.heard():  # before the look: a ring that comes after it ends the wait below
                    pass
                if words[b.ALARM]:
                    self.heed_alarm()
                if any(end.ready() for end in ends):
                    return
                self.raise_if_orphaned(ends)
                if self.overseer is not None:
                    self.overseer.look_after_roles()
                    if _now() - noted > 1e9 * NOTED:
                        noted = _now()
                        self.overseer.note_wait((noted - began) / 1e9, " or to ".join(end.describe() for end in ends))
                seconds = TICK
                if timeout is not None:
                    left = timeout - (_now() - began) / 1e9
                    if left <= 0:
                        raise self.stalled(ends, timeout)
                    seconds = min(seconds, left)
                bell.wait(seconds)
        finally:
            words[self._page + b.WAITING] = 0

    def raise_if_orphaned(self, ends: Sequence[Awaited]) -> None:
        """Raise Closed when nobody is left who could end this wait."""
        reasons = [end.orphaned() for end in ends]
        if all(reasons) and not any(end.ready() for end in ends):  # the last of them may have put, then ended
            raise Closed(f"{self.identity} waits to {ends[0].describe()}, but {reasons[0]}")

    def stalled(self, ends: Sequence[Awaited], timeout: float) -> Stalled:
        """The error that says who waited, on what, how long."""
        what = " or to ".join(end.describe() for end in ends)
        return Stalled(f"{self.identity} waited {timeout:g} s to {what}")

    def heed_alarm(self) -> None:
        """Raise what the alarm is about, if that is this role's business."""
        if self.overseer is not None:
            self.overseer.raise_failure()
        elif self.stopping:
            raise Closed(f"{self.identity}: the crew is stopping")

    def close_ends(self) -> None:
        """Close every end that this role owns, so that no peer waits for it in vain."""
        for close in self.closers:
            close()

    def let_go(self) -> None:
        """Unbind every handle, so that the crew's memory is not kept by who has no use for it."""
        for unbind in self.bound:
            unbind()
        self.bound.clear()
        self.overseer = None
