"""Channels: a ring of slots between one writer and one reader, with counters in its header that are the truth.

A channel of capacity c has c + 1 slots. The writer may fill slot number `head` while head - taken < c; the reader holds
slot number taken - 1 as a view. The two never meet, and the room is free as soon as the next take has returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from headrace.channel import Activity, End, Role, Taken, wait
from headrace.errors import Closed, ConfigError
from headrace.place import board as b
from headrace.place.handle import HEADER_BYTES, Handle
from headrace.place.layout import Layout, Slot, TreeLayout
from headrace.place.memory import aligned

__all__ = ["RingChannel", "RingLanes"]

T = TypeVar("T")
_now = time.monotonic_ns

# Words of a channel's header, on cache lines by who stores them and who looks: a role that waits looks at one counter
# again and again, and must not take away the line on which the other one keeps its own words.
HEAD, TAKEN = 0, 16
CLOSED, START = range(32, 34)
WRITER, WRITER_LIFE, BUSY, BYTES, BLOCKED, RECLAIMED = range(48, 54)
READER, READER_LIFE, STARVED, CONTROL = range(56, 60)

# Words of a slot's header. STAMP: sequence << 16 | incarnation of what lies there; -1 - incarnation while it is filled.
LANE, STAMP = range(2)
SLOT_HEADER = 64  # bytes


class _ToTake:
    """The reader's end, as something to wait for."""

    word = b.STARVED

    def __init__(self, channel: RingChannel[Any]) -> None:
        self._channel, self._words, self._capacity = channel, channel.words, channel.capacity

    @property
    def waiter(self) -> Role:
        return self._channel.context

    def ready(self) -> bool:
        words = self._words
        return words[HEAD] != words[TAKEN] or words[CLOSED] != 0

    def charge(self, nanoseconds: int) -> None:
        self._words[STARVED] += nanoseconds

    def orphaned(self) -> str:
        return self._channel.orphaned(WRITER, "put into")

    def describe(self) -> str:
        return f"take from {self._channel.name!r} (empty; {self._channel.owner(WRITER, 'writer')})"


class _ToPut:
    """The writer's end, as something to wait for."""

    word = b.BLOCKED

    def __init__(self, channel: RingChannel[Any]) -> None:
        self._channel, self._words, self._capacity = channel, channel.words, channel.capacity

    @property
    def waiter(self) -> Role:
        return self._channel.context

    def ready(self) -> bool:
        words = self._words
        return words[HEAD] - words[TAKEN] < self._capacity or words[CLOSED] != 0

    def charge(self, nanoseconds: int) -> None:
        self._words[BLOCKED] += nanoseconds

    def orphaned(self) -> str:
        return self._channel.orphaned(READER, "take from")

    def describe(self) -> str:
        return (
            f"put into {self._channel.name!r} (full: {self._channel.capacity}; {self._channel.owner(READER, 'reader')})"
        )


class RingChannel(Handle, Generic[T]):
    """A channel on a ring of slots, the same on every placement; roles differ only in how they wait."""

    def __init__(
        self, crew: str, name: str, offset: int, lane: int, capacity: int, layout: Layout, poison: bool
    ) -> None:
        super().__init__(crew, name, offset, channel_bytes(capacity, layout))
        self.lane, self.capacity, self.layout, self.poison = lane, capacity, layout, poison

    def _reset(self) -> None:
        self._writes = self._reads = self._reserved = False
        self._head = self._taken = 0
        self._ring_reader: Callable[[], None] | None = None
        self._ring_writer: Callable[[], None] | None = None

    def shipped_fields(self) -> tuple[str, ...]:
        return (*super().shipped_fields(), "lane", "capacity", "layout", "poison")

    def begin(self, start: int) -> None:
        """Set up the header, as if `start` items had passed through."""
        words = self.words
        words[HEAD] = words[TAKEN] = words[START] = start
        for slot in range(self.capacity + 1):
            words[(HEADER_BYTES + slot * _stride(self.layout)) // 8 + LANE] = self.lane

    # -- the writer's end

    def put(self, item: T, timeout: float | None = None) -> None:
        slot = self._free_slot(timeout)
        if self._timed:
            began = _now()
            slot.write(item)
            self._words[BUSY] += _now() - began
        else:
            slot.write(item)
            if self._varies:
                self._words[BYTES] += slot.nbytes
        self._hand_over()

    def reserve(self, timeout: float | None = None) -> T:
        if not isinstance(self.layout, TreeLayout):
            raise ConfigError(f"{self.name!r} carries values, which cannot be filled in place; use put(…).")
        item: T = self._free_slot(timeout).read()
        self._reserved = True
        return item

    def commit(self) -> None:
        if not self._reserved:
            raise ConfigError(f"commit() of {self.name!r} without reserve(): there is no slot to hand over.")
        self._reserved = False
        if self.words[CLOSED]:
            raise Closed(f"{self.name!r} is closed; {self.context.identity} cannot put into it")
        self._hand_over()

    def deliveries(self) -> Iterator[int]:
        if not self._writes:
            self._claim_writer()
        while not self.words[CLOSED] and not self.context.stopping:
            yield self.words[HEAD]

    def _free_slot(self, timeout: float | None) -> Slot:
        if not self._writes:
            self._claim_writer()
        words, head = self._words, self._head
        if head - words[TAKEN] >= self.capacity or words[CLOSED] or self._board_words[b.ALARM]:
            self._wait_for_room(timeout)
        if self._reserved:
            raise ConfigError(f"{self.name!r} has a reserved slot; commit() it before the next put or reserve.")
        if words[WRITER_LIFE] != self._life:
            raise self.taken_over(words[WRITER_LIFE])
        at = head % self._count
        words[self._stamps[at]] = -1 - self._life
        slot: Slot = self._slots[at]
        return slot

    def _hand_over(self) -> None:
        words, head = self._words, self._head
        if words[WRITER_LIFE] != self._life:
            raise self.taken_over(words[WRITER_LIFE])
        words[self._stamps[head % self._count]] = head << 16 | self._life
        if self._fence is not None:
            self._fence()
        self._head = words[HEAD] = head + 1
        ring = self._ring_reader or self._find_reader()
        if ring is not None:
            ring()
        self._heard()

    def _wait_for_room(self, timeout: float | None) -> None:
        if self._board_words[b.ALARM]:
            self.context.heed_alarm()
        if not self._to_put.ready():
            self.context.until((self._to_put,), timeout)
        if self.words[CLOSED]:
            raise Closed(f"{self.name!r} is closed; {self.context.identity} cannot put into it")

    def _claim_writer(self) -> None:
        self._attach()
        self.claim(WRITER, WRITER_LIFE, "writer")
        self._head = self.words[HEAD]  # ours alone from here on
        stamp = self._stamps[self._head % self._count]
        if self.words[stamp] < 0:  # an incarnation was killed while it filled this slot
            self.words[stamp] = 0
            self.words[RECLAIMED] += 1
        self._to_put = _ToPut(self)
        self._writes = True
        self.context.closers.append(self.close)

    # -- the reader's end

    def take(self, timeout: float | None = None, device: str | torch.device | None = None) -> T:
        self.await_item(timeout)
        words, taken = self._words, self._taken
        if words[READER_LIFE] != self._life:
            raise self.taken_over(words[READER_LIFE])
        if self.poison and taken > words[START]:
            self._slots[(taken - 1) % self._count].poison()
        self._taken = words[TAKEN] = taken + 1  # from here on the writer may fill the slot that was viewed until now
        ring = self._ring_writer or self._find_writer()
        if ring is not None:
            ring()
        self._heard()
        slot = self._slots[taken % self._count]
        item: T = slot.read() if device is None else slot.read_to(device)
        return item

    def await_item(self, timeout: float | None) -> None:
        """Return when there is an item to take."""
        if not self._reads:
            self._claim_reader()
        if self._words[HEAD] != self._taken and not self._board_words[b.ALARM]:
            return
        if self._board_words[b.ALARM]:
            self.context.heed_alarm()
        if self.words[HEAD] == self._taken and not self.words[CLOSED]:
            self.context.until((self._to_take,), timeout)
        if self.words[CLOSED] and self.words[HEAD] == self.words[TAKEN]:
            raise Closed(f"{self.name!r} is closed and empty; {self.context.identity} cannot take from it")

    def _claim_reader(self) -> None:
        self._attach()
        self.claim(READER, READER_LIFE, "reader")
        self._taken = self.words[TAKEN]  # ours alone from here on
        self._to_take = _ToTake(self)
        self._reads = True
        self.context.closers.append(self.close)

    # -- both

    def close(self) -> None:
        self.words[CLOSED] = 1
        for ring in (self._find_reader(), self._find_writer()):
            if ring is not None:
                ring()

    @property
    def control(self) -> int:
        return self.words[CONTROL]

    @control.setter
    def control(self, word: int) -> None:
        if not self._reads:
            self._claim_reader()
        self.words[CONTROL] = word
        ring = self._find_writer()
        if ring is not None:
            ring()

    @property
    def delivered(self) -> int:
        return self.words[HEAD]

    @property
    def taken(self) -> int:
        return self.words[TAKEN]

    @property
    def closed(self) -> bool:
        """Whether the channel takes no more items; it may still hold some."""
        return self.words[CLOSED] != 0

    @property
    def reclaimed(self) -> int:
        """How many slots were taken back from writers that were killed while they filled them."""
        return self.words[RECLAIMED]

    @property
    def to_take(self) -> End:
        if not self._reads:
            self._claim_reader()
        return self._to_take

    @property
    def to_put(self) -> End:
        if not self._writes:
            self._claim_writer()
        return self._to_put

    def statistics(self) -> Activity:
        words = self.words
        items = words[HEAD] - words[START]
        nbytes = words[BYTES] if self.layout.varies else items * self.layout.nbytes
        return Activity(
            self.name,
            "channel",
            items,
            nbytes,
            words[BUSY] / 1e9,
            words[STARVED] / 1e9,
            words[BLOCKED] / 1e9,
            held=words[HEAD] - words[TAKEN],
            capacity=self.capacity,
        )

    def writer_index(self) -> int | None:
        """Index of the role that writes, None before the first put."""
        return self.words[WRITER] - 1 if self.words[WRITER] else None

    def _attach(self) -> None:
        if self._reads or self._writes:
            return
        context, stride = self.context, _stride(self.layout)
        self._words = self.words  # an attribute of the plain kind: half the time of a cached property
        starts = [HEADER_BYTES + at * stride for at in range(self.capacity + 1)]
        self._stamps = [start // 8 + STAMP for start in starts]
        self._count, self._timed, self._varies = len(starts), self.layout.timed, self.layout.varies
        self._slots = [
            self.layout.bind(self.memory[start + SLOT_HEADER : start + SLOT_HEADER + self.layout.nbytes])
            for start in starts
        ]
        self._board_words, self._heard, self._life = context.board.words, context.heard, context.incarnation
        self._fence = context.fence

    def _find_reader(self) -> Callable[[], None] | None:
        if self._ring_reader is None and self.words[READER]:
            self._ring_reader = self.context.board.bell(self.words[READER] - 1).ring
        return self._ring_reader

    def _find_writer(self) -> Callable[[], None] | None:
        if self._ring_writer is None and self.words[WRITER]:
            self._ring_writer = self.context.board.bell(self.words[WRITER] - 1).ring
        return self._ring_writer


class RingLanes(Generic[T]):
    """A channel per writer, read by one role."""

    def __init__(self, name: str, channels: Sequence[RingChannel[T]]) -> None:
        self.name, self._channels, self._next = name, tuple(channels), 0

    def __len__(self) -> int:
        return len(self._channels)

    def __getitem__(self, rank: int) -> RingChannel[T]:
        return self._channels[rank]

    def __iter__(self) -> Iterator[RingChannel[T]]:
        return iter(self._channels)

    def __repr__(self) -> str:
        return f"<{len(self)} lanes {self.name!r}>"

    def take_each(self, timeout: float | None = None) -> list[T]:
        until = None if timeout is None else self._channels[0].context.clock() + timeout
        for channel in self._channels:  # nothing is taken before all can be: a timeout loses nothing
            channel.await_item(None if until is None else max(0.0, until - channel.context.clock()))
        return [channel.take() for channel in self._channels]

    def take_any(self, timeout: float | None = None) -> Taken:
        count = len(self._channels)
        while True:
            # Closed is looked at before the counters: what was put before the close is found below.
            waiting = [channel.to_take for channel in self._channels if not channel.closed]
            for step in range(count):  # whose turn it is moves on with every item: fair among those that are ready
                rank = (self._next + step) % count
                channel = self._channels[rank]
                if channel.delivered != channel.taken:
                    self._next = rank + 1
                    return Taken(rank, channel.take())
            if not waiting:
                raise Closed(f"every lane of {self.name!r} is closed and empty")
            wait(*waiting, timeout=timeout)

    @property
    def to_take(self) -> tuple[End, ...]:
        return tuple(channel.to_take for channel in self._channels)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def channel_bytes(capacity: int, layout: Layout) -> int:
    """Bytes that a channel takes."""
    return HEADER_BYTES + (capacity + 1) * _stride(layout)


def _stride(layout: Layout) -> int:
    return SLOT_HEADER + aligned(layout.nbytes)
