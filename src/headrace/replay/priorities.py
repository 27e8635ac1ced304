"""Priorities of rows: a sum tree of wide fan-out in float64, with batched updates, and what new rows begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Priorities", "SumTree", "tree_sizes"]

Array: TypeAlias = np.ndarray[Any, Any]

EPSILON = 1e-6  # is added to errors, so that a row without one can be drawn
FAN_OUT = 16
TOP = 4096  # nodes that are summed anew for every draw
_BEFORE = np.triu(np.ones((FAN_OUT, FAN_OUT + 1)), 1)
"""Times a block: the sums of what is before each of its numbers, and of all."""


def tree_sizes(leaves: int) -> list[int]:
    """How many nodes each level has, from the leaves up, so that each but the last is whole blocks."""
    sizes = []
    while leaves > TOP:
        blocks = -(-leaves // FAN_OUT)
        sizes.append(blocks * FAN_OUT)
        leaves = blocks
    return [*sizes, leaves]


class SumTree:
    """Numbers, from 0 on, each of which is found in proportion to its size.

    levels: float64 [nodes] as `tree_sizes` has them; level 0 are the numbers. A node is the sum of its block below, and
    summed anew with it: rounding errors do not pile up, and what follows from the numbers is the same after a restart.
    """

    def __init__(self, levels: Sequence[Array]) -> None:
        self.leaves, self._top = levels[0], levels[-1]
        self._blocks = [level.reshape(-1, FAN_OUT) for level in levels[:-1]]
        self._parents = list(levels[1:])

    def write(self, place: Array, value: Array) -> None:
        """Set the numbers [n] at these places [n]; the last one where a place comes twice."""
        self.leaves[place] = value
        for blocks, parents in zip(self._blocks, self._parents, strict=True):
            place = place // FAN_OUT
            parents[place] = blocks.take(place, 0).sum(1)

    def fill(self, start: int, value: Array) -> None:
        """Set the numbers [n] from this place on."""
        stop = start + len(value)
        self.leaves[start:stop] = value
        for blocks, parents in zip(self._blocks, self._parents, strict=True):
            start, stop = start // FAN_OUT, (stop - 1) // FAN_OUT + 1
            parents[start:stop] = blocks[start:stop].sum(1)

    def sum_up(self) -> None:
        """Work out every node from the numbers."""
        self.fill(0, self.leaves.copy())

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Places [n] in proportion to their numbers: one from each of n equal parts of the sum, in order."""
        sums = self._top.cumsum()
        total = sums[-1]
        found = self._find(sums, (np.arange(count) + rng.random(count)) * (total / count))
        while not (drawable := self.leaves.take(found) > 0).all():  # rounding led to a neighbour that is 0
            wrong = np.flatnonzero(~drawable)
            found[wrong] = self._find(sums, rng.random(len(wrong)) * total)
        return found

    def _find(self, sums: Array, at: Array) -> Array:
        """The leaves in which these points of the sum lie."""
        node = np.minimum(sums.searchsorted(at, "right"), len(sums) - 1)
        at = at - (sums[node] - self._top[node])
        row = np.arange(0, len(at) * (FAN_OUT + 1), FAN_OUT + 1)
        for blocks in reversed(self._blocks):
            before = blocks.take(node, 0) @ _BEFORE  # as a product a fifth of the time of a running sum
            before[:, -1] = np.inf
            child = (before[:, 1:] > at[:, None]).argmax(1)
            at = at - before.ravel().take(row + child)
            node = node * FAN_OUT + child
        return node


class Priorities:
    """How often each row is drawn: in proportion to (|error| + ε)^α (Schaul et al. 2016, arXiv:1511.05952, eq. 1).

    A row that is new begins with the highest priority that was told of late: among the last `capacity` that were told,
    and as many before them. So it is drawn soon, and one error that was huge once is forgotten. At first it is 1.
    """

    def __init__(self, arrays: Mapping[str, Array], capacity: int, alpha: float) -> None:
        count = sum(name.startswith("priority") for name in arrays)
        self._tree = SumTree([arrays[f"priority{number}"] for number in range(count)])
        self._drawable = arrays["drawable"]
        self._capacity, self._alpha = capacity, alpha
        self._highest, self._before, self._told = 0.0, 1.0, 0  # in this span of so many that were told; in the last one

    def add(self, ranges: Iterable[tuple[int, int]], torn: Array) -> None:
        """Begin with the rows in these ranges of places; rows at the other places are not drawn any more."""
        highest = max(self._highest, self._before)
        for start, stop in ranges:
            self._tree.fill(start, self._drawable[start:stop] * highest)
        if len(torn):
            self._tree.write(torn, np.zeros(len(torn)))

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Places [n]: one from each of n equal parts of all priorities, in their order."""
        return self._tree.draw(count, rng)

    def weights(self, place: Array, beta: float) -> Array:
        """Importance weights (§3.4) of rows that were drawn, divided by the largest of them: float32 [n].

        (N · P)^−β / max is (smallest priority / priority)^β: neither N nor the sum of all matters.
        """
        priority = self._tree.leaves.take(place)
        found: Array = ((priority.min() / priority) ** beta).astype(np.float32)
        return found

    def update(self, place: Array, error: Array) -> None:
        """Set the priorities of rows from their errors [n], from 0 on."""
        priority = (error.astype(np.float64) + EPSILON) ** self._alpha
        self._tree.write(place, priority)
        self._highest = max(self._highest, float(priority.max()))
        self._told += len(place)
        if self._told >= self._capacity:
            self._highest, self._before, self._told = 0.0, self._highest, 0

    def state(self) -> dict[str, Any]:
        """What is not in the arrays."""
        return {"highest": self._highest, "before": self._before, "told": self._told}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, and from the numbers in the arrays."""
        self._highest, self._before, self._told = state["highest"], state["before"], state["told"]
        self._tree.sum_up()
