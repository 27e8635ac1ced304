"""Beats: what a role is doing that could hang, and who sees that it does.

A role stores numbers and a count of its beats on its page of the board; that costs less than half a microsecond, and
nobody's attention. Who watches looks ten times a second whether it is still the same beat. It counts the seconds of its
own looks, so that a machine that sleeps, or a run that is suspended as a whole, makes nobody late.
"""

from __future__ import annotations

import itertools
import math
import string
import struct
import time
from collections.abc import Iterable

from headrace.errors import ConfigError
from headrace.place import board as b
from headrace.place.board import Board

__all__ = ["TICK", "Beat", "Watch"]

TICK = 0.1  # seconds after which who waits or watches looks again
AWAY = 1.0  # seconds between two looks; what goes beyond was not seen, and does not count


class Beat:
    """See `headrace.channel.Beat`."""

    __slots__ = ("_beat", "_count", "_doing", "_page", "_start", "_store", "_words")

    def __init__(self, board: Board, index: int, doing: str, within: float | None, advice: str) -> None:
        numbers = _count_numbers(doing)
        if within is not None and not 0 < within < math.inf:
            raise ConfigError(f"watch(within={within}): give seconds above 0, or None for no limit.")
        for what, text, limit in (("doing", doing, b.DOING_BYTES), ("advice", advice, b.ADVICE_BYTES)):
            if len(text.encode()) > limit:
                raise ConfigError(f"watch({what}=…): {len(text.encode())} bytes of text; give at most {limit}.")
        board.watch(index, doing, 0 if within is None else math.ceil(within * 1e9), advice)
        self._doing = doing
        self._words, self._beat = board.words, (index + 1) * b.WORDS + b.BEAT
        self._page, self._start = board.page(index), b.BEAT * 8
        # From the clock on: no two beats of a role have the same number, in all its lives.
        self._count = itertools.count(time.monotonic_ns())
        self._store = struct.Struct(f"{2 + numbers}q").pack_into

    def __call__(self, *numbers: int) -> None:
        """A beat begins."""
        beat = next(self._count)
        try:
            self._store(self._page, self._start, beat, beat, *numbers)
        except struct.error as error:
            raise ConfigError(
                f"a beat got {numbers!r}; {self._doing!r} takes a 64-bit integer for each of its {{}}."
            ) from error

    def idle(self) -> None:
        """The last beat is over, and nothing is done that could hang."""
        self._words[self._beat] = 0


def _count_numbers(doing: str) -> int:
    """How many numbers a beat has."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(doing) if field is not None]
        doing.format(*[0] * len(fields))
    except (LookupError, ValueError) as error:
        raise ConfigError(f"watch(doing={doing!r}): {error}; mark each number by {{}}.") from error
    if any(fields) or len(fields) > b.NUMBERS:
        raise ConfigError(f"watch(doing={doing!r}): give at most {b.NUMBERS} numbers, each marked by {{}}.")
    return len(fields)


class Watch:
    """Who looks whether a role has been in one beat for longer than its limit."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._looked = time.monotonic_ns()
        self._seen: dict[
            int, tuple[int, int]
        ] = {}  # by role: its beat, and the nanoseconds for which it was seen in it

    def look(self, roles: Iterable[int]) -> list[int]:
        """The indices of those that hang and are not known to. At most ten times a second; the rest costs nothing."""
        now = time.monotonic_ns()
        passed = now - self._looked
        if passed < TICK * 1e9:
            return []
        self._looked = now
        hanging = []
        for index in roles:
            beat, limit = self._board.get(index, b.BEAT), self._board.get(index, b.WITHIN)
            if not beat or not limit or self._board.get(index, b.HANGS):
                continue
            seen, nanoseconds = self._seen.get(index, (0, 0))
            if beat != seen:
                nanoseconds = 0
            elif not self._board.get(index, b.STOPPED):  # a stopped role does nothing at all, and has another limit
                nanoseconds += min(passed, int(AWAY * 1e9))
            self._seen[index] = beat, nanoseconds
            if nanoseconds > limit:
                hanging.append(index)
        return hanging
