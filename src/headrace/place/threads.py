"""Roles as threads of the driver's process: for environments and models that let the interpreter lock go."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from headrace.errors import ConfigError, Stalled
from headrace.place import board as b
from headrace.place.beat import TICK, Watch
from headrace.place.context import Context, Identity
from headrace.place.crew import BaseCrew
from headrace.place.life import Failure, Post, describe, hang, play
from headrace.place.memory import PrivateMemory
from headrace.place.shipping import unship

__all__ = ["ThreadCrew", "Threads"]


@dataclass(frozen=True)
class Threads:
    """Every role is a thread. They share the interpreter lock, and a thread cannot be ended from outside."""

    stall_after: float = 30.0
    """Seconds that a role may take to notice that the crew stops, before `Stalled` names it."""
    poison: bool = False
    """Overwrite what a take has given back, so that a view kept too long is seen. For finding faults."""

    def crew(self, seed: int = 0) -> ThreadCrew:
        """A crew whose roles draw their seeds from this one."""
        return ThreadCrew(seed, self.poison, self.stall_after)


class ThreadCrew(BaseCrew):
    """A crew of threads."""

    def __init__(self, seed: int, poison: bool, stall_after: float) -> None:
        super().__init__(seed, poison)
        self._stall_after = stall_after
        self._threads: dict[int, threading.Thread] = {}
        self._failed: list[Failure] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self._watch = Watch(self.board)
        return self

    def _enter(self) -> PrivateMemory:
        return PrivateMemory()

    def _context(self, identity: Identity) -> Context:
        return Context(identity, self.id, self.board, self.memory, spins=0)  # a spinner would hold the interpreter lock

    def _pack(self, data: bytes, name: str) -> bytes:
        return data

    def _launch(self, posts: Sequence[Post]) -> None:
        ready = threading.Semaphore(0)
        mine = torch.get_num_threads()
        for post in posts:
            post.pid = os.getpid()
            context = self._context(
                Identity(post.name, post.rank, post.of, post.incarnation, post.device, post.index, self.seed)
            )
            thread = threading.Thread(target=self._run, args=(post, context, ready), name=str(post), daemon=True)
            self._threads[post.index] = thread
            thread.start()
        for _ in posts:
            ready.acquire()
        # A role's count of torch threads is its own, but also becomes the default of threads started later.
        torch.set_num_threads(mine)

    def _run(self, post: Post, context: Context, ready: threading.Semaphore) -> None:
        incarnation = post.incarnation
        torch.get_num_threads()  # the first call in a thread takes the default; the next line would be undone by it
        torch.set_num_threads(post.threads)
        ready.release()

        def role() -> None:
            function, args = unship(post.payload)
            function(*args)

        error = self._play(context, role)
        if error is not None:
            what, text = describe(error)
            heard = self.board.heard(post.index)
            self._failed.append(Failure(post, incarnation, what, traceback=text, cause=error, heard=heard))
            self.board.set(post.index, b.STATE, b.FAILED)
            self.board.raise_alarm(b.FAILURE)
        self._depart(context)

    def _play(self, context: Context, role: Callable[[], None]) -> BaseException | None:
        return play(context, self.id, role)

    def _depart(self, context: Context) -> None:
        """The last thing that a role's thread does."""
        context.let_go()

    def _failures(self) -> list[Failure]:
        return self._failed

    def look_after_roles(self) -> None:
        """A thread tells of its end itself, and cannot be stopped from outside; but it may hang."""
        for index in self._watch.look(post.index for post in self.posts):
            self._give_up(self.posts[index - 1])

    def _give_up(self, post: Post) -> None:
        """Leave a role that hangs to itself."""
        end = "is left behind: a thread cannot be ended from outside, in Processes() it would have been killed"
        self._failed.append(hang(self.board, post, end))
        self.board.set(post.index, b.HANGS, 1)
        self.board.raise_alarm(b.FAILURE)

    def _end_life(self, post: Post) -> None:
        if self.board.get(post.index, b.STATE) not in b.OVER:
            raise ConfigError(
                f"{post} still runs; a thread cannot be ended from outside. Restart it once it has failed."
            )
        self._threads[post.index].join()

    def _finish(self, hurry: bool) -> None:
        until = time.monotonic() + (0.0 if hurry else self._stall_after)
        while alive := [index for index, thread in self._threads.items() if self._is_awaited(index, thread)]:
            if time.monotonic() >= until:
                names = ", ".join(self._threads[index].name for index in alive)
                heard = "; ".join(filter(None, map(self.board.heard, alive)))
                raise Stalled(
                    f"{names}: told to stop, still running after {self._stall_after:g} s"
                    + (f" (last heard: {heard})" if heard else "")
                    + ". A thread cannot be ended from outside: let the role look at role().stopping, or run it in "
                    "Processes()."
                )
            self._threads[alive[0]].join(TICK)
            self.look_after_roles()

    def _is_awaited(self, index: int, thread: threading.Thread) -> bool:
        return thread.is_alive() and not self.board.get(index, b.HANGS)
