"""Roles one at a time, in one process: the same role functions, in an order that a seed repeats.

Each role has a thread of its own and all but one of them wait for the baton. It changes hands only where a role would
wait; who gets it among those that could go on is drawn from the crew's seed. When nobody could, the clock moves to the
nearest timeout; when there is none, that is a deadlock, and is named at once.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headrace.errors import Closed, Stalled
from headrace.place import board as b
from headrace.place.beat import TICK
from headrace.place.context import Awaited, Context, Identity
from headrace.place.life import Post
from headrace.place.threads import ThreadCrew

__all__ = ["Inline", "InlineCrew"]

_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None


@dataclass(frozen=True)
class Inline:
    """Every role runs in the driver's process, one at a time. For tests, debuggers and a single core."""

    poison: bool = False
    """Overwrite what a take has given back, so that a view kept too long is seen. For finding faults."""

    def crew(self, seed: int = 0) -> InlineCrew:
        """A crew whose roles draw their seeds, and whose order is drawn, from this one."""
        return InlineCrew(seed, self.poison)


class Baton:
    """Who runs, who waits for what, and what time it is."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0  # seconds of the virtual clock
        self._order = random.Random(seed)
        self._contexts: list[InlineContext] = []
        self._handing_on = threading.Lock()  # against the driver, which may take the baton from a role that hangs
        self._holder: InlineContext | None = None

    def join(self, context: InlineContext) -> None:
        """A role that takes part from now on."""
        self._contexts.append(context)

    def drop(self, context: InlineContext) -> None:
        """A role that has ended hands the baton on for good."""
        with self._handing_on:
            if context.lost:
                return
            self._contexts.remove(context)
            chosen = self._holder = self._next()
        chosen.grant()

    def take_from(self, index: int) -> bool:
        """Give the driver the baton of a role that hangs, for good; False where it has just handed it on."""
        with self._handing_on:
            holder = self._holder
            if holder is None or holder.index != index:
                return False
            driver = self._contexts[0]
            driver.grant()  # first: what Ctrl-C cuts short here is done again at the driver's next wait
            holder.lost = True
            self._contexts.remove(holder)
            self._holder = driver
        return True

    def is_alone(self) -> bool:
        """Whether only the driver is left."""
        return len(self._contexts) == 1

    def park(self, context: InlineContext) -> None:
        """Hand the baton to whoever can go on, and return when it comes back."""
        with self._handing_on:
            if context.lost:
                raise Closed(f"{context.identity} hung for too long; the others have gone on without it")
            chosen = self._holder = self._next()
        if chosen is not context:
            context.core.leave()
            chosen.grant()
            context.await_grant()

    def _next(self) -> InlineContext:
        driver = self._contexts[0]
        if driver.interruption is not None:
            return driver
        able = [context for context in self._contexts if context.could_go_on()]
        if able:
            return self._order.choice(able)
        for context in self._contexts:
            if context.is_orphaned():
                context.verdict = "orphaned"
                return context
        sleepers = [context for context in self._contexts if context.deadline is not None]
        if sleepers:
            first = min(sleepers, key=lambda context: (context.deadline, context.index))
            assert first.deadline is not None
            self.now = max(self.now, first.deadline)
            first.verdict = "late"
            return first
        driver.verdict = "; ".join(f"{c.identity} waits to {c.describe()}" for c in self._contexts)
        return driver


class Core:
    """Where a role's thread may run: while it waits, only where whoever wakes it runs.

    One role runs at a time, so another core is never free for long, only cold: PPO takes a fifth longer there. Whoever
    runs may run anywhere, so that threads that it starts (of BLAS, of an environment) may too.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._allowed: set[int] = set()

    def leave(self) -> None:
        """For the thread itself, before it waits."""
        if _getcpu is not None:
            self._thread, self._allowed = threading.get_native_id(), os.sched_getaffinity(0)

    def call(self) -> None:
        """For who wakes it, before that."""
        if len(self._allowed) > 1 and _getcpu is not None:
            with suppress(OSError):  # it is not ours to decide, as in some containers
                os.sched_setaffinity(self._thread, {_getcpu()})

    def enter(self) -> None:
        """For the thread itself, when it runs again."""
        if len(self._allowed) > 1:
            with suppress(OSError):
                os.sched_setaffinity(0, self._allowed)


class InlineContext(Context):
    """A role from inside, where one role runs at a time."""

    def __init__(self, identity: Identity, crew: InlineCrew) -> None:
        super().__init__(identity, crew.id, crew.board, crew.memory, spins=0)
        self._baton = crew.baton
        self.core = Core()
        self._granted = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self._started = False
        self._leaving = False
        self._patience = TICK if identity.index == b.DRIVER else -1  # seconds between two looks at a role that runs
        self.lost = False  # whether the others have gone on without it
        self._ends: Sequence[Awaited] = ()
        self.deadline: float | None = None
        self.verdict = ""  # why it was woken, if not because it could go on
        self.interruption: BaseException | None = None  # what a signal handler raised while it waited
        crew.baton.join(self)

    def clock(self) -> float:
        return self._baton.now

    def sleep(self, seconds: float) -> None:
        self._wait((), self.clock() + seconds)
        self._check_alarm()

    def _block(self, ends: Sequence[Awaited], began: int, timeout: float | None) -> None:
        self._wait(ends, None if timeout is None else self.clock() + timeout)
        self._check_alarm()
        if any(end.ready() for end in ends):
            return
        if self.verdict == "orphaned":
            self.raise_if_orphaned(ends)
        if self.verdict == "late":
            assert timeout is not None
            raise self.stalled(ends, timeout)
        raise Stalled(f"deadlock: {self.verdict}")

    def _wait(self, ends: Sequence[Awaited], deadline: float | None) -> None:
        if not self._leaving:
            self._check_alarm()
        self.board.words[self._page + b.BEAT] = 0
        self._started, self._ends, self.deadline, self.verdict = True, ends, deadline, ""
        self._baton.park(self)
        self.deadline = None
        if self.interruption is not None:
            error, self.interruption = self.interruption, None
            raise error

    def _check_alarm(self) -> None:
        if self.board.words[b.ALARM]:
            self.heed_alarm()

    def could_go_on(self) -> bool:
        """Whether its wait is over, or there is an alarm that ends it."""
        if self._leaving:
            return self._baton.is_alone()
        ends_wait = b.FAILURE if self.index == b.DRIVER else b.STOPPING
        return not self._started or self.board.words[b.ALARM] == ends_wait or any(end.ready() for end in self._ends)

    def is_orphaned(self) -> bool:
        """Whether nobody is left who could end its wait."""
        return bool(self._ends) and all(end.orphaned() for end in self._ends)

    def describe(self) -> str:
        """What it waits to do."""
        return " or to ".join(end.describe() for end in self._ends) or "go on"

    def grant(self) -> None:
        """Give it the baton."""
        self.core.call()
        self._granted = True
        self._gate.release()

    def await_grant(self) -> None:
        """Return when it has the baton. Ctrl-C counts from the running role's next wait on."""
        while not self._granted:
            try:
                if not self._gate.acquire(True, self._patience) and self.overseer is not None:
                    self.overseer.look_after_roles()
            except BaseException as error:  # KeyboardInterrupt, or whatever a signal handler raises
                self.interruption = error
        self._gate.acquire(blocking=False)  # it is open still when Ctrl-C came between the grant and the gate
        self._granted = False
        self.core.enter()

    def see_all_out(self) -> None:
        """For the driver of a crew that stops: let the others run until each has ended."""
        self._leaving = True
        while not self._baton.is_alone():
            self._wait((), None)


class InlineCrew(ThreadCrew):
    """A crew of which one role runs at a time."""

    def __init__(self, seed: int, poison: bool) -> None:
        self.baton = Baton(seed)
        super().__init__(seed, poison, stall_after=30.0)

    def _context(self, identity: Identity) -> Context:
        return InlineContext(identity, self)

    def _play(self, context: Context, role: Callable[[], None]) -> BaseException | None:
        assert isinstance(context, InlineContext)
        context.core.leave()
        context.await_grant()
        return super()._play(context, role)

    def _give_up(self, post: Post) -> None:
        if self.baton.take_from(post.index):
            super()._give_up(post)

    def _depart(self, context: Context) -> None:
        assert isinstance(context, InlineContext)
        super()._depart(context)
        self.baton.drop(context)

    def _finish(self, hurry: bool) -> None:
        assert isinstance(self.driver, InlineContext)
        self.driver.see_all_out()
        super()._finish(hurry)
