"""Replay beside one of Python lists, at many sizes, on streams of rollouts with everything that can come."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data import Rollout, Sampling
from headrace.encoding import Decoder, Encoder
from headrace.replay import Replay
from headrace.spaces import Box, Discrete, Spec

SHORTEST = 3  # truncated episode, where environments reset within the step
EVERY = list(range(1, 1026))
SOME = sorted({1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14, *(2**k + d for k in range(2, 11) for d in (-1, 0, 1))})
SOME += random.Random(7).sample([size for size in EVERY if size not in SOME], 60 - len(SOME))


@dataclass
class Row:
    """What one step came to, or what stands in its place."""

    seen: Any
    action: int
    reward: float
    terminated: bool
    truncated: bool
    valid: bool
    after: Any  # what the step led to
    depth: int = 0  # frames of earlier rows that its stack has


class Column:
    """One environment: observations are numbers that never come again, as they are or stacked."""

    def __init__(self, rng: random.Random, number: int, same_step: bool, stack: int, zeros: bool) -> None:
        self.rng, self.same_step, self.stack, self.zeros = rng, same_step, stack, zeros
        self.next = number + 1
        self.ended, self.steps, self.shown, self.depth = False, 0, (), 0
        self.begin()

    def begin(self) -> None:
        frame = self.frame()
        self.shown = (*((0 if self.zeros else frame,) * (self.stack - 1)), frame)
        self.steps = self.depth = 0

    def frame(self) -> int:
        self.next += 64
        return self.next

    def step(self) -> Row:
        seen, depth = self.shown, self.depth
        if self.ended:
            self.begin()
            self.ended = False
            return Row(seen, 0, 0.0, False, False, False, self.shown, depth)
        self.steps += 1
        end = self.rng.random() < 0.25
        truncated = end and self.rng.random() < 0.5 and (not self.same_step or self.steps >= SHORTEST)
        after = self.shown = (*seen[1:], self.frame())
        self.depth = min(self.stack - 1, depth + 1)
        self.ended = end
        if end and self.same_step:
            self.begin()
            self.ended = False
        action, reward = self.rng.randrange(5), self.rng.randrange(-9, 10) / 4
        return Row(seen, action, reward, end and not truncated, truncated, True, after, depth)


class Naive:
    """The last rows of each environment of each lane as lists, and what n steps come to, one after the other."""

    def __init__(self, lanes: int, columns: int, size: int, n_step: int, gamma: float) -> None:
        self.size, self.n_step, self.gamma = size, n_step, gamma
        self.rows: list[list[list[Row]]] = [[[] for _ in range(columns)] for _ in range(lanes)]

    def add(self, lane: int, rows: list[list[Row]]) -> None:
        for held, new in zip(self.rows[lane], rows, strict=True):
            held += new
            del held[: max(0, len(held) - self.size)]

    def drawable(self) -> dict[Any, tuple[list[Row], int]]:
        """By what is seen there: where a row may be drawn."""
        return {
            row.seen: (held, at)
            for lane in self.rows
            for held in lane
            for at, row in enumerate(held)
            if row.valid and row.depth <= at
        }

    def outcome(self, held: list[Row], at: int) -> tuple[float, float, Any]:
        total = 0.0
        for step in range(self.n_step):
            row = held[at + step]
            total += self.gamma**step * row.reward
            if row.terminated:
                return total, 0.0, None
            last = at + step + 1 == len(held)
            if row.truncated or last or not held[at + step + 1].valid or step + 1 == self.n_step:
                return total, self.gamma ** (step + 1), row.after
        raise AssertionError


class Lane:
    """Columns that step together, and their rollouts."""

    def __init__(self, columns: list[Column], steps: int) -> None:
        self.columns, self.steps = columns, steps

    def rows(self) -> list[list[Row]]:
        made = random.Random(self.columns[0].next).choice([self.steps, self.steps, max(1, self.steps // 2)])
        return [[column.step() for _ in range(made)] for column in self.columns]

    def rollout(self, rows: list[list[Row]], observe: Any) -> Rollout:
        """Handed in early, and filled up as an actor does, where there are not so many rows."""
        made, count, same_step = len(rows[0]), len(rows), self.columns[0].same_step
        wide = self.steps

        def flag(name: str) -> torch.Tensor:
            values = torch.zeros(wide, count, dtype=torch.bool)
            values[:made] = torch.tensor([[getattr(row, name) for row in column] for column in rows]).T
            return values

        seen = [
            [row.seen for row in column] + [now.shown] * (wide + 1 - made)
            for column, now in zip(rows, self.columns, strict=True)
        ]
        number = {
            name: torch.zeros(wide, count, dtype=dtype)
            for name, dtype in (("action", torch.int64), ("reward", torch.float32))
        }
        for name, values in number.items():
            values[:made] = torch.tensor([[getattr(row, name) for row in column] for column in rows]).T
        version = torch.zeros(wide, count, dtype=torch.int32)
        version[made:] = -1
        finals, step = None, None
        if same_step:
            lines = 1 + (wide - 1) // SHORTEST
            step = torch.full((lines, count), -1, dtype=torch.int32)
            table = [[column[0].seen] * lines for column in rows]
            for place, column in enumerate(rows):
                ends = [at for at, row in enumerate(column) if row.truncated]
                for line, at in enumerate(ends):
                    step[line, place], table[place][line] = at, column[at].after
            finals = observe(np.array(table).swapaxes(0, 1))
        counts = {name: torch.zeros(count, dtype=torch.int64) for name in ("rank", "sequence", "env_steps")}
        return Rollout(
            observation=observe(np.array(seen).swapaxes(0, 1)),
            **number,
            **{name: flag(name) for name in ("terminated", "truncated", "valid")},
            version=version,
            final_observation=finals,
            final_step=step,
            environment=torch.zeros(count, dtype=torch.int32),
            **counts,
            episode_return=torch.zeros(wide, count),
            episode_length=torch.zeros(wide, count, dtype=torch.int32),
        ).check()


def plain(stack: np.ndarray) -> Any:
    return torch.from_numpy(stack[..., -1:].astype(np.float32))


def dicts(stack: np.ndarray) -> Any:
    return {"a": torch.from_numpy(stack[..., -1:]), "b": (torch.from_numpy(stack[..., -1].astype(np.int32)),)}


def stacks(stack: np.ndarray) -> Any:
    return torch.from_numpy(np.repeat(stack[..., None], 2, -1).astype(np.int32))


def keys(observation: Any) -> list[Any]:
    """What was seen, of a batch of observations; all parts of one agree."""
    if isinstance(observation, dict):
        a, (b,) = observation["a"], observation["b"]
        assert torch.equal(a[:, 0], b.long())
        return [(each,) for each in b.tolist()]
    if observation.ndim == 3:
        assert torch.equal(observation[..., 0], observation[..., 1])
        return list(map(tuple, observation[..., 0].tolist()))
    return [(int(each),) for each in observation[:, 0].tolist()]


SPACES = {
    plain: Box(np.full(1, -1e9), np.full(1, 1e9)),
    dicts: {"a": Box(np.full(1, -1e9), np.full(1, 1e9), torch.int64), "b": (Box(-1e9, 1e9, torch.int32),)},
    stacks: Box(np.full((4, 2), -1e9), np.full((4, 2), 1e9), torch.int32),
}


@dataclass
class Pair:
    """Both, given the same."""

    replay: Replay
    naive: Naive
    lanes: list[Lane]
    observe: Any
    like: Rollout
    arguments: tuple[Any, ...]

    def lose(self, lane: int) -> None:
        """A rollout that is made and comes nowhere: nothing tells that the next one goes on after it."""
        columns, stack = self.lanes[lane].columns, len(self.lanes[lane].columns[0].shown)
        self.lanes[lane].rows()
        blank = Row(None, 0, 0.0, False, False, False, None)
        # What stacks have from before is kept as rows that nothing is drawn of.
        count = stack - 1 if any(column.depth for column in columns) else 0
        if count:
            for column in columns:
                column.depth = count
        first = [] if not self.naive.rows[lane][0] else [blank]
        self.naive.add(lane, [first + [blank] * count for _ in columns])

    def add(self, lane: int) -> None:
        rows = self.lanes[lane].rows()
        self.naive.add(lane, rows)
        self.replay.add(lane, self.lanes[lane].rollout(rows, self.observe))

    def check(self, count: int) -> Any:
        """Everything drawn is what the lists say, and every row can be drawn. Returns what was drawn."""
        expected = self.naive.drawable()
        assert len(self.replay) == len(expected)
        if not expected:
            return None
        batch = self.replay.sample(count)
        columns = [batch.action.tolist(), batch.reward.tolist(), batch.discount.tolist()]
        for key, after, action, reward, discount in zip(
            keys(batch.observation), keys(batch.next_observation), *columns, strict=True
        ):
            held, at = expected[key]
            total, factor, leads = self.naive.outcome(held, at)
            assert action == held[at].action
            assert abs(reward - total) < 1e-5
            assert abs(discount - factor) < 1e-6
            assert leads is None or after == leads
        return batch


def pair(size: int, observe: Any, same_step: bool, rng: random.Random, alpha: float = 0.0) -> Pair:
    lanes, columns = rng.choice([(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)])
    stack = 4 if observe is stacks else 1
    size = max(size, stack)
    steps = rng.randint(max(1, size // 8), max(1, size // 2))
    n_step = rng.randint(1, min(5, size))
    spec = Spec(SPACES[observe], Discrete(5), SHORTEST if same_step else None, stacked=stack if stack > 1 else None)
    zeros = rng.random() < 0.5
    made = [
        Lane([Column(rng, 10 * lane + k, same_step, stack, zeros) for k in range(columns)], steps)
        for lane in range(lanes)
    ]
    twin = Column(random.Random(0), 0, same_step, stack, zeros)
    like = Lane([twin] * columns, steps)
    like = like.rollout([[Row(twin.shown, 0, 0.0, False, False, True, None)] * steps] * columns, observe)
    capacity = size * lanes * columns + rng.randrange(lanes * columns)
    arguments = (like, lanes, capacity, Sampling(0.9, n_step, alpha, 0.7), spec)
    replay = Replay(*arguments, seed=rng.randrange(99))
    naive = Naive(lanes, columns, size, n_step, 0.9)
    return Pair(replay, naive, made, observe, like, arguments)


def run(size: int, observe: Any, same_step: bool, alpha: float = 0.0) -> None:
    rng = random.Random(size * 8 + len(observe.__name__))
    both = pair(size, observe, same_step, rng, alpha)
    steps = both.lanes[0].steps
    for number in range(2 + 3 * size // steps):
        lane = rng.randrange(len(both.lanes))
        if rng.random() < 0.1:
            both.lose(lane)
        both.add(lane)
        if number % 4 == 3:
            both.check(5)
    both.check(40)


KINDS = [(observe, same_step) for observe in (plain, dicts, stacks) for same_step in (False, True)]


@pytest.mark.parametrize("kind", range(6))
def test_it_gives_what_lists_give(kind: int) -> None:
    for size in SOME[kind::6]:
        run(size, *KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(6))
def test_it_gives_what_lists_give_at_every_size(kind: int) -> None:
    for size in EVERY[(kind + 1) % 6 :: 6]:
        run(size, *KINDS[kind])


def test_priorities_are_what_lists_say() -> None:
    for size in SOME[::9]:
        prioritise(size)


@pytest.mark.slow
def test_priorities_are_what_lists_say_at_many_sizes() -> None:
    for size in EVERY[::9]:
        prioritise(size)


def prioritise(size: int) -> None:
    """Add, draw and prioritise in turn, late too; the lists have a priority for what is seen."""
    rng = random.Random(size)
    observe, same_step = KINDS[size % 6]
    both = pair(size, observe, same_step, rng, alpha=0.6)
    capacity = both.arguments[2]
    known: dict[Any, float] = {}  # of what was ever seen there: none of it comes again
    spans: list[list[float]] = [[1.0], []]  # what was told: in the span before this one, and in this
    late = 0
    batches: list[Any] = []
    for _ in range(3 + 3 * size // both.lanes[0].steps):
        both.add(rng.randrange(len(both.lanes)))
        drawable = both.naive.drawable()
        newest = max(spans[0] + spans[1])
        for key in drawable:
            known.setdefault(key, newest)
        for key in set(known) - set(drawable):
            del known[key]
        batch = both.check(16)
        if batch is None:
            continue
        chosen = [known[key] for key in keys(batch.observation)]
        assert np.allclose(batch.weight, (np.array(chosen) / min(chosen)) ** -0.7, rtol=1e-5)
        total = sum(known.values())
        # One from each of so many equal parts of the sum: the number of times is known almost exactly.
        times = Counter(keys(both.replay.sample(100).observation))
        assert all(abs(times[key] - 100 * priority / total) < 2 for key, priority in known.items())
        batches.append(batch)
        batch = batches.pop(rng.randrange(len(batches)))
        errors = [rng.choice([0.0, rng.random(), 10 * rng.random()]) for _ in range(16)]
        told = torch.tensor(errors)
        both.replay.update(batch.row, batch.generation, told)
        for key, error in zip(keys(batch.observation), told.tolist(), strict=True):
            if key in known:
                known[key] = (error + 1e-6) ** 0.6
                spans[1].append(known[key])
            else:
                late += 1
        if len(spans[1]) >= capacity:
            spans = [spans[1], []]
        assert both.replay.late == late


def test_a_state_goes_on_as_the_replay_does() -> None:
    """Through the text and tensors of a checkpoint, partly filled and gone round."""
    for size in (5, 33):
        for number, (observe, same_step) in enumerate(KINDS):
            rng = random.Random(size + number)
            both = pair(size, observe, same_step, rng, alpha=0.5 * (number % 2))
            for turn in range(1 + 2 * number):
                both.add(turn % len(both.lanes))
                if both.check(5) is not None:
                    batch = both.replay.sample(4)
                    both.replay.update(batch.row, batch.generation, torch.rand(4, generator=torch.Generator()))
            encoder = Encoder("state")
            text = json.loads(json.dumps(encoder.encode(both.replay.state())))
            tensors = {name: tensor.clone() for name, tensor in encoder.tensors.items()}
            other = Replay(*both.arguments, seed=1)
            for again in range(2):  # over what it had, too
                other.load_state(Decoder("state", dict, lambda held=tensors: held).decode(text))
                twin = replace(both, replay=other)
                if again:
                    assert_same(both, twin)
                else:
                    twin.replay.add(0, both.lanes[0].rollout(both.lanes[0].rows(), observe))


def assert_same(one: Pair, other: Pair) -> None:
    """Ten batches, and more rows and batches after them."""
    assert len(one.replay) == len(other.replay)
    assert (one.replay.added, one.replay.late) == (other.replay.added, other.replay.late)
    for turn in range(10):
        if len(one.replay):
            mine, its = one.replay.sample(8), other.replay.sample(8)
            assert all(torch.equal(a, b) for a, b in zip(mine.leaves(), its.leaves(), strict=True))
            for both in (one, other):
                both.replay.update(mine.row, mine.generation, mine.reward.abs() + turn)
        if turn > 5:
            lane = turn % len(one.lanes)
            rollout = one.lanes[lane].rollout(one.lanes[lane].rows(), one.observe)
            one.replay.add(lane, rollout)
            other.replay.add(lane, rollout)
