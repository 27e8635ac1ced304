"""Groups: means over several roles, summed in rank order by all of them together in shared memory."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from headrace.channel import Activity
from headrace.errors import ConfigError, ShapeError
from headrace.place import board as b
from headrace.place.handle import HEADER_BYTES, Handle
from headrace.place.memory import aligned

__all__ = ["SharedGroup"]

# A line of words per rank, of which only that rank stores.
LINE_WORDS = 8
OWNER, LIFE, ARRIVED, WEIGHT, MEANS, BUSY, STARVED = range(7)

_now = time.monotonic_ns


class _ToMeet:
    """The others' arrival as something to wait for."""

    word = b.STARVED

    def __init__(self, group: SharedGroup, step: int) -> None:
        self._group, self._step = group, step

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
        return f"meet {late} in group {group.name!r}"


class SharedGroup(Handle):
    """A group, the same on every placement. Each rank sums its share of the vector, in rank order, for all."""

    def __init__(self, crew: str, name: str, offset: int, size: int, length: int, dtype: torch.dtype) -> None:
        super().__init__(crew, name, offset, group_bytes(size, length, dtype))
        self.size, self.length, self.dtype = size, length, dtype

    def shipped_fields(self) -> tuple[str, ...]:
        return (*super().shipped_fields(), "size", "length", "dtype")

    def _reset(self) -> None:
        self._steps: int | None = None

    @property
    def rank(self) -> int:
        return self.context.rank

    def mean(self, flat: Tensor, weight: float = 1.0) -> Tensor:
        if flat.shape != (self.length,) or flat.dtype is not self.dtype:
            raise ShapeError(
                f"{self.name!r}: expected {self.dtype} [{self.length}], given {flat.dtype} {list(flat.shape)}. "
                "Make the group with like= shaped as the vector."
            )
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"{self.name!r}: a weight is a number from 0 on, given {weight}.")
        line = self._join()
        began = _now()
        self._vectors[self.rank].copy_(flat.detach())
        self._weights[line + WEIGHT] = float(weight)
        self.words[line + BUSY] += _now() - began
        self._meet()
        weights = [self._weights[_line(rank) + WEIGHT] for rank in range(self.size)]
        total = sum(weights)
        if total == 0:
            self._meet()  # nobody may store another weight before all have seen these
            raise ConfigError(f"{self.name!r}: every rank gave weight 0; there is nothing to take the mean of.")
        began = _now()
        share = slice(self.length * self.rank // self.size, self.length * (self.rank + 1) // self.size)
        # A multiplication and an addition each, never fused: the bits must not depend on where a share begins.
        mean = torch.zeros_like(self._result[share])
        for vector, part in zip(self._vectors, weights, strict=True):
            if part:  # a rank of weight 0 may hold anything, NaN too
                mean += vector[share] * (part / total)
        self._result[share] = mean
        self.words[line + BUSY] += _now() - began
        self._meet()
        self.words[line + MEANS] += 1
        # Nobody stores into the result again before all have arrived at the next mean, this rank included.
        return self._result.to(flat.device, copy=True)

    def barrier(self) -> None:
        self._join()
        self._meet()

    def statistics(self) -> Activity:
        words, lines = self.words, [_line(rank) for rank in range(self.size)]
        means = sum(words[line + MEANS] for line in lines)
        return Activity(
            self.name,
            "group",
            means,
            means * self.length * self.dtype.itemsize,
            sum(words[line + BUSY] for line in lines) / 1e9,
            sum(words[line + STARVED] for line in lines) / 1e9,
            0.0,
        )

    def close(self) -> None:
        """This rank comes no more; whoever waits for it is told so."""
        self._ring()

    def _join(self) -> int:
        line = _line(self.rank)
        if self._steps is None:
            if self.rank >= self.size:
                raise ConfigError(f"{self.context.identity} asked for {self.name!r}, which has {self.size} ranks.")
            self.claim(line + OWNER, line + LIFE, f"rank {self.rank}")
            vector, base = self.length * self.dtype.itemsize, _data(self.size)
            with torch.inference_mode(False):  # as in a slot: views for every mode
                views = [
                    torch.frombuffer(
                        self.memory, dtype=self.dtype, count=self.length, offset=base + at * aligned(vector)
                    )
                    if self.length
                    else torch.empty(0, dtype=self.dtype)
                    for at in range(self.size + 1)
                ]
            self._vectors, self._result = views[:-1], views[-1]
            self._weights: memoryview[float] = self.memory.cast("d")
            self._steps = self.words[line + ARRIVED]
            self.context.closers.append(self.close)
        return line

    def _meet(self) -> None:
        context = self.context
        assert self._steps is not None
        if context.board.words[b.ALARM]:
            context.heed_alarm()
        self._steps += 1
        if context.fence is not None:
            context.fence()
        self.words[_line(self.rank) + ARRIVED] = self._steps
        self._ring()
        end = _ToMeet(self, self._steps)
        if not end.ready():
            context.until((end,), None)
        context.heard()

    def _ring(self) -> None:
        for rank in range(self.size):
            owner = self.words[_line(rank) + OWNER]
            if owner and rank != self.rank:
                self.context.board.bell(owner - 1).ring()


def group_bytes(size: int, length: int, dtype: torch.dtype) -> int:
    """Bytes that a group takes: a vector per rank, and the result."""
    return _data(size) + (size + 1) * aligned(length * dtype.itemsize)


def _line(rank: int) -> int:
    return HEADER_BYTES // 8 + rank * LINE_WORDS


def _data(size: int) -> int:
    return HEADER_BYTES + size * LINE_WORDS * 8
