"""Weights: versions of a network in a fixed number of banks, each stamped before and after it is written."""

from __future__ import annotations

import ctypes
import pickle
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import optree
import torch
from torch import Tensor, nn

from headrace.channel import Activity, Note
from headrace.errors import Closed, ConfigError, ShapeError, Stalled
from headrace.place import board as b
from headrace.place.handle import HEADER_BYTES, Handle
from headrace.place.layout import kind_of, lie_plain
from headrace.place.memory import aligned
from headrace.struct import NAMESPACE

__all__ = ["BankedWeights", "WeightsLayout"]

# Words of the header.
COUNT, WRITER, WRITER_LIFE, BUSY, LATEST, START = range(6)
CLOSED = 32
READERS = HEADER_BYTES  # offset of a line per role: it reads, its pulls, and what they took
READER_WORDS = 8
READS, PULLS, PULL_BUSY, STARVED = range(4)
BANKS = READERS + (b.MAX_ROLES + 1) * READER_WORDS * 8

# Words of a bank's header. A reader looks at AFTER, copies, and looks at BEFORE: equal stamps, an untorn copy.
BEFORE, AFTER, NOTE_LENGTH = range(3)
BANK_HEADER = 1024  # bytes, the note included
NOTE = 64  # offset of the note in it
EMPTY = -1

_now = time.monotonic_ns


class WeightsLayout:
    """Where each tensor of a network lies in a bank."""

    def __init__(self, source: Any) -> None:
        self.names, tensors = find_tensors(source)
        if not tensors:
            raise ConfigError(f"a weights store was asked for a {type(source).__name__} that holds no tensor.")
        self.kinds = list(map(kind_of, tensors))
        self.sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        ends = list(accumulate(map(aligned, self.sizes)))
        self.offsets, self.nbytes = [0, *ends[:-1]], ends[-1]

    def tensors(self, source: Any) -> list[Tensor]:
        """The tensors of a network. Raises ShapeError for the first that is not as the layout says."""
        names, tensors = find_tensors(source)
        if names != self.names:
            raise ShapeError(f"expected {len(self.names)} tensors {self.names}, given {len(names)}: {names}.")
        return self.checked(tensors)

    def checked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """These tensors, in the layout's order. Raises ShapeError for the first that is not as the layout says."""
        given = list(map(kind_of, tensors))
        if len(given) != len(self.kinds):
            raise ShapeError(f"expected {len(self.kinds)} tensors, given {len(given)}.")
        for name, expected, found in zip(self.names, self.kinds, given, strict=True):
            if expected != found:
                raise ShapeError(
                    f"{name}: expected {expected[0]} {list(expected[1])}, given {found[0]} {list(found[1])}."
                )
        return list(tensors)


def find_tensors(source: Any) -> tuple[list[str], list[Tensor]]:
    """What every tensor of a module (each once) or of a Struct or tree is called there, and the tensors.

    They are looked for anew each time: a list that was kept goes stale where `module.to(…)` or an assignment replaces
    tensors. Modules are walked by hand, in a third of the time that `named_parameters` takes.
    """
    if isinstance(source, nn.Module):
        found: dict[int, tuple[str, Tensor]] = {}
        modules = {id(source): source}
        while modules:
            _, module = modules.popitem()
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found.setdefault(id(tensor), (name, tensor))
            modules.update((id(child), child) for child in module._modules.values() if child is not None)
        return [name for name, _ in found.values()], [tensor for _, tensor in found.values()]
    paths, leaves, _ = optree.tree_flatten_with_path(source, namespace=NAMESPACE)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise ConfigError(f"weights hold tensors; {path} is a {type(leaf).__name__}. Pass numbers in the note.")
    return list(map(str, paths)), leaves


class _Ends:
    """The tensors that a copy begins or ends at, and where they lie if that is all there is to know."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.addresses = list(map(Tensor.data_ptr, tensors)) if lie_plain(tensors) else []


class _ToPull:
    """A version as something to wait for."""

    word = b.STARVED

    def __init__(self, weights: BankedWeights, version: int) -> None:
        self._weights, self._version = weights, version

    def ready(self) -> bool:
        words = self._weights.words
        return (words[COUNT] > 0 and words[LATEST] >= self._version) or words[CLOSED] != 0

    def charge(self, nanoseconds: int) -> None:
        self._weights.count(STARVED, nanoseconds)

    def orphaned(self) -> str:
        return self._weights.orphaned(WRITER, "publish into")

    def describe(self) -> str:
        weights = self._weights
        return (
            f"pull version {self._version} from {weights.name!r} (newest: {weights.latest}; "
            f"{weights.owner(WRITER, 'publisher')})"
        )


class BankedWeights(Handle):
    """A weights store, the same on every placement."""

    def __init__(self, crew: str, name: str, offset: int, banks: int, layout: WeightsLayout) -> None:
        super().__init__(crew, name, offset, weights_bytes(banks, layout))
        self.banks, self.layout = banks, layout

    def shipped_fields(self) -> tuple[str, ...]:
        return (*super().shipped_fields(), "banks", "layout")

    def _reset(self) -> None:
        self._writes = False

    def begin(self, past: Sequence[tuple[Note, Sequence[Tensor]]]) -> None:
        """Set up the header and fill the banks with what is already known, oldest first."""
        for bank in range(self.banks):
            self.words[self._bank(bank) // 8 + BEFORE] = self.words[self._bank(bank) // 8 + AFTER] = EMPTY
        for note, tensors in past:
            self._store(_Ends(tensors), note)
        self.words[START] = self.words[COUNT]

    def publish(self, source: Any, version: int, **note: Any) -> None:
        if not self._writes:
            self.claim(WRITER, WRITER_LIFE, "publisher")
            self._writes = True
            self.context.closers.append(self.close)
        words = self.words
        if self.context.board.words[b.ALARM]:
            self.context.heed_alarm()
        if words[WRITER_LIFE] != self.context.incarnation:
            raise self.taken_over(words[WRITER_LIFE])
        if words[COUNT] and version <= words[LATEST]:
            raise ConfigError(f"version {version} was published into {self.name!r} after version {words[LATEST]}.")
        began = _now()
        self._store(_Ends(self.layout.tensors(source)), Note(version, note))
        self._ring_readers()  # before anything else: they wait for it
        words[BUSY] += _now() - began

    def pull(
        self, target: Any, version: int | None = None, at_least: int | None = None, timeout: float | None = None
    ) -> Note:
        context, words = self.context, self.words
        if version is not None and at_least is not None:
            raise ConfigError("pull takes version= (exactly that) or at_least= (the newest from there on), not both.")
        ends = _Ends(self.layout.tensors(target))  # while there may still be time: what follows the wait is waited for
        words[_reader(context.index) + READS] = 1
        if context.board.words[b.ALARM]:
            context.heed_alarm()
        wanted = version if version is not None else at_least if at_least is not None else -(2**62)
        end = _ToPull(self, wanted)
        if not end.ready():
            context.until((end,), timeout)
        context.heard()
        if not words[COUNT] or words[LATEST] < wanted:
            raise Closed(f"{self.name!r} is closed; version {wanted} will not come (newest: {self.latest})")
        began = _now()
        while (note := self._load(ends, words[LATEST] if version is None else version)) is None:
            # Overwritten while it was copied. The newest is there by now; an exact version is gone.
            if version is not None:
                raise ConfigError(
                    f"version {version} in {self.name!r} was overwritten before {context.identity} had pulled it: "
                    f"its {self.banks} banks go up to version {self.latest}. Give more banks (max_lag + 1), or pull "
                    "at_least=."
                )
            if timeout is not None and (_now() - began) / 1e9 > timeout:
                raise Stalled(
                    f"{context.identity} pulled from {self.name!r} for {timeout:g} s; it was overwritten each time"
                )
        self.count(PULL_BUSY, _now() - began)
        self.count(PULLS, 1)
        return note

    @property
    def latest(self) -> int:
        """The newest version; -1 before the first."""
        return self.words[LATEST] if self.words[COUNT] else -1

    def history(self) -> list[tuple[Note, list[Tensor]]]:
        past = []
        for bank in range(self.banks):
            version = self.words[self._bank(bank) // 8 + AFTER]
            tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in self.layout.kinds]
            if version != EMPTY and (note := self._load(_Ends(tensors), version)) is not None:
                past.append((note, tensors))
        return sorted(past, key=lambda entry: entry[0].version)

    def close(self) -> None:
        """No more versions. Those held can still be pulled."""
        self.words[CLOSED] = 1
        self._ring_readers()

    def statistics(self) -> Activity:
        words = self.words
        busy, starved = words[BUSY], 0
        for index in self.context.board.roles:
            busy += words[_reader(index) + PULL_BUSY]
            starved += words[_reader(index) + STARVED]
        items = words[COUNT] - words[START]
        return Activity(self.name, "weights", items, items * self.layout.nbytes, busy / 1e9, starved / 1e9, 0.0)

    def writer_index(self) -> int | None:
        """Index of the role that publishes, None before it does."""
        return self.words[WRITER] - 1 if self.words[WRITER] else None

    def count(self, word: int, amount: int) -> None:
        """Add to what this role has pulled."""
        self.words[_reader(self.context.index) + word] += amount

    def _ring_readers(self) -> None:
        board = self.context.board
        for index in board.roles:
            if self.words[_reader(index) + READS]:
                board.bell(index).ring()

    def _bank(self, bank: int) -> int:
        return BANKS + bank * (BANK_HEADER + self.layout.nbytes)

    def _store(self, ends: _Ends, note: Note) -> None:
        words, fence = self.words, self.context.fence
        data = pickle.dumps((note.version, dict(note.values)), 5)
        if len(data) > BANK_HEADER - NOTE:
            raise ShapeError(f"the note of {self.name!r} takes {len(data)} bytes pickled; {BANK_HEADER - NOTE} fit.")
        start = self._bank(words[COUNT] % self.banks)
        head = start // 8
        words[head + BEFORE] = note.version
        if fence is not None:
            fence()
        self._copy(ends, start + BANK_HEADER, inward=True)
        self.memory[start + NOTE : start + NOTE + len(data)] = data
        words[head + NOTE_LENGTH] = len(data)
        if fence is not None:
            fence()
        words[head + AFTER] = note.version
        words[LATEST] = note.version
        words[COUNT] += 1

    def _load(self, ends: _Ends, version: int) -> Note | None:
        """Copy this version out; None when it is not held, or was overwritten meanwhile."""
        words, fence = self.words, self.context.fence
        for bank in range(self.banks):
            start = self._bank(bank)
            head = start // 8
            if words[head + AFTER] != version:
                continue
            self._copy(ends, start + BANK_HEADER, inward=False)
            data = bytes(self.memory[start + NOTE : start + NOTE + words[head + NOTE_LENGTH]])
            if fence is not None:
                fence()
            if words[head + BEFORE] == version:
                return Note(*pickle.loads(data))
        return None

    def _copy(self, ends: _Ends, start: int, inward: bool) -> None:
        layout = self.layout
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + start
        if ends.addresses:
            here, there = [base + offset for offset in layout.offsets], ends.addresses
            list(map(ctypes.memmove, here if inward else there, there if inward else here, layout.sizes))
            return
        for tensor, offset, nbytes in zip(ends.tensors, layout.offsets, layout.sizes, strict=True):
            if nbytes:
                held = torch.frombuffer(self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=start + offset)
                ours, theirs = held.view(tensor.shape), tensor.detach()
                (ours if inward else theirs).copy_(theirs if inward else ours)


def weights_bytes(banks: int, layout: WeightsLayout) -> int:
    """Bytes that a store takes."""
    return BANKS + banks * (BANK_HEADER + layout.nbytes)


def _reader(index: int) -> int:
    return READERS // 8 + index * READER_WORDS
