"""Stacks of frames of which only the newest frame is kept: what is noted of each, and how they are built again.

A stack is the frames of the rows before it, as far back as its episode goes; what is older is its first frame again, or
zeros, as the environment has it. Its depth is how many of its frames, the newest not counted, are those of rows.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

__all__ = ["UNKNOWN", "ZEROS", "depths", "follow", "padding_of", "words"]

Array: TypeAlias = np.ndarray[Any, Any]

UNKNOWN, COPIES, ZEROS = 0, 1, 2
"""What the first stack of an episode has before its frame. Nothing tells as long as all frames were zeros."""


def words(stack: Array, axes: int) -> Array:
    """The bytes of each frame, in words as long as they can be: [..., K, W], of a stack with so many leading axes."""
    flat = np.ascontiguousarray(stack).reshape(*stack.shape[:axes], -1)
    size = flat.shape[-1] * flat.itemsize
    return flat.view(f"u{math.gcd(size, 8)}")


def depths(begins: Array, before: Array, limit: int) -> Array:
    """The depth of each stack [T, B].

    begins: where an episode begins. before: the depth of row 0 [B], where none does. limit: the most.
    """
    row = np.arange(len(begins))[:, None]
    last = np.maximum.accumulate(np.where(begins, row, -before.astype(np.int64)), 0)
    found: Array = np.minimum(row - last, limit).astype(np.uint8)
    return found


def follow(stack: Array, before: Array) -> Array:
    """Whether each stack [..., K, W] goes on from the one before it: all its frames but the newest are there."""
    same: Array = (stack[..., :-1, :] == before[..., 1:, :]).all((-1, -2))
    return same


def padding_of(stack: Array, known: int) -> int | None:
    """What stands before the newest frame of these first stacks [N, K, W]; None: something else than what is known."""
    older, newest = stack[:, :-1], stack[:, -1:]
    fits = {COPIES: bool((older == newest).all()), ZEROS: not older.any()}
    if known != UNKNOWN:
        return known if fits[known] else None
    found = [kind for kind, true in fits.items() if true]
    return None if not found else found[0] if len(found) == 1 else UNKNOWN
