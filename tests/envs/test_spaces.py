"""Spaces: frozen values that say what an observation and an action look like."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spec


def box(low: Any = (-1, -2), high: Any = (1, 2), dtype: torch.dtype = torch.float32) -> Box:
    return Box(np.array(low), np.array(high), dtype)


def test_a_box_has_the_shape_of_its_bounds_and_keeps_them_in_its_dtype() -> None:
    space = box(np.zeros((2, 3)), np.full((2, 3), 255), torch.uint8)
    assert space.shape == (2, 3)
    assert space.dtype == torch.uint8
    assert space.low.dtype == space.high.dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        space.low[0, 0] = 1


def test_a_box_does_not_change_with_the_array_it_was_made_of() -> None:
    low = np.zeros(2, np.float32)
    space = Box(low, np.ones(2, np.float32))
    low[:] = 0.5
    assert (space.low == 0).all()


@pytest.mark.parametrize(
    ("space", "bounded"),
    [
        (box(), True),
        (box(high=(1, np.inf)), False),
        (box(low=(-np.inf, 0)), False),
        (box(dtype=torch.int16), True),
    ],
)
def test_a_box_is_bounded_if_every_bound_is_finite(space: Box, bounded: bool) -> None:
    assert space.bounded is bounded


@pytest.mark.parametrize("other", [box(high=(1, 3)), box(dtype=torch.float64), box([[-1, -2]], [[1, 2]]), Discrete(2)])
def test_boxes_are_equal_by_content(other: object) -> None:
    assert box() == box()
    assert hash(box()) == hash(box())
    assert box() != other


@pytest.mark.parametrize("space", [box(), box(dtype=torch.int8), Discrete(3), Discrete(2, start=-1)])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda space: pickle.loads(pickle.dumps(space))])
def test_a_copy_is_equal_and_still_frozen(space: Any, copied: Callable[[Any], Any]) -> None:
    twin = copied(space)
    assert twin == space
    assert Spec(twin, twin) == Spec(space, space)
    assert not (isinstance(twin, Box) and twin.low.flags.writeable)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (box(), "Box([-1, -2], [1, 2], shape=(2,), dtype=float32)"),
        (box(np.zeros((84, 84)), np.full((84, 84), 255), torch.uint8), "Box(0, 255, shape=(84, 84), dtype=uint8)"),
        (box(-np.arange(9), np.full(9, np.inf)), "Box(-8…0, inf, shape=(9,), dtype=float32)"),
        (box(np.zeros((0, 2)), np.zeros((0, 2))), "Box([], [], shape=(0, 2), dtype=float32)"),
        (Discrete(4), "Discrete(4)"),
        (Discrete(n=4, start=1), "Discrete(4, start=1)"),
    ],
)
def test_the_repr_is_short(space: object, text: str) -> None:
    assert repr(space) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: box(low=(1, 1, 1)), r"low has shape \(3,\), high \(2,\)"),
        (lambda: box(low=(2, 0)), r"every low must be ≤ its high; low=\[2, 0\]"),
        (lambda: box(low=(np.nan, 0)), "every low must be ≤ its high"),
        (lambda: box(low=(0.5, 0), dtype=torch.int32), r"low=\[0.5, 0\], dtype=int32\): the dtype cannot hold it"),
        (lambda: box(high=(1, 256), dtype=torch.uint8, low=(0, 0)), "cannot hold it"),
        (lambda: box(dtype=torch.bfloat16), "give a torch dtype that NumPy has too"),
        (lambda: Discrete(0), "at least one value"),
        (lambda: Discrete(1.5), "give integers"),  # type: ignore[arg-type]
        (lambda: Discrete(2, start="a"), "give integers"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_space_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_zeros_have_the_leading_axes_asked_for() -> None:
    assert box().zeros().equal(torch.zeros(2))
    zeros = box(low=(0, 0), dtype=torch.uint8).zeros(5, 3)
    assert zeros.shape == (5, 3, 2)
    assert zeros.dtype == torch.uint8


def test_zeros_of_a_discrete_space_are_its_first_value() -> None:
    assert Discrete(3, start=2).zeros(2, 1).equal(torch.tensor([[2], [2]]))
    assert Discrete(3).zeros().equal(torch.tensor(0))
    assert (Discrete(3).shape, Discrete(3).dtype) == ((), torch.int64)
    assert Discrete(np.int64(3)) == Discrete(3)  # type: ignore[arg-type]


def test_several_integers_and_bits() -> None:
    several = MultiDiscrete((2, 3), starts=(1, -1))
    assert several.shape == (2,)
    assert several.zeros(4).tolist() == [[1, -1]] * 4
    assert MultiDiscrete((2, 3)) == MultiDiscrete((2, 3), (0, 0))
    bits = MultiBinary((2, 3))
    assert bits.zeros(4).shape == (4, 2, 3)
    assert bits.zeros().dtype == bits.dtype == torch.int8


@pytest.mark.parametrize("wrong", [(), (0, 2), (2.5,)])
def test_several_integers_that_are_none_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="MultiDiscrete"):
        MultiDiscrete(wrong)


@pytest.mark.parametrize("wrong", [(), (0,), (2, -1)])
def test_bits_that_are_none_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="MultiBinary"):
        MultiBinary(wrong)
