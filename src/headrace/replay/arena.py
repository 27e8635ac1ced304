"""How many bytes replay takes, and where each array lies in them: one function, from which all are carved.

place    = (lane · slots + slot) · columns + column        slot = a mod slots, of row a since the lane began
arrays   [lanes, slots, columns, ...]                       one slot more than rows: the observation after the last
observations have more lines behind those, for what truncated episodes ended with where no row shows it
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree

from headrace.data import Rollout, Sampling
from headrace.errors import ConfigError
from headrace.replay.priorities import tree_sizes
from headrace.spaces import Spec
from headrace.struct import NAMESPACE, Tree

__all__ = ["Array", "Layout", "allocate", "layout", "leaves"]

Array: TypeAlias = np.ndarray[Any, Any]

ALIGNMENT = 64
_ROW: dict[str, Any] = {
    **{"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_, "valid": np.bool_},
    **{"discount": np.float32, "next": np.int64, "drawable": np.bool_, "generation": np.int64},
}


class Layout(NamedTuple):
    """What is kept, and how large it is."""

    lanes: int
    columns: int
    """Of a lane: its environments."""
    rows: int
    """Of a column."""
    finals: int
    """Lines of a column for what truncated episodes ended with."""
    starts: int
    """Rollouts of a lane of which is known where they began."""
    stacked: int | None
    arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    by_place: tuple[str, ...]
    """The arrays that have a line for each place."""

    @property
    def slots(self) -> int:
        """Of a column: its rows, and the observation that the last of them led to."""
        return self.rows + 1

    @property
    def places(self) -> int:
        """Of all lanes together."""
        return self.lanes * self.slots * self.columns

    @property
    def nbytes(self) -> int:
        """Of all arrays, each on a boundary of its own."""
        return sum(_padded(shape, dtype) for shape, dtype in self.arrays.values())


def layout(like: Rollout, lanes: int, capacity: int, sampling: Sampling, spec: Spec) -> Layout:
    """What replay of so many rows, of all lanes and environments together, is made of.

    like: a rollout of one lane. Raises ConfigError where so few rows are of no use.
    """
    steps, columns = like.size("T"), like.size("B")
    stacked = spec.stacked
    rows = capacity // (lanes * columns)
    least = max(steps, sampling.n_step, stacked or 0)
    if rows < least:
        raise ConfigError(
            f"buffer_size={capacity:,} is {rows} rows for each of {lanes * columns} environments; rollouts of {steps} "
            f"steps and n_step={sampling.n_step} need {least} for each. Give at least {least * lanes * columns:,}."
        )
    finals, starts = spec.final_rows(rows), 1 + (rows - 1) // steps
    places, lines = lanes * (rows + 1) * columns, lanes * finals * columns
    arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def take(name: str, dtype: Any, *shape: int) -> None:
        arrays[name] = (shape, np.dtype(dtype))

    by_place = [(name, dtype, (places,)) for name, dtype in _ROW.items()]
    for number, leaf in enumerate(leaves(like.observation)):
        shape = leaf.shape[2:] if stacked is None else leaf.shape[3:]
        by_place.append((f"observation{number}", leaf.dtype, (places + lines, *shape)))
    for number, leaf in enumerate(leaves(like.action)):
        by_place.append((f"action{number}", leaf.dtype, (places, *leaf.shape[2:])))
    if sampling.n_step > 1:
        by_place.append(("total", np.float32, (places,)))
    if finals:
        by_place.append(("final", np.int64, (places,)))
    if stacked is not None:
        by_place.append(("depth", np.uint8, (places + lines,)))
    for name, dtype, shape in by_place:
        take(name, dtype, *shape)
    if sampling.alpha > 0:
        for number, size in enumerate(tree_sizes(places)):
            take(f"priority{number}", np.float64, size)
    if finals:
        take("origin", np.int64, lines)
        take("ends", np.int64, lanes, columns)
    take("written", np.int64, lanes)
    take("start", np.int64, lanes, starts)
    take("begun", np.int64, lanes)
    for number, leaf in enumerate(leaves(like.memory)):
        take(f"memory{number}", leaf.dtype, lanes, starts, *leaf.shape)
    return Layout(lanes, columns, rows, finals, starts, stacked, arrays, tuple(name for name, *_ in by_place))


def allocate(of: Layout) -> dict[str, Array]:
    """The arrays, in one piece of memory: zeros that take no room before they are written."""
    memory, at, found = np.zeros(of.nbytes, np.uint8), 0, {}
    for name, (shape, dtype) in of.arrays.items():
        size = math.prod(shape) * dtype.itemsize
        found[name] = memory[at : at + size].view(dtype).reshape(shape)
        at += _padded(shape, dtype)
    return found


def leaves(tree: Tree) -> list[Array]:
    """The tensors of a tree as arrays of the same memory."""
    return [leaf.numpy() for leaf in optree.tree_leaves(tree, namespace=NAMESPACE)]


def _padded(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
