"""Cases: what other libraries got wrong in replay, with the numbers of their reports."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch

from headrace.data import Rollout, Sampling
from headrace.encoding import Decoder, Encoder
from headrace.envs.gymnasium import Gymnasium
from headrace.errors import ConfigError, NonFinite
from headrace.replay import Replay, Room
from headrace.replay import replay as module
from headrace.replay.room import available
from headrace.spaces import Box, Discrete, Spec
from headrace.spec_json import spec_from_json, spec_to_json

MIB = 2**20


def spec(shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32, **fields: Any) -> Spec:
    low, high = (0, 255) if dtype == torch.uint8 else (-1e9, 1e9)
    return Spec(Box(np.full(shape, low), np.full(shape, high), dtype), Discrete(2), **fields)


def rollout(
    observation: Any, reward: Any = None, terminated: Any = (), truncated: Any = (), valid: Any = None, **more: Any
) -> Rollout:
    """Of one environment, or as many as the observation [T + 1, B, ...] has. terminated, truncated: the rows where."""
    seen = observation if isinstance(observation, dict | torch.Tensor) else torch.tensor(observation)[:, None]
    rows, columns = next(iter(seen.values()) if isinstance(seen, dict) else iter([seen])).shape[:2]
    flags = {}
    for name, where in (("terminated", terminated), ("truncated", truncated)):
        flags[name] = torch.zeros(rows - 1, columns, dtype=torch.bool)
        flags[name][list(where)] = True
    gained = torch.zeros(rows - 1, columns) if reward is None else torch.tensor(reward)[:, None].float()
    real = torch.ones(rows - 1, columns, dtype=torch.bool) if valid is None else torch.tensor(valid)[:, None].bool()
    counts = {name: torch.zeros(columns, dtype=torch.int64) for name in ("rank", "sequence", "env_steps")}
    return Rollout(
        observation=seen,
        action=torch.zeros(rows - 1, columns, dtype=torch.int64),
        reward=gained,
        **flags,
        valid=real,
        version=torch.zeros(rows - 1, columns, dtype=torch.int32),
        environment=torch.zeros(columns, dtype=torch.int32),
        **counts,
        episode_return=torch.zeros(rows - 1, columns),
        episode_length=torch.zeros(rows - 1, columns, dtype=torch.int32),
        **more,
    ).check()


def items(replay: Replay, draws: int = 200) -> set[tuple[float, ...]]:
    """(observation, sum of rewards, next observation, discount) of everything that can be drawn."""
    batch = replay.sample(draws)
    parts = (batch.observation, batch.reward, batch.next_observation, batch.discount)
    return set(zip(*([round(each, 5) for each in part.flatten().tolist()] for part in parts), strict=True))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_LC_11_n_step_returns_of_one_episode(alpha: float) -> None:
    made = rollout([0.0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], terminated=[4])
    replay = Replay(made, 1, 20, Sampling(0.9, 3, alpha), spec(), 0)
    replay.add(0, made)
    assert items(replay) == {
        (0, 5.23, 3, 0.729), (1, 7.94, 4, 0.729), (2, 10.65, 5, 0), (3, 8.5, 5, 0), (4, 5.0, 5, 0)
    }  # fmt: skip


@pytest.mark.parametrize(("inserted", "first"), [(11, 3), (5, 0)])
def test_LC_13_n_step_windows_keep_clear_of_the_write_head(inserted: int, first: int) -> None:
    replay = Replay(rollout([0.0, 1]), 1, 8, Sampling(1.0, 3), spec(), 0)
    for number in range(inserted):
        replay.add(0, rollout([float(number), number + 1.0], [number]))
    batch = replay.sample(20_000)
    found = Counter(zip(batch.observation.flatten().tolist(), batch.reward.tolist(), strict=True))
    whole = {(i, 3 * i + 3) for i in range(first, inserted - 2)}
    short = {(inserted - 2, 2 * inserted - 3), (inserted - 1, inserted - 1)}  # (9, 19) and (10, 10); (3, 7) and (4, 4)
    assert found.keys() == whole | short
    assert torch.equal(batch.next_observation, (batch.observation + 3).clamp(max=inserted))
    assert (batch.discount == 1).all()


def test_LC_14_n_step_returns_end_with_a_time_limit() -> None:
    # The row after an end only resets; rows of the same two episodes where environments reset within the step.
    apart = rollout([0.0, 1, 2, 10, 11, 12], [1, 2, 0, 10, 20], truncated=[1, 4], valid=[1, 1, 0, 1, 1])
    within = rollout(
        [0.0, 1, 10, 11, 30], [1, 2, 10, 20], truncated=[1, 3],
        final_step=torch.tensor([[1], [3]], dtype=torch.int32), final_observation=torch.tensor([[2.0], [12.0]]),
    )  # fmt: skip
    for made, limit in ((apart, None), (within, 2)):
        replay = Replay(made, 1, 20, Sampling(0.5, 3), spec(shortest_truncation=limit), 0)
        replay.add(0, made)
        assert len(replay) == 4
        assert items(replay) == {(0, 2.0, 2, 0.25), (1, 2.0, 2, 0.5), (10, 20.0, 12, 0.25), (11, 20.0, 12, 0.5)}


@pytest.mark.parametrize(
    ("alpha", "beta", "shares", "weights"),
    [
        (1.0, 1.0, [0.1, 0.2, 0.3, 0.4], [1, 0.5, 0.333333, 0.25]),
        (0.6, 0.4, [0.14823, 0.224674, 0.286555, 0.340542], [1, 0.846745, 0.768229, 0.716978]),
    ],
)
def test_LC_15_importance_weights_of_four_priorities(
    alpha: float, beta: float, shares: list[float], weights: list[float]
) -> None:
    """The normaliser is the largest weight of the batch; in one that holds all four, that of the whole store, too."""
    made = rollout([0.0, 1, 2, 3, 4])
    replay = Replay(made, 1, 4, Sampling(1.0, 1, alpha), spec(), 0)
    replay.add(0, made)
    batch = replay.sample(64)
    replay.update(batch.row, batch.generation, batch.observation + 1)
    batch = replay.sample(64, beta)
    found = dict(zip(batch.observation.tolist(), batch.weight.tolist(), strict=True))
    assert [found[row] for row in range(4)] == pytest.approx(weights, rel=2e-6)
    drawn = torch.cat([replay.sample(100).observation for _ in range(1000)])
    assert torch.bincount(drawn.long()) / 100_000 == pytest.approx(shares, rel=0.01)


@pytest.mark.parametrize("mode", ["apart", "within", "stacked"])
def test_LC_20_a_truncated_step_leads_to_its_own_episode(mode: str) -> None:
    steps, episodes = 3, 10
    seen = [[10.0 * e + s for s in range(steps + 1)] for e in range(episodes)]
    limit, stacked = (3, None) if mode == "within" else (None, 2 if mode == "stacked" else None)
    replay, added = None, 0
    for shown, after in itertools.pairwise([*seen, [900.0]]):
        numbers = [*(shown[:steps] if limit else shown), after[0]]
        stack = [[a if a in (shown[0], after[0]) else b, a] for a, b in zip(numbers, [0.0, *numbers], strict=False)]
        final = {}
        if limit:
            final = {"final_step": torch.tensor([[2]], dtype=torch.int32)}
            final["final_observation"] = torch.tensor([[shown[-1]]])
        made = rollout(stack if stacked else numbers, None, [], [2], None if limit else [1, 1, 1, 0], **final)
        if replay is None:
            shape = (2,) if stacked else ()
            replay = Replay(made, 1, 60, Sampling(0.97, 1), spec(shape, shortest_truncation=limit, stacked=stacked), 0)
        replay.add(0, made)
        added += steps
    assert replay is not None
    assert len(replay) == replay.added == added == 30
    batch = replay.sample(1000)
    now, then = batch.observation, batch.next_observation
    if stacked:
        assert torch.equal(now[:, 1], then[:, 0])
        now, then = now[:, 1], then[:, 1]
    assert set(now.tolist()) == {10.0 * e + s for e in range(episodes) for s in range(steps)}
    assert torch.equal(then, now + 1)  # 10 · e + 3 after the last step
    assert torch.allclose(batch.discount, torch.tensor(0.97))


ATARI = (4, 84, 84)


def pictures(rows: int, columns: int = 1) -> Rollout:
    return rollout(torch.zeros(rows + 1, columns, *ATARI, dtype=torch.uint8))


def test_MG_01_more_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{2 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{300 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 * MIB}\n")
    left = 2 * 2**30 - 200 * MIB
    assert available(tmp_path, tmp_path / "none") == min(left, psutil.virtual_memory().available)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "memory.max").write_text("max\n")
    (tmp_path / "own").write_text("0::/inner\n")
    assert available(tmp_path, tmp_path / "own") == min(left, psutil.virtual_memory().available)
    monkeypatch.setattr(module, "available", lambda: left)
    given = (pictures(4), 1, 1_000_000, Sampling(), spec(ATARI, torch.uint8))
    needed = Replay.needed(*given)
    assert needed >= 1_000_000 * 84 * 84 * 4
    with pytest.raises(ConfigError, match=f"buffer_size=1,000,000 needs {needed:,} bytes .*{left:,} .*Spec.stacked"):
        Replay(*given, seed=0)
    assert Replay.room(*given) == Room(needed, left)
    near = int(1_000_000 * 0.95 * left / needed)
    room = Replay.room(*given[:2], near, *given[3:])
    assert room.fits
    assert room.tight
    assert not Replay.room(*given[:2], near // 2, *given[3:]).tight


@pytest.mark.parametrize("capacity", [1, 7, 64, 1000, 4097])
def test_MG_01_what_is_needed_is_what_is_taken(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    given = (rollout([0.0, 1]), 1, capacity, Sampling(alpha=0.5, n_step=1), spec())
    needed = Replay.needed(*given)
    replay = Replay(*given, seed=0)
    assert needed == replay.nbytes
    assert needed - 64 * len(replay.layout.arrays) < sum(held.nbytes for held in replay._rows.arrays.values()) <= needed
    monkeypatch.setattr(module, "available", lambda: needed)
    Replay(*given, seed=0)
    monkeypatch.setattr(module, "available", lambda: needed - 1)
    with pytest.raises(ConfigError, match="are available"):
        Replay(*given, seed=0)


@pytest.mark.slow
def test_MG_01_memory_of_a_full_replay_is_what_was_announced() -> None:
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    replay = Replay(pictures(64), 1, 10_000, Sampling(alpha=0.6), spec(ATARI, torch.uint8), 0)
    made = pictures(64)
    made.observation.fill_(3)
    for _ in range(160):
        replay.add(0, made)
    taken = process.memory_info().rss - before
    assert replay.nbytes * 0.9 <= taken <= replay.nbytes * 1.05 + 200 * MIB


def test_MG_02_observations_keep_their_dtype() -> None:
    needed = Replay.needed(pictures(4), 1, 100_000, Sampling(alpha=0.6), spec(ATARI, torch.uint8))
    assert needed <= 5383.3 * MIB / 2 * 1.05  # the next observation is not stored again
    spaces = {
        name: Box(np.zeros(3), np.ones(3), dtype)
        for name, dtype in (("a", torch.uint8), ("b", torch.float16), ("c", torch.float64), ("d", torch.int16))
    }
    seen = {name: torch.ones(3, 1, 3, dtype=space.dtype) for name, space in spaces.items()}
    replay = Replay(rollout(seen), 1, 9, Sampling(), Spec(spaces, Discrete(2)), 0)
    replay.add(0, rollout(seen))
    assert [held.dtype.name for held in replay._rows.observation] == ["uint8", "float16", "float64", "int16"]
    batch = replay.sample(2)
    for tree in (batch.observation, batch.next_observation):
        assert {name: leaf.dtype for name, leaf in tree.items()} == {name: box.dtype for name, box in spaces.items()}


@pytest.mark.parametrize("columns", [1, 8])
def test_MG_03_a_frame_is_stored_once(columns: int) -> None:
    given = (pictures(4, columns), 1, 100_000, Sampling(alpha=0.6), spec(ATARI, torch.uint8, stacked=4))
    assert Replay.needed(*given) <= 672.9 * MIB * 1.25


@pytest.mark.slow
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("columns", [1, 8])
def test_MG_03_stacks_are_built_again_as_they_were(columns: int, zeros: bool) -> None:
    """10,000 of them, of episodes of 7 steps, while the ring goes round three times."""
    rng = np.random.default_rng(0)
    steps = 5
    replay = Replay(
        pictures(steps, columns), 1, 300 * columns, Sampling(n_step=3), spec(ATARI, torch.uint8, stacked=4), 0
    )
    ages = np.arange(columns) % 8  # rows since the episode began; the eighth only resets
    stack = np.zeros((columns, *ATARI), np.uint8)
    known: dict[bytes, Any] = {}  # by the newest frame, and how much of the stack is that of rows

    def show() -> None:
        frame = rng.integers(1, 255, (columns, 84, 84)).astype(np.uint8)
        begins = ages == 0
        stack[:] = np.concatenate([stack[:, 1:], frame[:, None]], 1)
        stack[begins] = 0 if zeros else frame[begins, None]
        stack[:, -1] = frame

    ages[:] = 0
    show()
    compared = 0
    while compared < 10_000:
        seen, valid, truncated = [stack.copy()], [], []
        for _ in range(steps):
            valid.append(ages < 7)
            truncated.append(ages == 6)
            ages[:] = (ages + 1) % 8
            if replay.added == 0 and len(valid) == 1:
                ages[:] = np.minimum(7, 1 + np.arange(columns) % 6)  # from now on not all begin at once
            show()
            seen.append(stack.copy())
        made = rollout(torch.from_numpy(np.stack(seen)))
        made.valid.copy_(torch.from_numpy(np.stack(valid)))
        made.truncated.copy_(torch.from_numpy(np.stack(truncated)))
        replay.add(0, made)
        known |= {each[-1].tobytes(): each for row in seen for each in row}
        if replay.added < 100 * columns:
            continue
        batch = replay.sample(100)
        for tensor in (batch.observation, batch.next_observation):
            for each in tensor.numpy():
                assert np.array_equal(each, known[each[-1].tobytes()])
                compared += 1


def test_CR_02_a_restored_replay_draws_the_same_batches() -> None:
    """50,000 rows, in the form that a checkpoint holds them in."""
    rng = np.random.default_rng(0)
    seen = torch.from_numpy(rng.standard_normal((1001, 4, 4), np.float32))
    seen[-1] = seen[0]
    arguments = (rollout(seen), 1, 50_000, Sampling(n_step=3, alpha=0.6, beta=0.4), spec((4,)))
    replay, other = Replay(*arguments, seed=1), Replay(*arguments, seed=2)
    for _ in range(17):
        replay.add(0, rollout(seen))
        batch = replay.sample(256)
        replay.update(batch.row, batch.generation, batch.observation[:, 0].abs())
    encoder = Encoder("state")
    text = encoder.encode(replay.state())
    other.load_state(Decoder("state", dict, lambda: encoder.tensors).decode(text))
    assert len(other) == len(replay) == 50_000
    for name, held in replay._rows.arrays.items():
        assert np.array_equal(other._rows.arrays[name], held), name
    for _ in range(10):
        mine, its = replay.sample(64), other.sample(64)
        assert all(torch.equal(a, b) for a, b in zip(mine.leaves(), its.leaves(), strict=True))


def test_what_cannot_be_is_refused() -> None:
    made = rollout([0.0, 1, 2, 3])
    with pytest.raises(ConfigError, match=r"buffer_size=5 is 2 rows for each of 2 .* Give at least 6"):
        Replay(made, 2, 5, Sampling(), spec(), 0)
    with pytest.raises(ConfigError, match="n_step=7 need 7 for each"):
        Replay(made, 1, 6, Sampling(n_step=7), spec(), 0)
    replay = Replay(made, 1, 6, Sampling(alpha=0.6), spec(), 0)
    with pytest.raises(ConfigError, match="no row to draw yet"):
        replay.sample(3)
    replay.add(0, made)
    batch = replay.sample(3)
    for wrong, error in ((-0.5, ConfigError), (float("nan"), NonFinite), (float("inf"), NonFinite)):
        told = torch.tensor([1.0, wrong, 1.0])
        with pytest.raises(error, match=rf"row {batch.row[1]} \(number 1 of the batch\) is {wrong}"):
            replay.update(batch.row, batch.generation, told)
    with pytest.raises(ConfigError, match=r"for priority0 it has \[\[7\], .*, and None"):
        Replay(made, 1, 6, Sampling(), spec(), 0).load_state(replay.state())


def test_what_is_no_stack_of_frames_is_refused() -> None:
    good = torch.tensor([[1.0, 1], [1, 2], [2, 3], [4, 4], [4, 5]])[:, None]
    for place, value, text in (((2, 0, 0), 9.0, "not the one before"), ((3, 0, 0), 9.0, "neither copies")):
        made = rollout(good.clone(), truncated=[1], valid=[1, 1, 0, 1])
        replay = Replay(made, 1, 9, Sampling(), spec((2,), stacked=2), 0)
        replay.add(0, made)
        made.observation[place] = value
        with pytest.raises(ConfigError, match=text):
            Replay(made, 1, 9, Sampling(), spec((2,), stacked=2), 0).add(0, made)


def test_sequences_begin_where_rollouts_did() -> None:
    """With what the policy remembered there, while the ring goes round."""
    steps, columns, lanes = 4, 2, 2
    at = [0] * lanes

    def make(lane: int) -> Rollout:
        rows = torch.arange(at[lane], at[lane] + steps + 1)[:, None] + torch.tensor([1000, 5000]) + 10_000 * lane
        at[lane] += steps
        made = rollout(rows.float(), memory=rows[0, :, None] * torch.ones(1, 3))
        made.reward.copy_(rows[:-1])
        return made

    like = rollout(torch.zeros(steps + 1, columns), memory=torch.zeros(columns, 3))
    replay = Replay(like, lanes, 11 * lanes * columns, Sampling(), spec(), 0)
    replay.add(0, make(0))
    with pytest.raises(ConfigError, match=r"sequences\(length=6\): no rollout began"):
        replay.sequences(1, 6)
    for turn in range(9):
        replay.add(turn % 2, make(turn % 2))
    drawn = replay.sequences(200, 6).check()
    first = drawn.observation[0]
    expected = {
        begin + column + 10_000 * lane
        for lane, column in itertools.product(range(lanes), (1000, 5000))
        for begin in range(at[lane] - 8, at[lane] - 5, 4)
    }
    assert set(first.int().tolist()) == expected
    assert torch.equal(drawn.observation, first + torch.arange(7)[:, None])
    assert torch.equal(drawn.reward, drawn.observation[:-1])
    assert torch.equal(drawn.memory, first[:, None] * torch.ones(1, 3))
    assert drawn.valid.all()


def test_stacks_of_gymnasium_are_known_as_such() -> None:
    def stack(**fields: Any) -> Any:
        wrapped = partial(gymnasium.wrappers.FrameStackObservation, stack_size=3, **fields)
        return Gymnasium("CartPole-v1", wrappers=[wrapped]).spec

    assert (stack().stacked, stack(padding_type="zero").stacked) == (3, 3)
    assert stack(padding_type=np.full(4, 0.1, np.float32)).stacked is None
    assert Gymnasium("CartPole-v1").spec.stacked is None
    spec = stack()
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
    with pytest.raises(ConfigError, match=r"Spec\(stacked=2\): expected as observation a Box whose first axis"):
        replace(spec, stacked=2)
    with pytest.raises(ConfigError, match=r"Spec\(stacked=0\)"):
        replace(spec, stacked=0)


def test_a_priority_of_a_row_that_has_lost_a_frame_is_late() -> None:
    replay = None
    for row in range(6):
        made = rollout([[float(max(0, row - 1)), row], [row, row + 1.0]])
        replay = replay or Replay(made, 1, 5, Sampling(alpha=0.5), spec((2,), stacked=2), 0)
        if row == 5:  # row 0 is written over, and with it the older frame of row 1
            batch = replay.sample(50)
        replay.add(0, made)
    lost = batch.observation[:, 1] <= 1
    assert set(batch.observation[lost, 1].tolist()) == {0, 1}
    replay.update(batch.row, batch.generation, torch.full((50,), 9.0))
    assert replay.late == int(lost.sum())
    assert len(replay) == 4
    assert set(replay.sample(50).observation[:, 1].tolist()) == {2, 3, 4, 5}
