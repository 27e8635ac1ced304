"""Rows as actors made them, in a ring for each lane, and what n steps from each came to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from headrace.data import Rollout
from headrace.errors import ConfigError
from headrace.replay import frames
from headrace.replay.arena import Array, Layout, leaves

__all__ = ["Rows"]

_COUNTS = ("written", "start", "begun", "ends", "memory")

Parts: TypeAlias = list[tuple[int, int, int]]
"""Of rows that go round the end of a ring: slot, first row, number of rows."""


class Rows:
    """The arrays that `arena.layout` names, and the only place where they are written.

    What n steps from a row came to (`total`, `discount`, `next`) is worked out when rows arrive, and again for the
    n − 1 rows before them: to draw a row is to copy what stands at its place.
    """

    def __init__(self, of: Layout, arrays: dict[str, Array], gamma: float, n_step: int, same_step: bool) -> None:
        self.layout, self.arrays = of, arrays
        self.drawable_rows = 0
        self.padding = frames.UNKNOWN
        self.observation = [held for name, held in arrays.items() if name.startswith("observation")]
        self.action = [held for name, held in arrays.items() if name.startswith("action")]
        self.memory = [held for name, held in arrays.items() if name.startswith("memory")]
        self.returns = arrays.get("total", arrays["reward"])
        self._n_step, self._same_step = n_step, same_step
        self._powers = gamma ** np.arange(n_step + 1)
        self._column = np.arange(of.columns)
        self._written = arrays["written"]
        ring = (of.lanes, of.slots, of.columns)
        views = {name: arrays[name][: of.places].reshape(*ring, *arrays[name].shape[1:]) for name in of.by_place}
        self.lanes = [{name: held[lane] for name, held in views.items()} for lane in range(of.lanes)]
        self._look_up()

    def live(self, lane: int) -> tuple[int, int]:
        """The first row of a lane that is still there, and the number of those that there are."""
        written = int(self._written[lane])
        count = min(written, self.layout.rows)
        return written - count, count

    def add(self, lane: int, rollout: Rollout) -> tuple[int, list[tuple[int, int]], Array]:
        """Keep what a rollout has of rows.

        Returns the number of steps, the ranges of places that were written, and others that are drawn no more.
        """
        version = rollout.version.numpy()[:, 0]
        made = len(version) if version[-1] >= 0 else int(np.count_nonzero(version >= 0))
        observation = [leaf[: made + 1] for leaf in leaves(rollout.observation)]
        ranges: list[tuple[int, int]] = []
        if not made:
            return 0, ranges, self._column[:0]
        goes_on = bool(self._written[lane]) and self._goes_on(lane, observation)
        if self._written[lane] and not goes_on:  # nothing leads on from what was seen last
            ranges += self._blank(lane, [self._head(lane, held)[None] for held in self.observation])
        flags = [held.numpy()[:made] for held in (rollout.terminated, rollout.truncated, rollout.valid)]
        depth = None
        if self.layout.stacked is not None:
            depth, older = self._look(lane, observation[0], flags, goes_on)
            if older is not None:
                self.lanes[lane]["depth"][self._written[lane] % self.layout.slots] = 0
                ranges += self._blank(lane, [older])
            observation = [observation[0][:, :, -1]]
        action = [leaf[:made] for leaf in leaves(rollout.action)]
        finals = self._finals(lane, rollout, made, depth) if self._same_step else None
        self._begin(lane, rollout)
        ranges += self._write(lane, observation, action, rollout.reward.numpy()[:made], flags, depth, finals)
        self._stale = True
        return int(np.count_nonzero(flags[2])), ranges, self._tear(lane)

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Places [n] of rows that may be drawn, all equally often, with replacement."""
        place = self._any(count, rng)
        if self._live == self.drawable_rows:  # all that are there
            return place
        drawable = self.arrays["drawable"]
        while not (good := drawable.take(place)).all():
            wrong = np.flatnonzero(~good)
            place[wrong] = self._any(len(wrong), rng)
        return place

    def observe(self, place: Array) -> list[Array]:
        """The observations at these places [n]: copies."""
        stacked = self.layout.stacked
        if stacked is None:
            return [held.take(place, 0) for held in self.observation]
        depth = self.arrays["depth"].take(place)
        back = np.arange(stacked - 1, -1, -1)
        deep = np.minimum(back, depth[:, None])
        at = place[:, None]
        if self.layout.finals:
            beyond = at >= self.layout.places
            origin = self.arrays["origin"].take(np.maximum(place - self.layout.places, 0))[:, None]
            from_row = beyond & (deep > 0)
            at = np.where(from_row, origin, at)
            deep = deep - from_row
        ring = self.layout.slots * self.layout.columns
        shift = deep * self.layout.columns
        source = np.where(at % ring < shift, at - shift + ring, at - shift)
        if self.layout.finals:
            source = np.where(beyond & ~from_row, at, source)
        (held,) = self.observation
        stack = held.take(source, 0)
        if self.padding == frames.ZEROS:
            stack[back > depth[:, None]] = 0
        return [stack]

    def draw_starts(self, count: int, length: int, rng: np.random.Generator) -> Array:
        """Rows [n, 4] where rollouts began from which there are so many: lane, line, slot and column."""
        of, written, start = self.layout, self._written[:, None], self.arrays["start"]
        first = np.maximum(written - of.rows, 0)
        known = np.arange(of.starts) < self.arrays["begun"][:, None]
        there = known & (start >= first) & (start + length <= written)
        slot = start % of.slots
        whole = np.repeat(there[..., None], of.columns, -1)
        if of.stacked is not None:
            depth = self.arrays["depth"][: of.places].reshape(of.lanes, of.slots, of.columns)
            whole &= depth[np.arange(of.lanes)[:, None], slot] <= (start - first)[..., None]
        found = np.argwhere(whole)
        if not len(found):
            raise ConfigError(
                f"sequences(length={length}): no rollout began so many rows before the newest one yet. Add more, or "
                f"give a lower length; {of.rows} rows of each environment are kept."
            )
        lane, line, column = found[rng.integers(0, len(found), count)].T
        chosen: Array = np.stack([lane, line, slot[lane, line], column], 1)
        return chosen

    def filled(self) -> dict[str, Array]:
        """What is filled of all arrays from which the others follow: views."""
        of = self.layout
        found: dict[str, Array] = {}
        for lane, views in enumerate(self.lanes):
            written = int(self._written[lane])
            slots = min(written + 1, of.slots) if written else 0
            found |= {f"{name}/{lane}": held[:slots] for name, held in views.items()}
            if "priority0" in self.arrays:
                held = self.arrays["priority0"][: of.places].reshape(of.lanes, of.slots, of.columns)
                found[f"priority/{lane}"] = held[lane, :slots]
        if of.finals:
            shape, lines = (of.lanes, of.finals, of.columns), min(int(self.arrays["ends"].max()), of.finals)
            found["origin"] = self.arrays["origin"].reshape(shape)[:, :lines]
            for name in of.by_place:
                beyond = self.arrays[name][of.places :]
                if len(beyond):
                    found[f"{name}/final"] = beyond.reshape(*shape, *beyond.shape[1:])[:, :lines]
        return found

    @property
    def counts(self) -> dict[str, Array]:
        """The arrays that say how much is filled, and what is kept of rollouts."""
        return {name: held for name, held in self.arrays.items() if name.startswith(_COUNTS)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Write what `counts` and `filled` had given into the arrays."""
        if self._written.any():
            for held in self.arrays.values():
                held[...] = 0
        for name, held in self.counts.items():
            held[...] = state[name].numpy()
        for name, held in self.filled().items():  # which the counts say
            held[...] = state[name].numpy()
        self.drawable_rows = int(np.count_nonzero(self.arrays["drawable"]))
        self._stale = True

    def _any(self, count: int, rng: np.random.Generator) -> Array:
        """Places of rows that are there."""
        if self._stale:
            self._look_up()
        ring = self.layout.slots * self.layout.columns
        at: Array = rng.integers(0, self._live, count)
        if self.layout.lanes > 1:
            lane = self._ends.searchsorted(at, "right")
            at += self._shift[lane]
            at %= ring
            at += lane * ring
        elif self._shift[0]:
            at += self._shift
            at %= ring
        return at

    def _look_up(self) -> None:
        """Work out where the rows are that are there: one lane after the other, as if there was nothing between."""
        of = self.layout
        there = np.minimum(self._written, of.rows)
        self._ends = np.cumsum(there * of.columns)
        self._live = int(self._ends[-1])
        first = (self._written - there) % of.slots * of.columns
        self._shift = first - (self._ends - there * of.columns)
        self._stale = False

    def _parts(self, row: int, count: int) -> Parts:
        slot = row % self.layout.slots
        before = self.layout.slots - slot
        return [(slot, 0, count)] if count <= before else [(slot, 0, before), (0, before, count - before)]

    def _read(self, held: Array, row: int, count: int) -> Array:
        """So many rows of a lane's array, from this one on."""
        (slot, _, size), *rest = self._parts(row, count)
        return np.concatenate([held[slot : slot + size], held[: rest[0][2]]]) if rest else held[slot : slot + size]

    def _head(self, lane: int, held: Array) -> Array:
        """What an array of observations holds of the last one [B, ...]."""
        of = self.layout
        slot = int(self._written[lane]) % of.slots
        place = (lane * of.slots + slot) * of.columns
        return held[place : place + of.columns]

    def _goes_on(self, lane: int, observation: list[Array]) -> bool:
        """Whether a rollout begins with what was seen last. It does not where an actor was started again."""
        if self.layout.stacked is None:
            last = [self._head(lane, held) for held in self.observation]
        else:
            first = (lane * self.layout.slots + int(self._written[lane]) % self.layout.slots) * self.layout.columns
            last = self.observe(first + self._column)
        # As bytes: in those a NaN is what it was, and for small ones nothing is faster.
        return all(held.tobytes() == leaf[0].tobytes() for held, leaf in zip(last, observation, strict=True))

    def _blank(self, lane: int, observation: list[Array]) -> list[tuple[int, int]]:
        """Rows that are no steps, with these observations [m, B, ...] and whatever stands at the head after them."""
        of, count = self.layout, len(observation[0])
        nothing = np.zeros((count, of.columns), np.bool_)
        action = [np.zeros((count, of.columns, *held.shape[1:]), held.dtype) for held in self.action]
        observation = [np.concatenate([rows, rows[-1:]]) for rows in observation]
        depth = None
        if of.stacked is not None:
            head = self.lanes[lane]["depth"][self._written[lane] % of.slots]
            depth = frames.depths(np.zeros((count + 1, of.columns), np.bool_), head, of.stacked - 1)
        finals = np.full((count, of.columns), -1) if self._same_step else None
        return self._write(
            lane, observation, action, nothing.astype(np.float32), [nothing, nothing, nothing], depth, finals
        )

    def _begin(self, lane: int, rollout: Rollout) -> None:
        """Note where a rollout begins, and what the policy remembers there."""
        line = int(self.arrays["begun"][lane]) % self.layout.starts
        self.arrays["begun"][lane] += 1
        self.arrays["start"][lane, line] = self._written[lane]
        if rollout.memory is not None:
            for held, leaf in zip(self.memory, leaves(rollout.memory), strict=True):
                held[lane, line] = leaf

    def _look(self, lane: int, stack: Array, flags: list[Array], goes_on: bool) -> tuple[Array, Array | None]:
        """The depths of stacks [T + 1, B, K, ...], and the frames that rows before them have to be made of, if any."""
        terminated, truncated, valid = flags
        limit = stack.shape[2] - 1
        words = frames.words(stack, 3)
        begins = np.zeros(words.shape[:2], np.bool_)
        begins[1:] = (terminated | truncated) if self._same_step else ~valid
        older, before = None, np.full(self.layout.columns, limit)
        if goes_on:
            before = self.lanes[lane]["depth"][self._written[lane] % self.layout.slots]
        elif (padding := frames.padding_of(words[0], self.padding)) is not None:
            begins[0], self.padding = True, padding
        else:  # what began before the first row is made of rows that nothing is drawn of
            older = np.moveaxis(stack[0, :, :-1], 1, 0)
        if begins[1:].any():
            padding = frames.padding_of(words[1:][begins[1:]], self.padding)
            if padding is None:
                raise ConfigError(
                    f"an episode began with a stack of {limit + 1} frames that are neither copies of one, nor one "
                    "after zeros, or now the one and now the other, so that it cannot be built again from the newest. "
                    "Let the environment begin in one of these ways, or make its spec without `stacked`."
                )
            self.padding = padding
        if not (frames.follow(words[1:], words[:-1]) | begins[1:]).all():
            raise ConfigError(
                f"an observation that is said to be a stack of {limit + 1} frames (Spec.stacked) is not the one before "
                "with one new frame at the end, so that it cannot be built again. Make the spec without `stacked`."
            )
        return frames.depths(begins, before, limit), older

    def _finals(self, lane: int, rollout: Rollout, made: int, depth: Array | None) -> Array:
        """Keep what truncated episodes ended with; returns where [T, B], −1: nowhere."""
        of, found = self.layout, np.full((made, self.layout.columns), -1)
        assert rollout.final_step is not None
        steps = rollout.final_step.numpy()
        lines, columns = np.nonzero((steps >= 0) & (steps < made))
        if len(lines):
            order = np.lexsort((steps[lines, columns], columns))
            lines, columns = lines[order], columns[order]
            step = steps[lines, columns]
            ends = self.arrays["ends"][lane]
            again = np.arange(len(columns)) - np.searchsorted(columns, columns)
            line = (ends[columns] + again) % of.finals
            np.add.at(ends, columns, 1)
            at = (lane * of.finals + line) * of.columns + columns
            slot = (int(self._written[lane]) + step) % of.slots
            self.arrays["origin"][at] = (lane * of.slots + slot) * of.columns + columns
            found[step, columns] = at + of.places
            for held, leaf in zip(self.observation, leaves(rollout.final_observation), strict=True):
                held[of.places + at] = leaf[lines, columns] if depth is None else leaf[lines, columns, -1]
            if depth is not None and of.stacked is not None:
                self.arrays["depth"][of.places + at] = np.minimum(depth[step, columns] + 1, of.stacked - 1)
        return found

    def _write(
        self,
        lane: int,
        observation: list[Array],
        action: list[Array],
        reward: Array,
        flags: list[Array],
        depth: Array | None,
        finals: Array | None,
    ) -> list[tuple[int, int]]:
        """Write m rows, and m + 1 observations, at the head, which moves on. Returns the ranges of places."""
        of, mine, written, count = self.layout, self.lanes[lane], int(self._written[lane]), len(reward)
        longer, parts = self._parts(written, count + 1), self._parts(written, count)
        for number, rows in enumerate(observation):
            held = mine[f"observation{number}"]
            for slot, first, size in longer:
                held[slot : slot + size] = rows[first : first + size]
        drawable, generation = mine["drawable"], mine["generation"]
        for slot, first, size in longer:
            if depth is not None:
                mine["depth"][slot : slot + size] = depth[first : first + size]
            generation[slot : slot + size] += 1
            self.drawable_rows -= int(np.count_nonzero(drawable[slot : slot + size]))
        if written:
            generation[written % of.slots] -= 1  # its observation was there already
        pairs: list[tuple[str, Array]] = [
            *((f"action{number}", rows) for number, rows in enumerate(action)),
            ("reward", reward),
        ]
        pairs += zip(("terminated", "truncated", "valid"), flags, strict=True)
        pairs.append(("drawable", flags[2]))
        if finals is not None:
            pairs.append(("final", finals))
        for name, rows in pairs:
            held = mine[name]
            for slot, first, size in parts:
                held[slot : slot + size] = rows[first : first + size]
        drawable[(written + count) % of.slots] = False
        self.drawable_rows += int(np.count_nonzero(flags[2]))
        self._written[lane] = written + count
        self._sum_up(lane, max(written - self._n_step + 1, written + count - of.rows, 0))
        base = lane * of.slots
        return [((base + slot) * of.columns, (base + slot + size) * of.columns) for slot, _, size in longer]

    def _sum_up(self, lane: int, row: int) -> None:
        """Work out what n steps from each row came to, from this one on."""
        of, mine = self.layout, self.lanes[lane]
        count = int(self._written[lane]) - row
        terminated = self._read(mine["terminated"], row, count)
        span: Any = 1
        last: Any = ...  # the last row of each window
        results: dict[str, Array] = {}
        if self._n_step > 1:
            reward = self._read(mine["reward"], row, count)
            total, span = reward.astype(np.float64), np.ones_like(terminated, np.int64)
            goes_on = ~(terminated | self._read(mine["truncated"], row, count))[:-1]
            goes_on &= self._read(mine["valid"], row, count)[1:]
            reaches = goes_on
            for step in range(1, min(self._n_step, count)):
                np.add(total[:-step], self._powers[step] * reward[step:], out=total[:-step], where=reaches)
                span[:-step] += reaches
                reaches = reaches[:-1] & goes_on[step:]
            results["total"] = total
            last = (np.arange(count)[:, None] + span - 1, self._column)
        slot = (np.arange(row, row + count)[:, None] + span) % of.slots
        results["next"] = (lane * of.slots + slot) * of.columns + self._column
        if self._same_step:
            final = self._read(mine["final"], row, count)[last]
            results["next"] = np.where(final >= 0, final, results["next"])
        results["discount"] = np.where(terminated[last], 0, self._powers[span])
        for name, values in results.items():
            held = mine[name]
            for to, first, size in self._parts(row, count):
                held[to : to + size] = values[first : first + size]

    def _tear(self, lane: int) -> Array:
        """Take out what has frames before the first row that is there. Returns the places."""
        of, (first, _) = self.layout, self.live(lane)
        if of.stacked is None or not first:
            return self._column[:0]
        mine, ahead = self.lanes[lane], np.arange(of.stacked - 1)
        slot = (first + ahead) % of.slots
        torn = mine["drawable"][slot] & (mine["depth"][slot] > ahead[:, None])
        row, column = np.nonzero(torn)
        mine["drawable"][slot[row], column] = False
        self.drawable_rows -= len(row)
        found: Array = (lane * of.slots + slot[row]) * of.columns + column
        return found
