"""Roles as processes of this machine: nothing is shared but the crew's memory, and a role can be killed any time."""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import headrace.place.keeper
from headrace.errors import ConfigError, RoleFailed, Stalled
from headrace.place import board as b
from headrace.place.beat import TICK
from headrace.place.context import Context, Identity
from headrace.place.crew import BaseCrew
from headrace.place.keeper import MESSAGE_BYTES, REFUSED, SPINS, Orders, Settings
from headrace.place.life import Failure, Post, hang
from headrace.place.memory import SharedMemory
from headrace.place.unpickling import loads

__all__ = ["ProcessCrew", "Processes"]

LOADING = 120.0  # seconds that a process with torch may take to load
GRACE = 3.0  # seconds that roles have to end by themselves when the crew stops
ENDING = 15.0  # seconds that a keeper may take to end what is left


@dataclass(frozen=True)
class Processes:
    """Every role is a process, forked from one that has torch loaded. Linux only.

    The first crew of a driver takes about as long as `import torch`; a later one some tens of milliseconds.
    """

    stall_after: float = 30.0
    """Seconds after which a role that is stopped (SIGSTOP) counts as failed. A slow one never does."""
    poison: bool = False
    """Overwrite what a take has given back, so that a view kept too long is seen. For finding faults."""
    logs: str | None = None
    """Folder in which what a role prints goes to a file of its own, NAME-RANK.log. None: to where the driver's goes."""

    def crew(self, seed: int = 0) -> ProcessCrew:
        """A crew whose roles draw their seeds from this one."""
        if sys.platform != "linux":
            raise ConfigError(f"Processes() needs Linux; this is {sys.platform}. Use Threads() or Inline().")
        return ProcessCrew(seed, self.poison, self.stall_after, self.logs)


class ProcessCrew(BaseCrew):
    """A crew of processes."""

    memory: SharedMemory

    def __init__(self, seed: int, poison: bool, stall_after: float, logs: str | None) -> None:
        super().__init__(seed, poison)
        self._stall_after, self._logs = stall_after, os.path.abspath(logs) if logs else ""

    def _enter(self) -> SharedMemory:
        nursery = _nursery()
        memory = SharedMemory()
        try:
            self._keeper = nursery.keeper(memory.descriptor)
        except BaseException:
            memory.close()
            raise
        self._hangup = select.poll()
        self._hangup.register(self._keeper, select.POLLIN)
        return memory

    def _context(self, identity: Identity) -> Context:
        return Context(identity, self.id, self.board, self.memory, SPINS)

    def _pack(self, data: bytes, name: str) -> tuple[int, int]:
        payload = pickle.dumps((Settings.here(), data), 5)
        offset = self.memory.allocate(len(payload), f"what is shipped to {name}")
        self.memory.view(offset, len(payload))[:] = payload
        return offset, len(payload)

    def _launch(self, posts: Sequence[Post]) -> None:
        for post in posts:
            orders = Orders(
                self.id,
                post.name,
                post.rank,
                post.of,
                post.incarnation,
                post.device,
                post.threads,
                post.index,
                self.seed,
                self._stall_after,
                post.payload,
                self._logs,
            )
            answer = self._ask(orders).decode()
            if answer.startswith(REFUSED):
                raise ConfigError(f"no process for {post}: {answer.removeprefix(REFUSED)}. Start fewer roles.")
            post.pid = int(answer)

    def _ask(self, order: Orders | int) -> bytes:
        try:
            self._keeper.send(pickle.dumps(order, 5))
            answer = self._keeper.recv(MESSAGE_BYTES)
        except TimeoutError as error:
            raise Stalled(f"the crew's keeper did not answer in {self._keeper.gettimeout():g} s") from error
        except OSError as error:
            raise _keeper_gone() from error
        if not answer:
            raise _keeper_gone()
        return answer

    def _failures(self) -> list[Failure]:
        board = self.board
        failed = [
            post
            for post in self.posts
            if board.get(post.index, b.STATE) in (b.FAILED, b.KILLED)
            or board.get(post.index, b.STOPPED) == b.TOO_LONG
            or board.get(post.index, b.HANGS)
        ]
        return [self._failure(post) for post in sorted(failed, key=lambda p: self.board.get(p.index, b.FAILED_AT))]

    def _failure(self, post: Post) -> Failure:
        if self.board.get(post.index, b.HANGS):
            return hang(self.board, post, f"was killed (process {post.pid})")
        heard = self.board.heard(post.index)
        if self.board.get(post.index, b.STOPPED) == b.TOO_LONG:
            what = f"has been stopped (process {post.pid}) for more than {self._stall_after:g} s"
            return Failure(post, post.incarnation, what, signal=signal.SIGSTOP, heard=heard)
        status = self.board.get(post.index, b.STATUS)
        if self.board.get(post.index, b.STATE) == b.FAILED:
            report = self.memory.view(b.report_offset(post.index), b.REPORT_BYTES)
            what, text, cause = loads(report[8 : 8 + report[:8].cast("q")[0]])
            cause = cause or Exception(what)
            cause.__cause__ = _RoleTraceback(text)
            code = cause.code if isinstance(cause, SystemExit) and isinstance(cause.code, int) else 1
            return Failure(post, post.incarnation, what, exit_code=code, traceback=text, cause=cause, heard=heard)
        if status < 0:
            number = signal.Signals(-status)
            what = f"was killed by signal {number} ({number.name}); exit code {status}"
            return Failure(post, post.incarnation, what, signal=-status, exit_code=status, heard=heard)
        what = f"left with exit code {status} without returning"
        return Failure(post, post.incarnation, what, exit_code=status, heard=heard)

    def look_after_roles(self) -> None:
        if self._keeper_is_gone():
            raise _keeper_gone()

    def _keeper_is_gone(self) -> bool:
        # It speaks only when it is asked to; what can be read unasked is the end.
        return bool(self._hangup.poll(0))

    def _end_life(self, post: Post) -> None:
        self._ask(post.pid)

    def _finish(self, hurry: bool) -> None:
        if self._keeper.fileno() < 0:  # done; Ctrl-C came after it
            return
        try:
            until = time.monotonic() + (0.0 if hurry else GRACE)
            bell = self.board.bell(b.DRIVER)
            while self._runs() and (left := until - time.monotonic()) > 0 and not self._keeper_is_gone():
                bell.wait(min(left, TICK))
        finally:
            self._keeper.shutdown(socket.SHUT_WR)  # the keeper ends what is left, then itself
            self._keeper.settimeout(ENDING)
            try:
                while self._keeper.recv(MESSAGE_BYTES):
                    pass
            except TimeoutError as error:
                raise Stalled(f"the crew's keeper did not end its roles in {ENDING:g} s") from error
            finally:
                self._keeper.close()

    def _runs(self) -> bool:
        return any(self.board.get(post.index, b.STATE) not in b.OVER for post in self.posts)


class _RoleTraceback(Exception):
    """A traceback from another process, shown above the exception that it belongs to."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def _keeper_gone() -> RoleFailed:
    return RoleFailed(
        "the crew's keeper process is gone, and its roles with it: something killed it (out of memory?)",
        role="keeper",
        rank=0,
    )


class _Nursery:
    """The driver's side of the nursery: one process that every crew of this driver starts from."""

    def __init__(self) -> None:
        self.driver = os.getpid()
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Its command line names the module, so that a process list says what it is. It does not import our main module.
        # All that a role may need is loaded once, before the forks: the star, since the package loads names when asked.
        code = f"import sys; sys.path[:] = {sys.path!r}; from headrace import *; "
        code += f"from {headrace.place.keeper.__name__} import nursery; "
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]  # -O and its like
                    "-c",
                    code + f"nursery({theirs.fileno()}, {self.driver})",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # NumPy's would start threads, and what forks has none
            )
        self._channel.settimeout(LOADING)
        if self._channel.recv(MESSAGE_BYTES) != b"ready":
            raise RoleFailed(
                f"the process that roles start from ended with exit code {self.process.wait()} while it loaded torch; "
                "what it said is on the standard error.",
                role="nursery",
                rank=0,
            )

    def keeper(self, memory: int) -> socket.socket:
        """A new keeper for the crew with this memory: the socket that it takes orders from."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "w") as nowhere, self._lock:
            outputs = [_descriptor(stream, nowhere) for stream in (sys.__stdout__, sys.__stderr__)]
            socket.send_fds(self._channel, [b"keeper"], [memory, theirs.fileno(), *outputs])
        ours.settimeout(LOADING)
        return ours

    def alive(self) -> bool:
        """Whether it belongs to this process and still runs."""
        return self.driver == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """Let it end; in a forked copy of the driver, leave it alone."""
        self._channel.close()
        if self.driver == os.getpid():
            self.process.wait(ENDING)


def _descriptor(stream: TextIO | None, nowhere: TextIO) -> int:
    """Where roles write what they print: where the driver does, or nowhere if that is closed."""
    if stream is None or stream.closed:
        return nowhere.fileno()
    stream.flush()
    return stream.fileno()


_nurseries: list[_Nursery] = []  # at most one is alive; a driver that forked has its parent's here too
_nurseries_lock = threading.Lock()


def _nursery() -> _Nursery:
    with _nurseries_lock:
        if not _nurseries or not _nurseries[-1].alive():
            for old in _nurseries:
                old.close()
            _nurseries[:] = [_Nursery()]
            atexit.register(_nurseries[-1].close)
        return _nurseries[-1]
