"""What observations and actions look like, said without any environment package.

    Spec(observation=Box(low, high, torch.float32), action=Discrete(2))

A space is a frozen value: a shape, a dtype and the values allowed. An environment has a Spec; a method builds its
network from it, and whoever needs memory for T steps of B environments asks for `space.zeros(T, B)`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import optree
import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.struct import NAMESPACE, Tree

__all__ = ["MASK", "Box", "Discrete", "MultiBinary", "MultiDiscrete", "Space", "Spaces", "Spec", "leaves", "zeros"]

FEW = 6  # bounds that the repr of a Box lists one by one


@dataclass(frozen=True, eq=False, repr=False)
class Box:
    """Arrays of one shape and dtype whose every element lies between two bounds, which may be infinite.

    low, high: arrays (or nested lists) of equal shape; they become read-only arrays of the dtype. Two boxes are equal
    if shape, dtype and bounds are. Raises ConfigError if shapes differ, low > high, or a bound does not fit the dtype.
    """

    low: np.ndarray[Any, Any]
    high: np.ndarray[Any, Any]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        try:
            dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        except TypeError as error:
            raise ConfigError(f"Box(…, dtype={self.dtype!r}): give a torch dtype that NumPy has too") from error
        for name in ("low", "high"):
            given = np.asarray(getattr(self, name))
            bound = given.astype(dtype)
            if not np.issubdtype(dtype, np.floating) and not np.array_equal(bound, given):
                raise ConfigError(f"Box({name}={_text(given)}, dtype={_short(self.dtype)}): the dtype cannot hold it")
            bound.flags.writeable = False
            object.__setattr__(self, name, bound)
        if self.low.shape != self.high.shape:
            raise ConfigError(f"Box: low has shape {self.low.shape}, high {self.high.shape}; they must be equal")
        if not np.all(self.low <= self.high):  # also false for NaN
            raise ConfigError(f"Box: every low must be ≤ its high; low={_text(self.low)}, high={_text(self.high)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one value, without leading axes."""
        shape: tuple[int, ...] = self.low.shape
        return shape

    @property
    def bounded(self) -> bool:
        """Whether every bound is finite."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    def zeros(self, *leading: int) -> Tensor:
        """A tensor of zeros [*leading, *shape]."""
        return torch.zeros((*leading, *self.shape), dtype=self.dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Box):
            return NotImplemented
        same = self.dtype == other.dtype and np.array_equal(self.low, other.low)
        return same and np.array_equal(self.high, other.high)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        return f"Box({_text(self.low)}, {_text(self.high)}, shape={self.shape}, dtype={_short(self.dtype)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Box, (self.low, self.high, self.dtype)  # NumPy forgets read-only when it pickles


@dataclass(frozen=True)
class Discrete:
    """One of n integers: start, start + 1, …, start + n − 1. int64, shape (). Raises ConfigError unless n ≥ 1."""

    n: int
    start: int = 0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "n", operator.index(self.n))
            object.__setattr__(self, "start", operator.index(self.start))
        except TypeError as error:
            raise ConfigError(f"Discrete(n={self.n!r}, start={self.start!r}): give integers") from error
        if self.n < 1:
            raise ConfigError(f"Discrete(n={self.n}): there must be at least one value")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one value, without leading axes: ()."""
        return ()

    @property
    def dtype(self) -> torch.dtype:
        """int64."""
        return torch.int64

    def zeros(self, *leading: int) -> Tensor:
        """A tensor [*leading] of the first value, `start`: zero need not be in the space."""
        return torch.full(leading, self.start, dtype=torch.int64)

    def __repr__(self) -> str:
        return f"Discrete({self.n}, start={self.start})" if self.start else f"Discrete({self.n})"


@dataclass(frozen=True)
class MultiDiscrete:
    """Several integers at once: component k is one of starts[k], …, starts[k] + sizes[k] − 1. int64, shape (K,).

    Raises ConfigError unless there is a component and each has at least one value.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        try:
            sizes = tuple(map(operator.index, self.sizes))
            starts = tuple(map(operator.index, self.starts)) or (0,) * len(sizes)
        except TypeError as error:
            raise ConfigError(f"MultiDiscrete({self.sizes!r}, {self.starts!r}): give tuples of integers") from error
        if not sizes or min(sizes) < 1 or len(starts) != len(sizes):
            raise ConfigError(
                f"MultiDiscrete(sizes={sizes}, starts={starts}): there must be at least one component, with at least "
                "one value each, and as many starts as sizes"
            )
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "starts", starts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one value, without leading axes: (K,)."""
        return (len(self.sizes),)

    @property
    def dtype(self) -> torch.dtype:
        """int64."""
        return torch.int64

    def zeros(self, *leading: int) -> Tensor:
        """A tensor [*leading, K] of the first values."""
        return torch.tensor(self.starts).repeat(*leading, 1)


@dataclass(frozen=True)
class MultiBinary:
    """An array of zeros and ones. int8. Raises ConfigError unless every axis has at least one element."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"MultiBinary(shape={self.shape}): give a tuple of sizes from 1 on")

    @property
    def dtype(self) -> torch.dtype:
        """int8."""
        return torch.int8

    def zeros(self, *leading: int) -> Tensor:
        """A tensor of zeros [*leading, *shape]."""
        return torch.zeros((*leading, *self.shape), dtype=torch.int8)


Space: TypeAlias = Box | Discrete | MultiDiscrete | MultiBinary
Spaces: TypeAlias = Any
"""A space, or a dict or tuple of them, nested."""

MASK = "action_mask"
"""The key, in a dict of observations, of what says which actions are allowed: 1 allowed, 0 not, one after the other
for every value of a Discrete or a MultiDiscrete; off and on for every element of a MultiBinary."""


@dataclass(frozen=True)
class Spec:
    """What an environment shows and takes: all that a method needs to know of it to build its network.

    Both are a space, or a dict or tuple of spaces, nested. Raises ConfigError for a count below 1.
    """

    observation: Spaces
    action: Spaces
    shortest_truncation: int | None = None
    """Of environments that reset in the step that ends an episode (same-step auto-reset): no truncated episode is
    shorter than so many steps. None: they reset in the step after, as the library's own do."""
    frame_skip: int = 1
    """Frames that pass in one environment step."""
    stacked: int | None = None
    """How many frames an observation, a Box, is a stack of along its first axis, the newest last: each observation is
    the one before without its oldest frame, and a new one. The first of an episode has copies of its one frame before
    it, or zeros. None: an observation is none, or nothing is known of it."""

    def __post_init__(self) -> None:
        for name in ("shortest_truncation", "frame_skip", "stacked"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ConfigError(f"Spec({name}={given}): give at least 1.")
        box = self.observation
        if self.stacked is not None and not (isinstance(box, Box) and box.shape[:1] == (self.stacked,)):
            raise ConfigError(
                f"Spec(stacked={self.stacked}): expected as observation a Box whose first axis is that long, got {box}."
            )

    def final_rows(self, num_steps: int) -> int:
        """How many episodes of one environment can be truncated in so many steps, where it resets within the step."""
        return 0 if self.shortest_truncation is None else 1 + (num_steps - 1) // self.shortest_truncation


def leaves(spaces: Spaces) -> list[tuple[str, Space]]:
    """Every space in a tree with its path, such as "['camera'][0]", in the order of the tree's tensors."""
    accessors, found, _ = optree.tree_flatten_with_accessor(spaces, namespace=NAMESPACE)
    return [(accessor.codify(""), space) for accessor, space in zip(accessors, found, strict=True)]


def zeros(spaces: Spaces, *leading: int) -> Tree:
    """A tree of tensors [*leading, *shape], as `zeros` of each space in it."""
    return optree.tree_map(lambda space: space.zeros(*leading), spaces, namespace=NAMESPACE)


def _text(bound: np.ndarray[Any, Any]) -> str:
    """A bound in one line: one number if all are equal, all if they are few, else the smallest and the largest."""
    if bound.size == 0:
        return "[]"
    if (bound == bound.flat[0]).all():
        return f"{bound.flat[0]:.6g}"
    if bound.size <= FEW:
        return "[" + ", ".join(f"{value:.6g}" for value in bound.flat) + "]"
    return f"{bound.min():.6g}…{bound.max():.6g}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
