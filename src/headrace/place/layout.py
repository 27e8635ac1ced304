"""What a slot looks like: where each tensor and number of an item lies in one contiguous range of bytes."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import operator
import pickle
import struct
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import cloudpickle
import numpy as np
import optree
import torch
from torch import Tensor

from headrace.errors import ConfigError, ShapeError
from headrace.place.memory import aligned
from headrace.place.unpickling import loads
from headrace.struct import NAMESPACE, Struct

__all__ = [
    "Field",
    "Layout",
    "NumbersLayout",
    "PickleLayout",
    "Slot",
    "TreeLayout",
    "kind_of",
    "layout_of",
    "lie_plain",
]

CONTROL_BYTES = 4096  # what a slot holds of a channel without `like`
POISON = 0xFF  # NaN in every float, -1 in every signed integer
_NUMBERS: dict[type, str] = {bool: "?", int: "q", float: "d"}
_BOOLS = (bool, np.bool_)
SMALL = 2**20  # bytes
FAMILIAR = 16  # items that a slot knows again
kind_of = operator.attrgetter("dtype", "shape")
_shape_of = operator.attrgetter("shape")
_is_cpu = operator.attrgetter("is_cpu")
_record = torch._C._set_grad_enabled


class Slot(Protocol):
    """One slot of a channel, in this process's memory. nbytes: of what lies in it."""

    nbytes: int

    def write(self, item: Any) -> None:
        """Copy an item in. Raises ShapeError when it is not shaped as the layout says."""

    def read(self) -> Any:
        """The item that lies here: views of its tensors."""

    def read_to(self, device: str | torch.device) -> Any:
        """The item that lies here, copied to a device in one piece."""

    def poison(self) -> None:
        """Overwrite it, so that whoever still looks sees that it is gone."""


class Layout(Protocol):
    """How items of one kind lie in a slot."""

    nbytes: int
    timed: bool  # whether copying takes so long that reading the clock does not show
    varies: bool  # whether items differ in size

    def bind(self, memory: memoryview) -> Slot:
        """The slot in this memory."""


class Field(NamedTuple):
    """One tensor or number of an item. kind: of a number, its letter in the struct module; empty for a tensor."""

    path: str
    dtype: torch.dtype  # of a number, anything
    shape: torch.Size
    offset: int
    nbytes: int
    kind: str

    @classmethod
    def of_tensor(cls, path: str, tensor: Tensor, offset: int) -> Field:
        """Where a tensor shaped like this one lies."""
        return cls(path, tensor.dtype, tensor.shape, offset, tensor.numel() * tensor.element_size(), "")

    def view(self, memory: memoryview) -> Tensor:
        """The tensor that lies here."""
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        count = self.shape.numel()
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset).view(self.shape)


def layout_of(like: Any) -> Layout:
    """The layout of items shaped like this one; of small pickled values for None."""
    if like is None:
        return PickleLayout()
    if type(like) is tuple and like and all(type(leaf) in _NUMBERS for leaf in like):
        return NumbersLayout(tuple(_NUMBERS[type(leaf)] for leaf in like))
    return TreeLayout(like)


def lie_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether the memory of each tensor is its value: on the host, contiguous, without a lazy sign or conjugation."""
    return (
        all(map(_is_cpu, tensors))
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and not any(map(Tensor.is_conj, tensors))
    )


class TreeLayout:
    """Structs and trees of tensors and numbers: fields on 64-byte lines, in the order of the tree."""

    timed, varies = True, False

    def __init__(self, like: Any) -> None:
        accessors, leaves, self.spec = optree.tree_flatten_with_accessor(like, namespace=NAMESPACE)
        root = type(like).__name__ if isinstance(like, Struct) else "item"
        fields, offset = [], 0
        for accessor, leaf in zip(accessors, leaves, strict=True):
            name = accessor.codify(root)
            if isinstance(leaf, Tensor):
                if leaf.layout is not torch.strided or leaf.is_quantized:
                    raise ConfigError(f"like: {name} is a {leaf.layout} tensor; slots hold dense ones.")
                fields.append(Field.of_tensor(name, leaf, offset))
            elif type(leaf) in _NUMBERS:
                fields.append(Field(name, torch.uint8, torch.Size(), offset, 8, _NUMBERS[type(leaf)]))
            else:
                raise ConfigError(
                    f"like: {name} is a {type(leaf).__name__}; a slot holds tensors, bool, int and float. Give a "
                    "tensor, or leave `like` out for small values that are pickled."
                )
            offset += aligned(fields[-1].nbytes)
        if not fields:
            raise ConfigError(f"like={like!r} holds no tensor and no number; leave it out for small pickled values.")
        self.fields = tuple(fields)
        self.numbers = tuple((position, field) for position, field in enumerate(fields) if field.kind)
        self.positions = tuple(position for position, field in enumerate(fields) if not field.kind)
        self.tensors = tuple(fields[position] for position in self.positions)
        self.kinds = [(field.dtype, field.shape) for field in self.tensors]
        self.sizes = [field.nbytes for field in self.tensors]
        self.nbytes = offset
        self.skeleton = optree.tree_unflatten(self.spec, range(len(fields)))
        # A Struct of plain tensors is by far the commonest item: its leaves are its attributes.
        names = [field.name for field in dataclasses.fields(like)] if isinstance(like, Struct) else []
        flat = len(names) == len(fields) > 1 and all(isinstance(getattr(like, name), Tensor) for name in names)
        self.type: type | None = type(like) if flat else None
        self.attributes = operator.attrgetter(*names) if flat else None
        self.kinds_in = (
            operator.attrgetter(*(f"{name}.{of}" for name in names for of in ("dtype", "shape"))) if flat else None
        )
        self.flat_kinds = tuple(itertools.chain.from_iterable(self.kinds))

    def __getstate__(self) -> dict[str, Any]:
        # A treespec of a class shipped by value does not pickle; its skeleton does.
        return {key: value for key, value in self.__dict__.items() if key != "spec"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.spec = optree.tree_structure(self.skeleton, namespace=NAMESPACE)

    def bind(self, memory: memoryview) -> Slot:
        with torch.inference_mode(False):  # views made in it could be neither written nor trained on outside it
            return _TreeSlot(self, memory)

    def leaves(self, item: Any) -> Sequence[Any]:
        """The tensors and numbers of an item, in the order of the fields. Raises ShapeError for another tree."""
        leaves, spec = optree.tree_flatten(item, namespace=NAMESPACE)
        if spec != self.spec:
            raise ShapeError(f"expected an item built like {self.skeleton!r} (by position), given {spec}.")
        return leaves

    def complain(self, leaves: Sequence[Any]) -> NoReturn:
        """Raise the ShapeError for the first leaf that does not fit."""
        for field, leaf in zip(self.fields, leaves, strict=True):
            given = (
                _describe(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else f"{leaf!r} ({type(leaf).__name__})"
            )
            if not field.kind and given != _describe(field.dtype, field.shape):
                raise ShapeError(f"{field.path}: expected {_describe(field.dtype, field.shape)}, given {given}.")
            if field.kind and not _fits(field.kind, leaf):
                raise ShapeError(f"{field.path}: expected {_NAMES[field.kind]}, given {given}.")
        raise ShapeError(f"expected {len(self.fields)} leaves like {self.skeleton!r}, given {len(leaves)}.")


class _Familiar:
    """A Struct that was put before, which fits: what has to be the same for it to fit again, and its bytes.

    To look at the dtype and shape of each field, and to start a copy for each, takes as long as to copy them.
    """

    def __init__(self, item: Any, tensors: Sequence[Tensor], fields: Sequence[Field]) -> None:
        self.item, self.tensors = item, tensors
        self.addresses, self.shapes = list(map(Tensor.data_ptr, tensors)), list(map(_shape_of, tensors))
        self.bytes = []
        for tensor, field in zip(tensors, fields, strict=True):
            self.bytes.append(tensor.detach().reshape(-1).view(torch.uint8))
            if gap := aligned(field.nbytes) - field.nbytes:
                self.bytes.append(torch.zeros(gap, dtype=torch.uint8))

    def is_still(self, item: Any) -> bool:
        """Whether this is the item, and nobody has moved or reshaped its tensors in place."""
        return (
            self.item is item
            and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
            and list(map(_shape_of, self.tensors)) == self.shapes
            and all(map(Tensor.is_contiguous, self.tensors))
        )


class _TreeSlot:
    def __init__(self, layout: TreeLayout, memory: memoryview) -> None:
        self._layout, self._memory, self.nbytes = layout, memory, layout.nbytes
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if layout.nbytes else 0
        self._small = layout.nbytes <= SMALL
        self._views = [field.view(memory) for field in layout.tensors]
        self._addresses = [base + field.offset for field in layout.tensors]
        self._item = optree.tree_unflatten(layout.spec, self._views) if layout.attributes else None
        empty = torch.empty(0, dtype=torch.uint8)
        self._flat = torch.frombuffer(memory, dtype=torch.uint8) if layout.nbytes else empty
        self._familiar: dict[int, _Familiar] = {}
        self._seen: dict[int, weakref.ref[Any]] = {}  # once; a writer that makes each item anew shall not pay for it

    def write(self, item: Any) -> None:
        layout = self._layout
        if (known := self._familiar.get(id(item))) is not None and known.is_still(item):
            torch.cat(known.bytes, out=self._flat)
            return
        tensors = self._attributes_of(item) if type(item) is layout.type else self._tensors_of(item)
        if self._small and type(item) is layout.type:
            self._meet(item, tensors)
        # In loops that run in C. Many small copies are fastest in one call, large ones as plain memory.
        if self._small:
            if tensors:
                recording = torch.is_grad_enabled()
                _record(False)  # what torch.no_grad() does, in a fifth of its time
                try:
                    torch._foreach_copy_(self._views, tensors)  # type: ignore[arg-type]
                finally:
                    _record(recording)
        elif lie_plain(tensors):
            list(map(ctypes.memmove, self._addresses, map(Tensor.data_ptr, tensors), layout.sizes))
        else:
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor.detach())

    def _meet(self, item: Any, tensors: Sequence[Tensor]) -> None:
        """Remember an item that fits; the second time so that it is known again."""
        seen = self._seen.get(id(item))
        if seen is None or seen() is not item:
            if len(self._seen) == FAMILIAR:
                self._seen.clear()
            self._seen[id(item)] = weakref.ref(item)
        elif lie_plain(tensors):
            if len(self._familiar) == FAMILIAR:
                self._familiar.clear()
            self._familiar[id(item)] = _Familiar(item, tensors, self._layout.tensors)

    def _attributes_of(self, item: Any) -> Sequence[Tensor]:
        """The tensors of a Struct of plain tensors. Raises ShapeError for the first that does not fit."""
        layout = self._layout
        assert layout.attributes is not None
        assert layout.kinds_in is not None
        tensors: Sequence[Tensor] = layout.attributes(item)
        try:
            if layout.kinds_in(item) != layout.flat_kinds:
                layout.complain(tensors)
        except AttributeError:  # not a tensor
            layout.complain(tensors)
        return tensors

    def _tensors_of(self, item: Any) -> Sequence[Tensor]:
        """The tensors of any item; its numbers are written. Raises ShapeError for the first leaf that does not fit."""
        layout = self._layout
        leaves = layout.leaves(item)
        try:
            for position, field in layout.numbers:
                if field.kind == "?" and not isinstance(leaves[position], _BOOLS):  # struct takes anything for a bool
                    layout.complain(leaves)
                struct.pack_into(field.kind, self._memory, field.offset, leaves[position])
            tensors = [leaves[position] for position in layout.positions]
            if list(map(kind_of, tensors)) != layout.kinds:
                layout.complain(leaves)
        except (AttributeError, struct.error, TypeError):
            layout.complain(leaves)
        return tensors

    def read(self) -> Any:
        if self._item is not None:
            return self._item
        return self._unflatten(self._views)

    def read_to(self, device: str | torch.device) -> Any:
        flat = self._flat.to(device, copy=True)
        return self._unflatten(
            [
                flat[field.offset : field.offset + field.nbytes].view(field.dtype).view(field.shape)
                for field in self._layout.tensors
            ]
        )

    def poison(self) -> None:
        self._memory[:] = bytes([POISON]) * len(self._memory)

    def _unflatten(self, tensors: Sequence[Tensor]) -> Any:
        leaves: list[Any] = list(tensors)
        for position, field in self._layout.numbers:  # in ascending order: each goes where it stood
            leaves.insert(position, struct.unpack_from(field.kind, self._memory, field.offset)[0])
        return optree.tree_unflatten(self._layout.spec, leaves)


class NumbersLayout:
    """A small tuple of bool, int and float: packed side by side, read as values."""

    timed = varies = False

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        self.packer = struct.Struct("@" + "".join(kinds))
        self.nbytes = self.packer.size
        self.bools = tuple(position for position, kind in enumerate(kinds) if kind == "?")

    def __reduce__(self) -> tuple[Any, ...]:
        return NumbersLayout, (self.kinds,)

    def bind(self, memory: memoryview) -> Slot:
        return _NumbersSlot(self, memory)

    def complain(self, item: Any) -> NoReturn:
        """Raise the ShapeError for an item that does not fit."""
        expected = ", ".join(_NAMES[kind] for kind in self.kinds)
        raise ShapeError(f"expected a tuple ({expected}), given {item!r}.")


class _NumbersSlot:
    def __init__(self, layout: NumbersLayout, memory: memoryview) -> None:
        self._layout, self.nbytes = layout, layout.nbytes
        self._pack = partial(layout.packer.pack_into, memory, 0)
        self._unpack = partial(layout.packer.unpack_from, memory)

    def write(self, item: tuple[Any, ...]) -> None:
        try:
            for position in self._layout.bools:  # the struct module takes anything for a bool
                if not isinstance(item[position], _BOOLS):
                    self._layout.complain(item)
            self._pack(*item)
        except (struct.error, TypeError, IndexError):
            self._layout.complain(item)

    def read(self) -> tuple[Any, ...]:
        return self._unpack()

    def read_to(self, device: str | torch.device) -> tuple[Any, ...]:
        return self.read()

    def poison(self) -> None:
        """Nothing to do: what was read are values."""


class PickleLayout:
    """A small value of any kind that pickles: its length, then its bytes."""

    timed, varies = False, True
    nbytes = CONTROL_BYTES

    def bind(self, memory: memoryview) -> Slot:
        return _PickleSlot(memory)


class _PickleSlot:
    def __init__(self, memory: memoryview) -> None:
        self._memory, self._length = memory[8:], memory[:8].cast("q")  # negative where cloudpickle made it
        self.nbytes = 0

    def write(self, item: Any) -> None:
        try:
            data, sign = pickle.dumps(item, 5), 1
            if b"__main__" in data:  # a reader in another process has another __main__
                data, sign = cloudpickle.dumps(item, 5), -1
        except Exception as error:
            raise ConfigError(f"a {type(item).__name__} cannot be sent as a control value: {error}") from error
        if len(data) > len(self._memory):
            raise ShapeError(
                f"a control value may take {len(self._memory):,} bytes pickled; this {type(item).__name__} takes "
                f"{len(data):,}. Make the channel with like=… for data of a known shape."
            )
        self._memory[: len(data)] = data
        self.nbytes = len(data)
        self._length[0] = sign * len(data)

    def read(self) -> Any:
        length = self._length[0]
        return pickle.loads(self._memory[:length]) if length > 0 else loads(self._memory[:-length])

    def read_to(self, device: str | torch.device) -> Any:
        return self.read()

    def poison(self) -> None:
        """Nothing to do: what was read are values."""


_NAMES = {"?": "bool", "q": "int", "d": "float"}


def _fits(kind: str, leaf: Any) -> bool:
    if kind == "?":
        return isinstance(leaf, _BOOLS)
    try:
        struct.pack(kind, leaf)
    except (struct.error, TypeError):
        return False
    return True


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
