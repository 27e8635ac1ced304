"""What environments of gymnasium return is looked at here: who is in which episode, and whether it can be used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import optree
from torch import Tensor

from headrace.envs.base import Array, environment_seed
from headrace.errors import ConfigError, EnvironmentFault
from headrace.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, zeros
from headrace.struct import NAMESPACE, Tree

__all__ = [
    "Bounds",
    "Guard",
    "NonFinite",
    "Unfit",
    "Whereabouts",
    "check_policies",
    "flag",
    "number",
    "seed_of",
    "shown",
]

NonFinite: TypeAlias = Literal["raise", "pass"]
Bounds: TypeAlias = Literal["ignore", "raise", "clip"]

TOLERANCE = 1e-6
"""How far a float may lie outside of a bound, in parts of the bound, or of 1 where that is larger."""


class Unfit(Exception):
    """Something that an environment returned cannot be used: why. row: whose, where many are looked at together."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


class Whereabouts:
    """Which step of which episode each of B environments is in, noted only where an episode begins.

    resets: whether the step after an end only resets, and is no environment step.
    """

    def __init__(self, indices: range, resets: bool = True) -> None:
        self.indices, self.resets = indices, resets
        self.restart([])

    def restart(self, seeds: Sequence[int]) -> None:
        """All environments are reset, with these seeds."""
        self.seeds = seeds
        self.calls = 0  # of step, the one that runs included
        self.episodes = [0] * len(self.indices)
        self.begun = [0] * len(self.indices)  # calls when the episode began

    def begin(self, row: int) -> None:
        """The environment in this row begins its next episode in this call."""
        self.episodes[row] += 1
        self.begun[row] = self.calls

    def now(self, row: int) -> tuple[int, int, int, int]:
        """(environment, episode, step of the episode, seed)."""
        seed = self.seeds[row]
        return self.indices[row], self.episodes[row], self.calls - self.begun[row], seed

    def fault(self, row: int, what: str) -> EnvironmentFault:
        """The error that says what went wrong with the environment in this row."""
        index, episode, step, seed = self.now(row)
        steps = self.calls - episode * self.resets
        return EnvironmentFault(
            f"environment {index} (env {row} of this actor's {len(self.indices)}): {what}\n"
            f"It was in episode {episode}, step {step}; step {steps} in all, since reset(seed={seed}).",
            environment=index,
            episode=episode,
            step=step,
            seed=seed,
        )

    def unfit(self, row: int, error: Unfit) -> EnvironmentFault:
        """The error where it returned what cannot be used, from the call that it is in."""
        return self.fault(row, f"{'step' if self.now(row)[2] else 'reset'}() {error}")

    def fault_of_all(self, what: str) -> EnvironmentFault:
        """The error where it cannot be told which of them it was."""
        first, last = self.indices[0], self.indices[-1]
        seed = self.seeds[0] if self.seeds else None
        return EnvironmentFault(
            f"environments {first} to {last}: {what}\nIt was in their step {self.calls} since reset(seed={seed}…).",
            environment=self.indices,
            step=self.calls,
            seed=seed,
        )


def seed_of(seed: int, index: int) -> int:
    """What environment `index` is reset with, in 31 bits: some hand their seed to a C library that takes no more."""
    return int(environment_seed(seed, index).generate_state(1)[0] >> 1)


class Guard:
    """Takes the observations of B environments into one array for each space, and looks at what is in them.

    Arrays and lists of another dtype are cast if the shape is right: to floats any number, to integers only what stays
    equal. Raises Unfit, which says what came and what was expected.
    """

    def __init__(self, spaces: Spaces, num_envs: int, non_finite: NonFinite, bounds: Bounds) -> None:
        self.spaces = _sorted(spaces)
        self.tree: Tree = optree.tree_map(Tensor.numpy, zeros(spaces, num_envs), namespace=NAMESPACE)
        """The observations, [B, …]; the same arrays for ever."""
        self.held: list[Array] = optree.tree_leaves(self.tree, namespace=NAMESPACE)
        self.plain = isinstance(self.tree, np.ndarray)
        self._structure = optree.tree_structure(self.tree, namespace=NAMESPACE)
        self._leaves = [
            _Leaf(path, space, held, non_finite, bounds)
            for (path, space), held in zip(_named(self.spaces), self.held, strict=True)
        ]

    def write(self, row: int, observation: object) -> None:
        """Take the observation of one environment."""
        for leaf, held, given in zip(self._leaves, self.held, self._parts(self.spaces, observation), strict=True):
            held[row] = leaf.cast(given, leaf.shape)

    def take(self, observation: object) -> list[Array]:
        """The arrays of a tree [B, …], not copied if they are as declared."""
        return [
            leaf.cast(given, held.shape)
            for leaf, held, given in zip(self._leaves, self.held, self._parts(self.spaces, observation), strict=True)
        ]

    def look(self, arrays: Sequence[Array]) -> None:
        """Look at values [B, …]: what has to be finite, or inside of its bounds, and is not; or clip it in place."""
        with np.errstate(all="ignore"):  # the sums of float16 overflow
            self.look_silently(arrays)

    def look_silently(self, arrays: Sequence[Array]) -> None:
        """The same where NumPy says nothing of numbers that are not finite anyway."""
        for leaf, array in zip(self._leaves, arrays, strict=True):
            leaf.look(array)

    def joined(self, arrays: Sequence[Array]) -> Tree:
        """The tree of these arrays."""
        return optree.tree_unflatten(self._structure, arrays)

    def _parts(self, spaces: Spaces, observation: Any, path: str = "") -> Iterator[object]:
        """What is given for each space, in order: that of the tree of spaces, whatever the order in a dict."""
        if isinstance(spaces, dict):
            if not isinstance(observation, dict) or observation.keys() != spaces.keys():
                given = (
                    f"the keys {sorted(map(str, observation))}" if isinstance(observation, dict) else shown(observation)
                )
                raise Unfit(_contradicts(path, f"a dict with the keys {list(spaces)}", given))
            for key, inner in spaces.items():
                yield from self._parts(inner, observation[key], _below(path, key))
        elif isinstance(spaces, tuple):
            if not isinstance(observation, tuple) or len(observation) != len(spaces):
                given = f"{len(observation)}" if isinstance(observation, tuple) else shown(observation)
                raise Unfit(_contradicts(path, f"a tuple of {len(spaces)}", given))
            for place, inner in enumerate(spaces):
                yield from self._parts(inner, observation[place], _below(path, place))
        else:
            yield observation


class _Leaf:
    """One space among those of an observation."""

    def __init__(self, path: str, space: Space, held: Array, non_finite: NonFinite, bounds: Bounds) -> None:
        self.path, self.space, self.dtype, self.shape = path, space, held.dtype, held.shape[1:]
        self.floating = held.dtype.kind == "f"
        self.finite = self.floating and non_finite == "raise"
        self.clips = isinstance(space, Box) and bounds == "clip"
        self.limits: tuple[Array, Array] | None = None
        if not isinstance(space, Box) or bounds != "ignore":  # no network can read a value that a Discrete has not
            self.limits = _limits(space)

    def cast(self, given: object, shape: tuple[int, ...]) -> Array:
        """An array of this shape and the space's dtype. Raises Unfit if that would be another value."""
        if isinstance(given, np.ndarray) and given.dtype == self.dtype and given.shape == shape:
            return given
        expected = f"{self.dtype} {shape}"
        try:
            array = np.asarray(given)
        except Exception as error:  # ragged lists, and tensors that live on another device
            raise Unfit(_contradicts(self.path, expected, f"{shown(given)}, which is no array: {error}")) from error
        if array.shape != shape or array.dtype.kind not in ("biuf" if self.floating else "biu"):
            raise Unfit(_contradicts(self.path, expected, shown(given)))
        with np.errstate(all="ignore"):
            cast = array.astype(self.dtype)
        if not self.floating and not np.array_equal(cast, array):
            raise Unfit(_contradicts(self.path, expected, f"{shown(given)} with values that {self.dtype} cannot hold"))
        return cast

    def look(self, array: Array) -> None:
        # One sum tells for almost all: it is finite only if every value is, and if not we look closer.
        if self.finite and not math.isfinite(np.add.reduce(array, None)):
            bad = ~np.isfinite(array)
            if bad.any():
                self._refuse(array, bad, "expected finite numbers")
        if self.limits is None:
            return
        low, high = self.limits
        if self.clips:
            space = self.space
            assert isinstance(space, Box)
            np.clip(array, space.low, space.high, out=array)
            return
        bad = (array < low) | (array > high)
        if bad.any():
            self._refuse(array, bad, "outside of its bounds")

    def _refuse(self, array: Array, bad: Array, why: str) -> NoReturn:
        row, *element = np.argwhere(bad)[0].tolist()
        value = array[(row, *element)]
        place = (self.path or "observation") + (str(element) if element else "")
        space = self.space
        declared = repr(space)
        if isinstance(space, Box):
            low, high = space.low[tuple(element)], space.high[tuple(element)]
            declared = f"low {low}, high {high}, {self.dtype}, shape {self.shape}"
        raise Unfit(f"gave an observation with {place} = {value}, {why} ({declared}).", row)


def number(reward: object) -> float:
    """A reward as a float. Raises Unfit unless it is one real number, or an array of one, of shape () or (1,)."""
    if isinstance(reward, float | int):
        return float(reward)
    array = _scalar(reward, "biuf")
    if array is None:
        raise Unfit(f"gave as reward {shown(reward)}: expected one number, such as a float.")
    return float(array)


def flag(given: object, name: str) -> bool:
    """An end as a bool. Raises Unfit unless it is a bool, 0 or 1, of Python or NumPy."""
    if isinstance(given, bool | np.bool_):
        return bool(given)
    array = _scalar(given, "biu")
    if array is None or array not in (0, 1):
        raise Unfit(f"gave as {name} {shown(given)}: expected True or False.")
    return bool(array)


def shown(given: object) -> str:
    """What something is, in a few words: "float64 (3,)", "a list"."""
    if isinstance(given, np.ndarray):
        return f"{given.dtype} {given.shape}"
    if isinstance(given, tuple | list):
        return f"a {type(given).__name__} of {len(given)}"
    return f"a {type(given).__name__}"


def check_policies(who: str, non_finite: object, bounds: object) -> None:
    """Raise ConfigError for a policy that there is not."""
    for name, given, known in (
        ("non_finite", non_finite, ("raise", "pass")),
        ("bounds", bounds, ("ignore", "raise", "clip")),
    ):
        if given not in known:
            raise ConfigError(f"{who}({name}={given!r}): give one of {', '.join(map(repr, known))}.")


def _scalar(given: object, kinds: str) -> Any:
    """The one number of these kinds that is given, also in an array of shape (1,), or None."""
    try:
        array = np.asarray(given)
    except Exception:  # whatever converts itself into an array, and cannot
        return None
    return array.reshape(())[()] if array.dtype.kind in kinds and array.shape in ((), (1,)) else None


def _limits(space: Space) -> tuple[Array, Array] | None:
    """The least and the greatest that a value may be; None where any may."""
    match space:
        case Discrete(n, start):
            return np.array(start), np.array(start + n - 1)
        case MultiDiscrete(sizes, starts):
            return np.array(starts), np.array(starts) + sizes - 1
        case MultiBinary():
            return np.array(0, np.int8), np.array(1, np.int8)
    if not (np.isfinite(space.low).any() or np.isfinite(space.high).any()):
        return None
    if space.low.dtype.kind != "f":
        return space.low, space.high
    low, high = (bound.astype(np.float64) for bound in (space.low, space.high))
    return low - TOLERANCE * np.maximum(abs(low), 1), high + TOLERANCE * np.maximum(abs(high), 1)


def _sorted(spaces: Spaces) -> Spaces:
    """The same spaces, dicts in the order of the tree's leaves."""
    if isinstance(spaces, dict):
        return {key: _sorted(spaces[key]) for key in sorted(spaces)}
    return tuple(map(_sorted, spaces)) if isinstance(spaces, tuple) else spaces


def _named(spaces: Spaces, path: str = "") -> Iterator[tuple[str, Space]]:
    """Every space with its path, such as "camera.0"."""
    if isinstance(spaces, dict | tuple):
        for key, inner in spaces.items() if isinstance(spaces, dict) else enumerate(spaces):
            yield from _named(inner, _below(path, key))
    else:
        yield path, spaces


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else f"{key}"


def _contradicts(path: str, expected: str, given: str) -> str:
    where = f"{path}: " if path else ""
    return (
        f"gave an observation that contradicts its space: {where}expected {expected}, got {given}. Correct its "
        "observation_space, or what reset and step return."
    )
