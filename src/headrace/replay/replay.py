"""Replay: rows of experience, drawn from again and again, uniformly or by priority."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from headrace.data import Rollout, Sampling, Transitions
from headrace.errors import ConfigError, NonFinite
from headrace.replay.arena import Array, allocate, layout
from headrace.replay.priorities import Priorities
from headrace.replay.room import Room, available
from headrace.replay.rows import Rows
from headrace.replay.sequences import Sequences
from headrace.spaces import Spec
from headrace.struct import NAMESPACE, Tree

__all__ = ["Replay"]


class Replay:
    """The last rows of all environments, a ring for each lane, and what is drawn from them.

    like: a rollout of one lane. lanes: how many there are. capacity: rows of all environments together; those that only
    reset count. sampling: what the method asks for. seed: of the generator that draws.
    Raises ConfigError where that is too few rows, or more memory than there is.
    """

    def __init__(
        self, like: Rollout, lanes: int, capacity: int, sampling: Sampling, spec: Spec, seed: Sequence[int] | int
    ) -> None:
        if sampling.n_step < 1 or not 0 <= sampling.gamma <= 1 or sampling.alpha < 0:
            raise ConfigError(f"{sampling}: give n_step from 1 on, gamma from 0 to 1 and alpha from 0 on.")
        self.layout = layout(like, lanes, capacity, sampling, spec)
        room = Room(self.layout.nbytes, available())
        if not room.fits:
            raise ConfigError(_no_room(capacity, room, spec))
        self.sampling = sampling
        arrays = allocate(self.layout)
        same_step = spec.shortest_truncation is not None
        self._rows = Rows(self.layout, arrays, sampling.gamma, sampling.n_step, same_step)
        self._priorities = Priorities(arrays, capacity, sampling.alpha) if sampling.alpha > 0 else None
        self._rng = np.random.default_rng(np.random.SeedSequence(seed))
        trees: list[Tree] = [like.observation, like.action, like.memory]
        self._trees = [optree.tree_structure(tree, namespace=NAMESPACE) for tree in trees]
        self._added = self._late = 0

    @staticmethod
    def needed(like: Rollout, lanes: int, capacity: int, sampling: Sampling, spec: Spec) -> int:
        """Bytes that such a replay takes when it is full. Raises ConfigError where that is too few rows."""
        return layout(like, lanes, capacity, sampling, spec).nbytes

    @staticmethod
    def room(like: Rollout, lanes: int, capacity: int, sampling: Sampling, spec: Spec) -> Room:
        """What such a replay takes, and what there is."""
        return Room(Replay.needed(like, lanes, capacity, sampling, spec), available())

    def __len__(self) -> int:
        return self._rows.drawable_rows

    @property
    def added(self) -> int:
        """Environment steps that were ever added."""
        return self._added

    @property
    def late(self) -> int:
        """Priorities that came too late: for rows that had been overwritten."""
        return self._late

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when it is full."""
        return self.layout.nbytes

    def add(self, lane: int, rollout: Rollout) -> None:
        """Keep the next rollout of a lane, in place of its oldest rows.

        Where it does not begin with what the one before ended with, nothing leads from those rows to these.
        Raises ConfigError for stacks of frames that are none.
        """
        steps, ranges, torn = self._rows.add(lane, rollout)
        self._added += steps
        if self._priorities is not None:
            self._priorities.add(ranges, torn)

    def sample(self, batch_size: int, beta: float | None = None) -> Transitions:
        """Draw so many rows, with replacement: copies, on the CPU.

        beta: exponent of the importance weights, which are divided by the largest of the batch. None: that of
        `sampling`. Raises ConfigError while there is no row.
        """
        rows = self._rows
        if not rows.drawable_rows:
            raise ConfigError(
                f"sample({batch_size}): there is no row to draw yet; add a rollout with valid rows first."
            )
        if self._priorities is None:
            place, weight = rows.draw(batch_size, self._rng), np.ones(batch_size, np.float32)
        else:
            place = self._priorities.draw(batch_size, self._rng)
            exponent = self.sampling.beta if beta is None else beta
            weight = self._priorities.weights(place, exponent)
        arrays = rows.arrays
        observation, action, _ = self._trees
        # Together: half as many operations, and one piece of memory, which is large enough to be kept for the next one.
        seen = rows.observe(np.concatenate([place, arrays["next"].take(place)]))
        return Transitions(
            observation=_tree(observation, [leaf[:batch_size] for leaf in seen]),
            action=_tree(action, [held.take(place, 0) for held in rows.action]),
            reward=torch.from_numpy(rows.returns.take(place)),
            discount=torch.from_numpy(arrays["discount"].take(place)),
            next_observation=_tree(observation, [leaf[batch_size:] for leaf in seen]),
            weight=torch.from_numpy(weight),
            row=torch.from_numpy(place),
            generation=torch.from_numpy(arrays["generation"].take(place)),
        )

    def sequences(self, batch_size: int, length: int) -> Sequences:
        """Draw so many stretches of so many rows, each from where a rollout began, all equally often.

        Raises ConfigError while there is none that long, and where environments reset within the step: rows do not show
        there what episodes ended with.
        """
        rows = self._rows
        if rows.layout.finals:
            raise ConfigError("sequences: these environments reset within the step that ends an episode.")
        lane, line, slot, column = rows.draw_starts(batch_size, length, self._rng).T
        of, arrays = rows.layout, rows.arrays
        step = np.arange(length + 1)[:, None]
        place = (lane * of.slots + (slot + step) % of.slots) * of.columns + column  # [T + 1, B]
        observation, action, remembered = self._trees
        shape = (length + 1, batch_size)
        seen = [leaf.reshape(*shape, *leaf.shape[1:]) for leaf in rows.observe(place.ravel())]
        flags = {
            name: torch.from_numpy(arrays[name].take(place[:-1]))
            for name in ("reward", "terminated", "truncated", "valid")
        }
        memory = [held[lane, line, column] for held in rows.memory]
        return Sequences(
            observation=_tree(observation, seen),
            action=_tree(action, [held.take(place[:-1], 0) for held in rows.action]),
            memory=_tree(remembered, memory),
            row=torch.from_numpy(place[0]),
            generation=torch.from_numpy(arrays["generation"].take(place[0])),
            **flags,
        )

    def update(self, row: Tensor, generation: Tensor, priority: Tensor) -> None:
        """Set the priorities [B] of rows as they were drawn, from 0 on; those of overwritten rows are dropped.

        Raises NonFinite for a NaN or an infinity, ConfigError for a number below 0.
        """
        place, given = row.numpy(), priority.numpy()
        if not (given >= 0).all() or not math.isfinite(given.sum(dtype=np.float64)):
            _refuse(place, given)
        due = self._rows.arrays["generation"].take(place) == generation.numpy()
        due &= self._rows.arrays["drawable"].take(place)  # not after frames that it needs were overwritten
        if not due.all():
            self._late += int(np.count_nonzero(~due))
            place, given = place[due], given[due]
        if self._priorities is not None and len(place):
            self._priorities.update(place, given)

    def age(self, drawn: Transitions) -> float:
        """How many rows, of all environments together, were made since these that were drawn, on average."""
        of, row = self.layout, drawn.row.numpy()
        lane, at = np.divmod(row, of.slots * of.columns)
        since = (self._rows.arrays["written"][lane] - 1 - at // of.columns) % of.slots
        return float(since.mean()) * of.lanes * of.columns

    def state(self) -> dict[str, Any]:
        """All that it holds, for a checkpoint: tensors of what is filled, valid until the next rollout is added."""
        rows = self._rows
        tensors = {name: torch.from_numpy(held) for name, held in (rows.counts | rows.filled()).items()}
        return {
            "kept": self._kept(),
            "tensors": tensors,
            "padding": rows.padding,
            "priorities": None if self._priorities is None else self._priorities.state(),
            "rng": self._rng.bit_generator.state,
            "added": self._added,
            "late": self._late,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: what is drawn next is what would have been. Raises ConfigError for another replay's."""
        mine, given = self._kept(), state["kept"]
        for name in sorted(mine.keys() | given.keys()):
            if given.get(name) != mine.get(name):
                raise ConfigError(
                    f"this is another replay's state: for {name} it has {given.get(name)}, and {mine.get(name)} was "
                    "expected. Keep buffer_size, num_envs, num_steps, actors, n_step and alpha as they were."
                )
        self._rows.load(state["tensors"])
        self._rows.padding = state["padding"]
        if self._priorities is not None:
            self._priorities.load_state(state["priorities"])
        self._rng.bit_generator.state = state["rng"]
        self._added, self._late = state["added"], state["late"]

    def _kept(self) -> dict[str, list[Any]]:
        """Names, shapes and dtypes of all arrays."""
        return {name: [list(shape), dtype.str] for name, (shape, dtype) in self.layout.arrays.items()}


def _tree(structure: optree.PyTreeSpec, arrays: Sequence[Array]) -> Tree:
    return structure.unflatten(map(torch.from_numpy, arrays))


def _refuse(place: Array, given: Array) -> None:
    wrong = int(np.flatnonzero(~(np.isfinite(given) & (given >= 0)))[0])
    value = float(given[wrong])
    text = f"the priority of row {int(place[wrong])} (number {wrong} of the batch) is {value}"
    if math.isfinite(value):
        raise ConfigError(f"{text}: give sizes of errors, from 0 on.")
    raise NonFinite(f"{text}; no priority was changed. The errors of that batch were not finite.")


def _no_room(capacity: int, room: Room, spec: Spec) -> str:
    stacked = (
        ""
        if spec.stacked is not None
        else ", or where observations are stacks of frames have each kept once (Spec.stacked)"
    )
    fits = int(capacity * 0.9 * room.available / room.needed)
    return (
        f"buffer_size={capacity:,} needs {room.needed:,} bytes ({room.needed / 2**30:.1f} GiB), and "
        f"{room.available:,} ({room.available / 2**30:.1f} GiB) are available to this process. Give at most about "
        f"{fits:,}{stacked}."
    )
