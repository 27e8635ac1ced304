"""What is wrong with what an environment returned: small functions that yield findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from headrace.envs.base import Array
from headrace.envs.guard import TOLERANCE, Unfit, flag, number
from headrace.spaces import MASK, Box, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, leaves

__all__ = [
    "Finding",
    "Row",
    "choices_of",
    "described",
    "flag_faults",
    "info_faults",
    "mask_faults",
    "mask_space_faults",
    "observation_faults",
    "picture_faults",
    "reward_faults",
    "row_of",
    "sampling",
]

Row: TypeAlias = dict[str, object]
"""What a reset or a step returned, as bytes by path: two rows are equal if all of it was."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, once however often it was seen."""

    key: str
    """Where: "reward", "seed", "observation['lidar'][17]"."""
    expected: str
    actual: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.key}: expected {self.expected}; got {self.actual}." + (f" {self.advice}" if self.advice else "")


def observation_faults(expected: Spaces, value: Any, path: str = "observation") -> Iterator[tuple[str, Finding]]:
    """Each with a name for what is wrong with which space, whichever element shows it."""
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            given = f"the keys {sorted(value, key=str)}" if isinstance(value, dict) else described(value)
            yield f"{path} keys", Finding(path, f"a dict with the keys {sorted(expected)}", given)
        for key in expected.keys() & value.keys() if isinstance(value, dict) else ():
            yield from observation_faults(expected[key], value[key], f"{path}[{key!r}]")
    elif isinstance(expected, tuple):
        if not isinstance(value, tuple) or len(value) != len(expected):
            given = described(value) + (f" of {len(value)}" if isinstance(value, tuple) else "")
            yield f"{path} places", Finding(path, f"a tuple of {len(expected)}", given)
        for place, pair in enumerate(zip(expected, value, strict=False) if isinstance(value, tuple) else ()):
            yield from observation_faults(*pair, f"{path}[{place}]")
    elif expected is not None:
        yield from _leaf_faults(expected, value, path)


def _leaf_faults(space: Space, value: Any, path: str) -> Iterator[tuple[str, Finding]]:
    example = space.zeros().numpy()
    alike = isinstance(value, np.ndarray) and value.shape == example.shape and value.dtype == example.dtype
    if not alike and not (isinstance(space, Discrete) and isinstance(value, int | np.integer)):
        yield f"{path} kind", Finding(path, f"{example.dtype} {example.shape}", described(value))
    array = _array(value)
    if array.shape != example.shape or array.dtype.kind not in "biuf":
        return

    def finding(faulty: Array, expected: Callable[[tuple[int, ...]], str]) -> Finding:
        index = tuple(np.argwhere(faulty)[0].tolist())
        others = int(faulty.sum()) - 1
        shown = str(array[index]) + (f", and {others} other elements" if others else "")
        return Finding(path + (str(list(index)) if index else ""), expected(index), shown)

    finite = np.isfinite(array)
    if not finite.all():
        yield f"{path} finite", finding(~finite, lambda index: "a finite number")
    low, high = _bounds(space)
    outside = finite & ((array < low) | (array > high))
    if outside.any() and array.dtype.kind == "f":  # as in training, rounding is let pass
        slack = [TOLERANCE * np.maximum(np.abs(bound.astype(np.float64)), 1) for bound in (low, high)]
        outside &= (array < low - slack[0]) | (array > high + slack[1])
    if outside.any():
        yield f"{path} bounds", finding(outside, lambda index: f"from {low[index]} to {high[index]}")


def _bounds(space: Space) -> tuple[Array, Array]:
    match space:
        case Box():
            return space.low, space.high
        case Discrete():
            return np.array(space.start), np.array(space.start + space.n - 1)
        case MultiDiscrete():
            starts = np.array(space.starts)
            return starts, starts + np.array(space.sizes) - 1
    return np.zeros(space.shape, np.int8), np.ones(space.shape, np.int8)


def reward_faults(reward: Any) -> Iterator[Finding]:
    try:
        value = number(reward)
    except Unfit:
        yield Finding("reward", "a number", described(reward))
    else:
        if not math.isfinite(value):
            yield Finding("reward", "a finite number", str(value))


def flag_faults(name: str, given: Any) -> Iterator[Finding]:
    try:
        flag(given, name)
    except Unfit:
        shown = f"{given!r}, " if isinstance(given, int | float | str) else ""
        yield Finding(name, "a bool", shown + described(given))


def info_faults(info: Any) -> Iterator[Finding]:
    if not isinstance(info, dict):
        yield Finding("info", "a dict", described(info))


def mask_space_faults(space: Any, choices: list[int]) -> Iterator[Finding]:
    if getattr(space, "shape", None) != (sum(choices),):
        advice = "One number for every value of each choice; two, for 0 and for 1, for every element of a MultiBinary."
        yield Finding(f"observation_space[{MASK!r}]", f"the shape ({sum(choices)},)", str(space), advice)


def mask_faults(choices: list[int], mask: Any) -> Iterator[Finding]:
    array, key = _array(mask), f"observation[{MASK!r}]"
    if array.shape != (sum(choices),) or array.dtype.kind not in "biuf":
        return
    if not np.isin(array, (0, 1)).all():
        yield Finding(key, "zeros and ones", str(array[~np.isin(array, (0, 1))][0]))
    if not all(part.any() for part in np.split(array, np.cumsum(choices)[:-1])):
        yield Finding(key, "at least one allowed value for each choice", "a choice without any")


def choices_of(takes: Spaces) -> list[int]:
    """How many values each choice has, in the order of the mask."""
    found: list[int] = []
    for _, space in leaves(takes):
        match space:
            case Discrete():
                found.append(space.n)
            case MultiDiscrete():
                found += space.sizes
            case MultiBinary():
                found += [2] * int(np.prod(space.shape))
    return found


def sampling(space: Any, masks: Iterator[Array]) -> Any:
    """The masks of all choices as gymnasium's `sample` wants them."""
    match space:
        case spaces.Discrete():
            return next(masks)
        case spaces.MultiDiscrete():
            return tuple(next(masks) for _ in space.nvec)
        case spaces.MultiBinary():
            pairs = [next(masks) for _ in range(int(np.prod(space.shape)))]
            return np.array([1 if not off else 2 if on else 0 for off, on in pairs], np.int8).reshape(space.shape)
        case spaces.Dict():
            return {key: sampling(space[key], masks) for key in sorted(space)}
        case spaces.Tuple():
            return tuple(sampling(inner, masks) for inner in space)
    return None


def picture_faults(mode: str, picture: Any) -> Iterator[Finding]:
    if mode == "ansi":
        if not isinstance(picture, str):
            yield Finding("render", "a str", described(picture))
    elif not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
        yield Finding("render", "uint8 [height, width, 3]", described(picture))


def row_of(value: Any, path: str = "observation") -> Row:
    if isinstance(value, dict):
        return {inner: held for key in value for inner, held in row_of(value[key], f"{path}[{key!r}]").items()}
    if isinstance(value, tuple | list):
        return {
            inner: held for place, part in enumerate(value) for inner, held in row_of(part, f"{path}[{place}]").items()
        }
    array = _array(value)
    return {path: type(value) if array.dtype == object else (array.dtype.str, array.shape, array.tobytes())}


def _array(value: Any) -> Array:
    try:
        return np.asarray(value)
    except (TypeError, ValueError):  # such as lists of unequal lengths
        return np.array(None)


def described(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {value.shape}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
