"""Groups: means over several roles, summed in rank order by all of them in shared memory; what each has, gathered."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from headrace.channel import Activity
from headrace.errors import ConfigError, RoleFailed, ShapeError
from headrace.place import board as b
from headrace.place.handle import HEADER_BYTES, Handle
from headrace.place.memory import aligned

__all__ = ["SharedGroup"]

# A line of words per rank, of which only that rank stores. What it came to do, and its weight, are there twice: at the
# next collective it stores into the other half, while somebody may still read this one.
LINE_WORDS = 16
OWNER, LIFE, ARRIVED, ITEMS, BYTES, BUSY, STARVED = range(7)
TASKS, WEIGHTS = (8, 9), (10, 11)

BARRIER, MEAN, GATHER = range(3)
_VERBS = ("barrier()", "mean", "gather")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_LENGTH_BITS = 48

SMALL = 256 * 1024
"""Bytes up to which every rank sums all by itself: to meet once more would take longer than what it saves."""
CHUNK = 128 * 1024
"""Elements that are summed over all ranks before the next: what lies between stays in the cache."""

_now = time.monotonic_ns


class _ToMeet:
    """The others' arrival as something to wait for."""

    word = b.STARVED

    def __init__(self, group: SharedGroup, step: int, task: int) -> None:
        self._group, self._step, self._task = group, step, task

    def missing(self) -> list[int]:
        words = self._group.words
        return [rank for rank in range(self._group.size) if words[_line(rank) + ARRIVED] < self._step]

    def ready(self) -> bool:
        return not self.missing()

    def charge(self, nanoseconds: int) -> None:
        self._group.words[_line(self._group.rank) + STARVED] += nanoseconds

    def orphaned(self) -> str:
        group, board = self._group, self._group.context.board
        for rank in self.missing():
            owner = group.words[_line(rank) + OWNER]
            known = [owner - 1] if owner else [index for index in group.holders() if board.get(index, b.RANK) == rank]
            # A rank that nobody holds yet may still be started.
            if known and all(board.get(index, b.STATE) == b.ENDED for index in known):
                return f"rank {rank} never will: {board.name(known[0])} has finished"
        return ""

    def describe(self) -> str:
        group = self._group
        late = ", ".join(f"rank {rank} ({group.owner(_line(rank) + OWNER, 'role')})" for rank in self.missing())
        return f"meet {late} in group {group.name!r} for {_told(self._task)}"


class SharedGroup(Handle):
    """A group, the same on every placement. A driver that takes part is its last rank, after all copies of the role."""

    def __init__(self, crew: str, name: str, offset: int, size: int, length: int, dtype: torch.dtype) -> None:
        super().__init__(crew, name, offset, group_bytes(size, length, dtype))
        self.size, self.length, self.dtype = size, length, dtype

    def shipped_fields(self) -> tuple[str, ...]:
        return (*super().shipped_fields(), "size", "length", "dtype")

    def _reset(self) -> None:
        self._steps: int | None = None
        self._views: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    @property
    def rank(self) -> int:
        return self.size - 1 if self.context.index == b.DRIVER else self.context.rank

    @property
    def arrived(self) -> int:
        line = self._join()
        step = self.words[line + ARRIVED]
        return sum(self.words[_line(rank) + ARRIVED] > step for rank in range(self.size))

    def mean(self, flat: Tensor, weight: float = 1.0, out: Tensor | None = None) -> Tensor:
        self._check(flat, flat.is_floating_point() and flat.dtype in _DTYPES)
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"{self.name!r}: a weight is a number from 0 on, given {weight}.")
        line, task, mine = self._join(), _task(MEAN, flat), flat.detach()
        share = slice(0, 0)
        if flat.nbytes > SMALL:  # each sums its share for all, and nobody else has to see what it has there
            share = slice(len(flat) * self.rank // self.size, len(flat) * (self.rank + 1) // self.size)
            mine = mine.cpu()
        vectors, weights = self._show(task, mine, weight, share)
        total = sum(weights)
        if total == 0:
            raise ConfigError(f"{self.name!r}: every rank gave weight 0; there is nothing to take the mean of.")
        began, shared = _now(), vectors.pop()
        if share.stop:
            vectors[self.rank] = mine
        # A rank of weight 0 may hold anything, NaN too.
        parts = [(vector, part / total) for vector, part in zip(vectors, weights, strict=True) if part]
        if share.stop:
            _sum(parts, shared, share.start, share.stop)
            self.words[line + BUSY] += _now() - began
            self._meet(task)
            # Nobody stores into it again before all have arrived at another collective, this rank included.
            return shared.to(flat.device, copy=True) if out is None else out.copy_(shared)
        mean = out if out is not None and out.is_cpu and out.is_contiguous() else torch.empty_like(vectors[0])
        _sum(parts, mean, 0, len(mean))
        self.words[line + BUSY] += _now() - began
        return mean.to(flat.device) if out is None else out.copy_(mean)

    def gather(self, flat: Tensor) -> Tensor:
        self._check(flat, flat.dtype in _DTYPES)
        self._join()
        vectors, _ = self._show(_task(GATHER, flat), flat, 0.0)
        return torch.stack(vectors[:-1]).to(flat.device)

    def barrier(self) -> None:
        self._join()
        nothing = torch.empty(0)
        self._show(_task(BARRIER, nothing), nothing, 0.0)

    def statistics(self) -> Activity:
        words, lines = self.words, [_line(rank) for rank in range(self.size)]
        return Activity(
            self.name,
            "group",
            sum(words[line + ITEMS] for line in lines),
            sum(words[line + BYTES] for line in lines),
            sum(words[line + BUSY] for line in lines) / 1e9,
            sum(words[line + STARVED] for line in lines) / 1e9,
            0.0,
        )

    def close(self) -> None:
        """This rank comes no more; whoever waits for it is told so."""
        self._ring()

    def _check(self, flat: Tensor, fits: bool) -> None:
        room = self.length * self.dtype.itemsize
        if not fits or flat.dim() != 1 or flat.nbytes > room:
            raise ShapeError(
                f"{self.name!r}: given {flat.dtype} {list(flat.shape)}, expected a vector [N] of {room} bytes at most, "
                f"as {self.dtype} [{self.length}] has. Make the group with like= the longest vector."
            )

    def _show(
        self, task: int, flat: Tensor, weight: float, hidden: slice = slice(0, 0)
    ) -> tuple[list[Tensor], list[float]]:
        """Let the others see a vector, but for a part. What all show, then room for a result; and all weights."""
        line, step = _line(self.rank), self.words[_line(self.rank) + ARRIVED] + 1
        half = step % 2
        views = self._views_of(flat)
        vectors = views[half::2]
        began = _now()
        shown = vectors[self.rank]
        if hidden.stop:
            shown[: hidden.start].copy_(flat[: hidden.start])
            shown[hidden.stop :].copy_(flat[hidden.stop :])
        else:
            shown.copy_(flat.detach())
        self.words[line + TASKS[half]] = task
        self._floats[line + WEIGHTS[half]] = weight
        self.words[line + BUSY] += _now() - began
        self._meet(task)
        lines = [_line(rank) for rank in range(self.size)]
        tasks = [self.words[each + TASKS[half]] for each in lines]
        if tasks != [task] * self.size:
            told = ", ".join(f"rank {rank} with {_told(each)}" for rank, each in enumerate(tasks))
            raise ShapeError(
                f"{self.name!r}: the ranks came with different things: {told}. All ranks of a group call the same, "
                "with vectors of one length and dtype, equally often and in the same order."
            )
        if task >> 56 != BARRIER:
            self.words[line + ITEMS] += 1
            self.words[line + BYTES] += flat.nbytes
        return vectors if half == 0 else [*vectors, views[-1]], [self._floats[each + WEIGHTS[half]] for each in lines]

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """Of every rank both vectors, and the result: as vectors like this one."""
        key = flat.dtype, len(flat)
        if key not in self._views:
            room, base = aligned(self.length * self.dtype.itemsize), _data(self.size)
            with torch.inference_mode(False):  # as in a slot: views for every mode
                self._views[key] = [
                    torch.frombuffer(self.memory, dtype=flat.dtype, count=len(flat), offset=base + at * room)
                    if len(flat)
                    else torch.empty(0, dtype=flat.dtype)
                    for at in range(2 * self.size + 1)
                ]
        return self._views[key]

    def _join(self) -> int:
        line = _line(self.rank)
        if self._steps is None:
            if self.rank >= self.size:
                raise ConfigError(f"{self.context.identity} asked for {self.name!r}, which has {self.size} ranks.")
            self.claim(line + OWNER, line + LIFE, f"rank {self.rank}")
            self._floats: memoryview[float] = self.memory.cast("d")
            self._steps = self.words[line + ARRIVED]
            self.context.closers.append(self.close)
        return line

    def _meet(self, task: int) -> None:
        context = self.context
        assert self._steps is not None
        if context.board.words[b.ALARM]:
            context.heed_alarm()
        self._steps += 1
        if context.fence is not None:
            context.fence()
        self.words[_line(self.rank) + ARRIVED] = self._steps
        self._ring()
        end = _ToMeet(self, self._steps, task)
        if not end.ready():
            try:
                context.until((end,), None)
            except RoleFailed as failure:
                failure.add_note(f"{context.identity} waited to {end.describe()}")
                raise
        context.heard()

    def _ring(self) -> None:
        for rank in range(self.size):
            owner = self.words[_line(rank) + OWNER]
            if owner and rank != self.rank:
                self.context.board.bell(owner - 1).ring()


def _sum(parts: list[tuple[Tensor, float]], result: Tensor, low: int, high: int) -> None:
    """Store the sum of factor · vector, over all parts in their order, into this range of the result."""
    between = torch.empty(min(CHUNK, high - low), dtype=result.dtype)
    for start in range(low, high, CHUNK):
        stop = min(start + CHUNK, high)
        (vector, factor), *others = parts
        sums, product = result[start:stop], between[: stop - start]
        torch.mul(vector[start:stop], factor, out=sums)
        # A multiplication and an addition each, never fused: the bits must not depend on where a range begins.
        for vector, factor in others:
            torch.mul(vector[start:stop], factor, out=product)
            sums.add_(product)


def _task(verb: int, flat: Tensor) -> int:
    """What a rank comes to do, as a word."""
    return verb << 56 | _DTYPES.index(flat.dtype) << _LENGTH_BITS | len(flat)


def _told(task: int) -> str:
    """What a rank came to do, in words."""
    verb, dtype, length = task >> 56, task >> _LENGTH_BITS & 0xFF, task & (1 << _LENGTH_BITS) - 1
    return _VERBS[verb] if verb == BARRIER else f"{_VERBS[verb]} of {_DTYPES[dtype]} [{length}]"


def group_bytes(size: int, length: int, dtype: torch.dtype) -> int:
    """Bytes that a group takes: two vectors per rank, and the result."""
    return _data(size) + (2 * size + 1) * aligned(length * dtype.itemsize)


def _line(rank: int) -> int:
    return HEADER_BYTES // 8 + rank * LINE_WORDS


def _data(size: int) -> int:
    return HEADER_BYTES + size * LINE_WORDS * 8
