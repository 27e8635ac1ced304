"""The processes above the roles: a nursery that has torch loaded, and a keeper for each crew, which outlives no driver.

    driver ── nursery (one a driver; imports once, runs nothing) ── keeper (one a crew) ── roles ── what roles start

The nursery forks keepers and a keeper forks roles, both before any of them has run anything or started a thread. They
live in a session of their own, so that signals to the driver's process group reach the driver alone. A keeper sees the
driver's death through a pidfd, adopts every process that a role leaves behind, and ends all of them; when the keeper
itself dies, the kernel kills its roles.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import numpy as np
import psutil
import torch

from headrace.place import board as b
from headrace.place.beat import TICK, Watch
from headrace.place.board import Board
from headrace.place.context import Context, Identity
from headrace.place.life import describe, play
from headrace.place.memory import SharedMemory
from headrace.place.shipping import unship

__all__ = ["Orders", "Settings", "nursery"]

SPINS = 20  # how often a role looks again before it blocks; more take turns from who computes beside it
REFUSED = "refused:"  # begins a keeper's answer when the system gives it no process
PATIENCE = 5.0  # seconds after which what cannot be killed is left to the system
MESSAGE_BYTES = 4096
FOREVER_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


class Settings(NamedTuple):
    """What every role sets first, as the driver had it when it shipped the role."""

    environ: dict[str, str]
    folder: str
    path: list[str]
    argv: list[str]
    dtype: torch.dtype
    matmul_precision: str
    deterministic: bool
    warn_only: bool
    flush_denormal: bool

    @classmethod
    def here(cls) -> Settings:
        """The settings of this process."""
        denormal = torch.tensor([1e-310], dtype=torch.float64)
        return cls(
            dict(os.environ),
            os.getcwd(),
            list(sys.path),
            list(sys.argv),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            bool((denormal * 1.0 == 0).item()),  # there is no other way to ask
        )

    def apply(self, threads: int) -> None:
        """Make them those of this process."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        sys.path[:], sys.argv[:] = self.path, self.argv
        torch.set_num_threads(threads)
        torch.set_flush_denormal(self.flush_denormal)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        if self.deterministic:  # off at first; the call alone imports the compiler, which takes a second
            torch.use_deterministic_algorithms(True, warn_only=self.warn_only)


class Orders(NamedTuple):
    """What a keeper is told to start. payload: offset and length in the crew's memory. logs: folder, or empty."""

    crew: str
    name: str
    rank: int
    of: int
    incarnation: int
    device: str
    threads: int
    post: int
    seed: int
    stall_after: float
    payload: tuple[int, int]
    logs: str


def nursery(descriptor: int, driver: int) -> NoReturn:
    """Fork a keeper for every crew that the driver asks for, until the driver is gone."""
    channel = socket.socket(fileno=descriptor)
    watch = _watch(driver)
    wakeup = _settle()
    gc.collect()
    gc.freeze()  # what is loaded here stays shared with every fork
    channel.send(b"ready")
    keepers: set[int] = set()
    poll = _poll(channel, watch, wakeup)
    while True:
        ready = poll(None)
        if watch in ready:
            break
        if wakeup in ready:
            os.read(wakeup, MESSAGE_BYTES)
            _tidy(keepers)
        if channel.fileno() in ready:
            data, passed, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 4)
            if not data:
                break
            keeper = os.fork()
            if keeper == 0:
                _guarded(_keep, driver, *passed)
            keepers.add(keeper)
            for opened in passed:
                os.close(opened)
    # The keepers see it too. This process goes last: what a keeper that is killed meanwhile leaves, nobody else ends.
    until = time.monotonic() + 2 * PATIENCE
    while _tidy(keepers) and time.monotonic() < until:
        time.sleep(0.001)
    _end_all()
    os._exit(0)


def _tidy(keepers: set[int]) -> bool:
    """End what keepers that were killed have left behind; whether there are children still."""
    keepers -= {pid for pid, _ in _changed()}
    children = psutil.Process().children()
    for child in children:
        if child.pid not in keepers:
            _kill(child.pid)
    return bool(children)


def _keep(driver: int, memory: int, orders: int, output: int, errors: int) -> None:
    """Start, watch and end the roles of one crew; end with it, or with the driver."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    _close_all_but(memory, orders)
    watch = _watch(driver)
    wakeup = _settle()
    channel = socket.socket(fileno=orders)
    board = Board(SharedMemory(memory), 0)
    roles: dict[int, int] = {}  # index of each living role by pid
    stopped: dict[int, float] = {}  # seconds for which each stopped role has been seen so, by pid
    limits: dict[int, float] = {}  # seconds for which a role may be stopped, by index
    beats = Watch(board)

    def look() -> None:
        """See what has become of the roles, and show it on the board."""
        for pid, status in _changed():
            index = roles.get(pid)
            if index is None:
                continue  # it was adopted
            stopped.pop(pid, None)
            board.set(index, b.STOPPED, int(os.WIFSTOPPED(status)))
            if os.WIFSTOPPED(status):
                stopped[pid] = 0.0
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                continue
            del roles[pid]
            board.set(index, b.STATUS, os.waitstatus_to_exitcode(status))
            if board.get(index, b.STATE) not in b.OVER:
                now = time.monotonic_ns()
                board.set(index, b.ENDED_AT, now)
                board.set(index, b.FAILED_AT, now)
                board.set(index, b.STATE, b.KILLED)
                board.raise_alarm(b.FAILURE)

    def watch_stopped() -> None:
        """Raise the alarm over roles that have been stopped for too long."""
        with suppress(psutil.Error):
            if psutil.Process(driver).status() == psutil.STATUS_STOPPED:
                return  # the run was suspended as a whole, and nobody waits
        for pid in stopped:
            stopped[pid] += TICK
            index = roles[pid]
            if stopped[pid] >= limits[index] and board.get(index, b.STOPPED) == 1:
                board.set(index, b.FAILED_AT, time.monotonic_ns())
                board.set(index, b.STOPPED, b.TOO_LONG)
                board.raise_alarm(b.FAILURE)

    def end_hanging() -> None:
        """Kill the roles that hang, and raise the alarm at once: one that waits for a disk may not die of it."""
        pids = {index: pid for pid, index in roles.items()}
        for index in beats.look(pids):
            board.set(index, b.FAILED_AT, time.monotonic_ns())
            board.set(index, b.HANGS, 1)
            _kill(pids[index])
            board.raise_alarm(b.FAILURE)

    poll = _poll(channel, watch, wakeup)
    while True:
        ready = poll(TICK if roles else None)
        if watch in ready:
            break
        if wakeup in ready:
            os.read(wakeup, MESSAGE_BYTES)
            look()
        if stopped and not ready:
            watch_stopped()
        end_hanging()
        if channel.fileno() in ready:
            message = channel.recv(MESSAGE_BYTES)
            if not message:
                break
            order = pickle.loads(message)
            if isinstance(order, Orders):
                keeper = os.getpid()
                try:
                    pid = os.fork()
                except OSError as error:
                    channel.send(f"{REFUSED} {error}".encode())
                    continue
                if pid == 0:
                    _guarded(_role, keeper, memory, order)
                roles[pid], limits[order.post] = order.post, order.stall_after
                channel.send(str(pid).encode())
            else:  # a pid whose life is to end
                if order in roles:  # else it is over, and its pid may be another's by now
                    _kill(order)
                while order in roles:
                    look()
                    time.sleep(0.001)
                channel.send(b"ended")
    _end_all()


def _role(keeper: int, memory: int, orders: Orders) -> None:
    """Be a role."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        return
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in FOREVER_IGNORED:
        # Handled, not ignored: programs that a role starts get the default back, and can be terminated.
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_default_signals)
    _close_all_but(memory)
    crew_memory = SharedMemory(memory)
    board = Board(crew_memory, 0)
    identity = Identity(
        orders.name, orders.rank, orders.of, orders.incarnation, orders.device, orders.post, orders.seed
    )
    context = Context(identity, orders.crew, board, crew_memory, SPINS)

    def body() -> None:
        if orders.logs:
            _write_into(f"{orders.logs}/{orders.name}-{orders.rank}.log")
        settings, data = pickle.loads(crew_memory.view(*orders.payload))
        settings.apply(orders.threads)
        # Environments that draw from global generators get streams of their own, the same in every run.
        words = context.seed.generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(words[1])
        torch.manual_seed(int(words[2]))
        function, args = unship(data)
        try:
            function(*args)
        finally:  # before the crew may take this role for ended, and end its process
            sys.stdout.flush()
            sys.stderr.flush()

    error = play(context, orders.crew, body)
    if error is not None:
        _report(crew_memory, board, orders.post, error)
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            _leave(error.code)
        _leave(1)
    _leave(0)


def _write_into(path: str) -> None:
    """Let what this process prints go to the end of a file; where that cannot be opened, to where it went before."""
    with suppress(OSError), open(path, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _report(memory: SharedMemory, board: Board, index: int, error: BaseException) -> None:
    """Leave an exception where the driver finds it, and raise the alarm."""
    what, text = describe(error)
    try:
        data = cloudpickle.dumps((what, text, error))
        pickle.loads(data)
    except Exception:  # an exception that does not travel; its text does
        data = b""
    if not data or len(data) > b.REPORT_BYTES - 8:
        data = pickle.dumps((what[:4096], text[-b.REPORT_BYTES // 4 :], None))
    report = memory.view(b.report_offset(index), b.REPORT_BYTES)
    report[8 : 8 + len(data)] = data
    report[:8].cast("q")[0] = len(data)
    board.set(index, b.FAILED_AT, time.monotonic_ns())
    board.set(index, b.STATE, b.FAILED)
    board.raise_alarm(b.FAILURE)


def _watch(driver: int) -> int:
    """A descriptor that can be read once the driver is gone."""
    try:
        return os.pidfd_open(driver)
    except ProcessLookupError:
        os._exit(0)


def _settle() -> int:
    """Ignore what a scheduler sends to everybody, adopt orphans, and return a descriptor that tells of children."""
    for number in FOREVER_IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def _close_all_but(*kept: int) -> None:
    for opened in map(int, os.listdir("/proc/self/fd")):
        if opened > 2 and opened not in kept:
            with suppress(OSError):  # the one that listed them is closed already
                os.close(opened)


def _poll(channel: socket.socket, *others: int) -> Callable[[float | None], set[int]]:
    """A function that waits, for so many seconds at most, until some of these can be read, and returns which."""
    poll = select.poll()
    for descriptor in (channel.fileno(), *others):
        poll.register(descriptor, select.POLLIN)
    return lambda seconds: {descriptor for descriptor, _ in poll.poll(None if seconds is None else seconds * 1000)}


def _changed() -> list[tuple[int, int]]:
    """Children that have ended, stopped or gone on, with their status."""
    changes = []
    with suppress(ChildProcessError):
        while (change := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0]:
            changes.append(change)
    return changes


def _end_all() -> None:
    """Kill everything below this process, again until nothing is left: the dead leave orphans to us."""
    until = time.monotonic() + PATIENCE
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for process in left:
            _kill(process.pid)
        _changed()
        time.sleep(0.001)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _guarded(body: Callable[..., None], *args: Any) -> NoReturn:
    """Run a forked process's body; it never returns into its parent's code."""
    try:
        body(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _leave(70)
    _leave(0)


def _leave(code: int) -> NoReturn:
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def _default_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
