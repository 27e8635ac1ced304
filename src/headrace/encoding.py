"""A tree of tensors and plain values as JSON and named tensors, and back: what checkpoints are made of.

JSON's own values stand for themselves. An object with one key that begins with $ is what JSON has no word for:

    {"$weight": "actor.bias"}   {"$tensor": "learner/rng"}   {"$tuple": [1, 2]}   {"$dict": [[0, "by an integer"]]}
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headrace.channel import Note
from headrace.errors import CheckpointError, ConfigError

__all__ = ["Decoder", "Encoder", "Json", "names", "safetensors_of"]

Json: TypeAlias = Any
_CODES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.complex64: "C64"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
}
"""The names that dtypes have in safetensors. Tensors of any other one are held as their bytes."""


class Encoder:
    """Makes JSON of trees, and collects their tensors: the network's own, by the names of its state_dict, and others.

    A tensor that a tree holds twice is collected once. root: what the tree is called where it cannot be encoded.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.weights: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # by memory; what is collected stays alive, so it is not reused

    def encode(self, value: Any, *path: Any) -> Json:
        """The JSON of a tree that stands at this path. Raises ConfigError for what a checkpoint cannot hold."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is list:
            return self._each(value, path)
        if kind is tuple:
            return {"$tuple": self._each(value, path)}
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(held, *path, key) for key, held in value.items()}
        if kind is dict:
            return {"$dict": self._pairs(value, path)}
        if kind is OrderedDict:  # a state_dict has the versions of its modules as an attribute
            return {"$ordered": [self._pairs(value, path), self.encode(vars(value), *path, "attributes")]}
        if kind is Note:
            return {"$note": [value.version, self.encode(dict(value.values), *path, "values")]}
        if isinstance(value, tuple) and _named_tuple(name := f"{kind.__module__}:{kind.__qualname__}") is kind:
            return {"$named": [name, list(kind._fields), self._each(value, path)]}
        if isinstance(value, np.generic) and value.dtype.kind not in "OSUV":  # text would lose zeros at its end
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        if kind is np.ndarray and value.dtype.kind not in "OV":
            held = np.array(value, order="C").reshape(-1).view(np.uint8)  # a copy: torch takes no array that is locked
            return {"$array": [self._put(torch.from_numpy(held), path), value.dtype.str, list(value.shape)]}
        if isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_meta or value.is_quantized):
            return self._tensor(value.detach().resolve_conj().resolve_neg(), path)
        where = self.root + "".join(f"[{part!r}]" for part in path)
        raise ConfigError(
            f"{where} is a {kind.__qualname__}; a checkpoint holds dicts, lists, tuples and NamedTuples of a module, "
            "of dense tensors, NumPy arrays and scalars, numbers, strings, bytes, bools and None. Give one of these."
        )

    def _each(self, values: Iterable[Any], path: tuple[Any, ...]) -> list[Json]:
        return [self.encode(value, *path, index) for index, value in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], path: tuple[Any, ...]) -> list[Json]:
        return [[self.encode(key, *path, key), self.encode(held, *path, key)] for key, held in values.items()]

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> Json:
        if tensor.dtype not in _CODES:
            name, dtype = self._put(_bytes_of(tensor), path), str(tensor.dtype).removeprefix("torch.")
            return {"$raw": [name, dtype, list(tensor.shape)]}
        if path[:-1] == ("learner", "net") and type(path[-1]) is str and path[-1] != "__metadata__":
            self.weights[path[-1]] = tensor
            return {"$weight": path[-1]}
        return {"$tensor": self._put(tensor, path)}

    def _put(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in self._names:
            return self._names[memory]
        name = "/".join(map(str, path))
        while name in self.tensors or name == "__metadata__":  # the key 0 beside the key "0"; a word of the format
            name += "'"
        self.tensors[name] = tensor
        self._names[memory] = name
        return name


class Decoder:
    """Makes trees of JSON that an `Encoder` made, and of the tensors that it collected.

    source: what the JSON was read from. weights, tensors: give them, once they are needed.
    """

    def __init__(
        self, source: str, weights: Callable[[], Mapping[str, Tensor]], tensors: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        self.source = source
        self._weights, self._tensors = weights, tensors

    def decode(self, node: Json) -> Any:
        """The tree. Runs no code that the JSON names. Raises one of many errors where it is none of an `Encoder`'s."""
        if isinstance(node, list):
            return [self.decode(each) for each in node]
        if not isinstance(node, dict):
            return node
        if len(node) == 1 and (tag := next(iter(node))).startswith("$"):
            return self._tagged(tag, node[tag])
        return {key: self.decode(held) for key, held in node.items()}

    def _tagged(self, tag: str, held: Json) -> Any:
        match tag, held:
            case "$weight", str(name):
                return self._weights()[name]
            case "$tensor", str(name):
                return self._tensors()[name]
            case "$raw", [str(name), str(dtype), list(shape)]:
                return self._tensors()[name].view(_dtype(dtype)).reshape(shape)
            case "$array", [str(name), str(dtype), list(shape)]:
                return _array(self._tensors()[name].numpy(), dtype, shape)
            case "$scalar", [str(dtype), str(data)]:
                return _array(bytearray.fromhex(data), dtype, [])[()]
            case "$float", str(data):
                return _array(bytearray.fromhex(data), ">f8", []).item()
            case "$bytes", str(data):
                return base64.b64decode(data, validate=True)
            case "$tuple", list(values):
                return tuple(map(self.decode, values))
            case "$dict", list(pairs):
                return {self.decode(key): self.decode(value) for key, value in pairs}
            case "$ordered", [list(pairs), attributes]:
                ordered = OrderedDict((self.decode(key), self.decode(value)) for key, value in pairs)
                vars(ordered).update(self.decode(attributes))
                return ordered
            case "$note", [int(version), values]:
                return Note(version, self.decode(values))
            case "$named", [str(name), list(fields), list(values)]:
                kind = _named_tuple(name)
                if kind is None or list(kind._fields) != fields:
                    raise CheckpointError(
                        f"{self.source} has a {name} with fields {', '.join(fields)}, and no such NamedTuple is "
                        "imported here. Import its module first, as it was then; load_weights() needs none."
                    )
                return tuple.__new__(kind, map(self.decode, values))
        raise ValueError(f"{tag} is unknown")


def names(node: Json) -> tuple[set[str], set[str]]:
    """The names of the weights, and those of the other tensors, that JSON asks for."""
    weights: set[str] = set()
    tensors: set[str] = set()
    pending = [node]
    while pending:
        match pending.pop():
            case {"$weight": str(name)}:
                weights.add(name)
            case {"$tensor": str(name)} | {"$raw": [str(name), *_]} | {"$array": [str(name), *_]}:
                tensors.add(name)
            case dict() as inner:
                pending.extend(inner.values())
            case list() as inner:
                pending.extend(inner)
    return weights, tensors


def safetensors_of(tensors: Mapping[str, Tensor]) -> Iterable[Any]:
    """The parts of a file in that format: length of the header, header, data.

    Not by its library, which wants all of a GPU's tensors on the host at once, and makes files for their owner only.
    """
    ordered = sorted(tensors.items(), key=lambda entry: -entry[1].element_size())  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        yield _bytes_of(tensor).numpy()


def _bytes_of(tensor: Tensor) -> Tensor:
    """A dense tensor's bytes in row-major order, on the CPU; of its own memory where it lies there so."""
    flat = tensor.cpu().reshape(-1)
    if flat.stride() != (1,):  # a single element may have any stride, and counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _array(data: Any, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    if kind.kind in "OV" or math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no {dtype} of shape {shape}")
    return np.frombuffer(data, kind).reshape(shape) if len(data) else np.zeros(shape, kind)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no {name}")
    return found


def _named_tuple(name: str) -> Any:
    """The NamedTuple called module:Class, if it is imported already: a file must not have anything imported."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = inspect.getattr_static(found, part, None)
    return found if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields") else None
