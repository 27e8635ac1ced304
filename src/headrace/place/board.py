"""The board of a crew: a page of shared words per role, on which roles, driver and keeper see each other's state.

Everything on it is written by plain stores of one word, each word by one party at a time, so that a process killed at
any instant blocks nobody. Word 0 of page 0 is the alarm.
"""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]
import ctypes
import mmap
import time
from collections.abc import Callable

from headrace.place.memory import Memory, aligned

__all__ = ["Bell", "Board"]

MAX_ROLES = 256
PAGE = 2048  # bytes; the header first, then a page per role
WORDS = PAGE // 8
BELL = 128  # offset of the semaphore in a role's page
NAME = 192  # offset of its name
NAME_BYTES = 64
TEXT = 256  # offset of the last heartbeat
TEXT_BYTES = 768
BEATS = 1024  # offset of the words of beats
DOING = 1152  # offset of what a beat is, with a {} for each number
DOING_BYTES = 384
ADVICE = DOING + DOING_BYTES  # offset of what to do if it takes long
ADVICE_BYTES = PAGE - ADVICE
BOARD_BYTES = PAGE * (MAX_ROLES + 2)
REPORT_BYTES = 64 * 1024  # for what a failing role has to say; untouched until it does

# Words of the header. Every operation looks at the alarm.
ALARM, ROLES = range(2)
CALM, FAILURE, STOPPING = 0, 1, 2

# Words of a role's page.
STATE, INCARNATION, STATUS, STOPPED, FAILED_AT, BEGAN, ENDED_AT = range(7)
STARVED, BLOCKED, WAITING, SINCE, RANK, NAME_LENGTH, TEXT_LENGTH, HANGS = range(8, 16)

# Words of its beats. BEAT: the beat that it is in, 0 for none. LAST_BEAT: the same, but kept. Then the beat's numbers.
BEAT, LAST_BEAT, FIRST_NUMBER = range(BEATS // 8, BEATS // 8 + 3)
NUMBERS = 6  # of a beat, at most
WITHIN, DOING_LENGTH, ADVICE_LENGTH = range(FIRST_NUMBER + NUMBERS, FIRST_NUMBER + NUMBERS + 3)

TOO_LONG = 2  # of STOPPED: for longer than the crew allows

# States of a role.
ABSENT, STARTING, RUNNING, ENDED, FAILED, KILLED = range(6)
OVER = (ENDED, FAILED, KILLED)

DRIVER = 0  # index of the driver, a role like the others

_libc = ctypes.CDLL(None, use_errno=True)
_sem_init = _libc.sem_init
_sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_SEMAPHORE = 1  # the kind, for SemLock
_VALUE_MAX = 2**31 - 1
_CLOCK_MONOTONIC = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_sem_clockwait = _libc.sem_clockwait
_sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_TimeSpec)]


def report_offset(index: int) -> int:
    """Where, in a crew's memory, a failing role leaves its report."""
    return aligned(BOARD_BYTES, mmap.PAGESIZE) + index * REPORT_BYTES


class Bell:
    """One role's doorbell: a semaphore without a name, in memory that its peers share.

    It only wakes. Whoever wakes looks at the counters, so that a ring too many or a ring lost costs a tick at most.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        # CPython's own semaphore object on our address: five times as fast as calling sem_post through ctypes.
        semaphore = _multiprocessing.SemLock._rebuild(address, _SEMAPHORE, _VALUE_MAX, None)
        self.ring: Callable[[], None] = semaphore.release
        self._acquire = semaphore.acquire

    def fence(self) -> None:
        """Order the stores before it before those after it, where the processor does not do so by itself."""
        self.ring()
        self.heard()

    def heard(self) -> bool:
        """Consume one ring, if there is one."""
        return self._acquire(False)  # type: ignore[no-any-return]

    def wait(self, seconds: float) -> None:
        """Return at the next ring, at a signal, or after `seconds`. A clock that is set back does not prolong it."""
        if self._acquire(False):
            return
        until = time.monotonic_ns() + int(seconds * 1e9)
        _sem_clockwait(self._address, _CLOCK_MONOTONIC, _TimeSpec(until // 10**9, until % 10**9))


class Board:
    """The words of all roles of a crew, by index."""

    def __init__(self, memory: Memory, offset: int) -> None:
        self._bytes = memory.view(offset, BOARD_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self.words = self._bytes.cast("q")
        self._bells: dict[int, Bell] = {}

    @classmethod
    def create(cls, memory: Memory) -> Board:
        """A board for a new crew, and behind it room for reports: the first things in its memory."""
        board = cls(memory, memory.allocate(BOARD_BYTES, "a crew's board"))
        memory.allocate(REPORT_BYTES * (MAX_ROLES + 1), "a crew's reports", prefault=False)
        for index in range(MAX_ROLES + 1):
            _sem_init(board._address + (index + 1) * PAGE + BELL, 1, 0)
        return board

    def bell(self, index: int) -> Bell:
        """The doorbell of that role."""
        bell = self._bells.get(index)
        if bell is None:
            bell = self._bells[index] = Bell(self._address + (index + 1) * PAGE + BELL)
        return bell

    def get(self, index: int, word: int) -> int:
        """One word of a role's page."""
        return self.words[(index + 1) * WORDS + word]

    def set(self, index: int, word: int, value: int) -> None:
        """Store one word of a role's page."""
        self.words[(index + 1) * WORDS + word] = value

    @property
    def roles(self) -> range:
        """The indices of all roles that were ever started, the driver's first."""
        return range(self.words[ROLES])

    def raise_alarm(self, alarm: int) -> None:
        """Let every role see the alarm: at its next operation, at once where it waits."""
        if self.words[ALARM] != STOPPING:
            self.words[ALARM] = alarm
        for index in self.roles:
            self.bell(index).ring()

    def begin(self, index: int, name: str, rank: int, incarnation: int) -> None:
        """Prepare a page for a new life of its role."""
        self.words[ROLES] = max(self.words[ROLES], index + 1)
        for word in (*range(BELL // 8), *range(BEATS // 8, DOING // 8)):
            self.set(index, word, 0)
        self._write(index, NAME, NAME_BYTES, NAME_LENGTH, name)
        self.set(index, RANK, rank)
        self.set(index, INCARNATION, incarnation)
        self.set(index, BEGAN, time.monotonic_ns())
        self.set(index, STATE, STARTING)

    def name(self, index: int) -> str:
        """The name of that role, with its rank."""
        return self._read(index, NAME, NAME_LENGTH)

    def say(self, index: int, text: str) -> None:
        """Keep a role's heartbeat."""
        self._write(index, TEXT, TEXT_BYTES, TEXT_LENGTH, text)

    def said(self, index: int) -> str:
        """A role's last heartbeat, empty before the first."""
        return self._read(index, TEXT, TEXT_LENGTH)

    def page(self, index: int) -> memoryview:
        """A role's page as bytes."""
        return self._bytes[(index + 1) * PAGE : (index + 2) * PAGE]

    def watch(self, index: int, doing: str, within: int, advice: str) -> None:
        """Prepare for beats of a role. within: nanoseconds that one may take, 0 for no limit."""
        self.set(index, BEAT, 0)
        self.set(index, LAST_BEAT, 0)
        self._write(index, DOING, DOING_BYTES, DOING_LENGTH, doing)
        self._write(index, ADVICE, ADVICE_BYTES, ADVICE_LENGTH, advice)
        self.set(index, WITHIN, within)

    def doing(self, index: int) -> str:
        """A role's last beat, empty before the first."""
        if not self.get(index, LAST_BEAT):
            return ""
        numbers = [self.get(index, FIRST_NUMBER + k) for k in range(NUMBERS)]
        return self._read(index, DOING, DOING_LENGTH).format(*numbers)

    def advice(self, index: int) -> str:
        """What to do where a beat takes long but does not hang; may be empty."""
        return self._read(index, ADVICE, ADVICE_LENGTH)

    def heard(self, index: int) -> str:
        """All that a role said last: its heartbeat and its beat."""
        return "; ".join(filter(None, (self.said(index), self.doing(index))))

    def _write(self, index: int, offset: int, limit: int, length_word: int, text: str) -> None:
        data = text.encode()[:limit]
        start = (index + 1) * PAGE + offset
        self._bytes[start : start + len(data)] = data
        self.set(index, length_word, len(data))

    def _read(self, index: int, offset: int, length_word: int) -> str:
        start = (index + 1) * PAGE + offset
        return bytes(self._bytes[start : start + self.get(index, length_word)]).decode(errors="replace")
