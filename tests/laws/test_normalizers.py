"""Laws of running statistics: cut as you like, moved by whom you like, they are those of all the data at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.errors import ShapeError
from headrace.normalizers import CLIP, Moments, ObservationNormalizer, RewardNormalizer
from headrace.targets import discounted_return

seeds = st.integers(0, 2**32 - 1)
cuts = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def alone(vector: Tensor, weight: Tensor | float) -> Tensor:
    return vector


def together(workers: int) -> Callable[[int], Callable[[Tensor, Tensor | float], Tensor]]:
    """A mean over so many threads, summed in the order of their ranks."""
    barrier = threading.Barrier(workers, timeout=30)
    given: list[Tensor] = [torch.empty(0)] * workers

    def of(rank: int) -> Callable[[Tensor, Tensor | float], Tensor]:
        def mean(vector: Tensor, weight: Tensor | float) -> Tensor:
            given[rank] = vector
            barrier.wait()
            result = sum(given[1:], given[0]) / workers
            barrier.wait()
            return result

        return mean

    return of


def parts_of(rng: np.random.Generator, sizes: list[int], offset: float, spread: float) -> list[tuple[Any, Any]]:
    """Batches of vectors [R, 3] and their weights, of which some are 0 and belong to rows that hold anything."""
    found = []
    for size in sizes:
        x = rng.normal(offset, spread, (size, 3))
        weight = (rng.random(size) < 0.8).astype(np.float32) * 2
        x[weight == 0] = np.nan
        found.append((x, weight))
    return found


@given(seeds, cuts, st.sampled_from([(0, 1), (1e6, 1), (-1e8, 1e-1), (3, 0)]))
def test_merged_moments_are_those_of_all_the_data(seed: int, sizes: list[int], kind: tuple[float, float]) -> None:
    batches = parts_of(np.random.default_rng(seed), sizes, *kind)
    moments = Moments(3)
    for x, weight in batches:
        moments.move(torch.from_numpy(x), torch.from_numpy(weight), alone)
    whole = np.concatenate([x[weight > 0] for x, weight in batches]).astype(np.longdouble)
    assert float(moments.count) == len(whole)
    if len(whole):
        np.testing.assert_allclose(moments.mean.numpy(), whole.mean(0).astype(float), rtol=1e-12)
        np.testing.assert_allclose(moments.variance.numpy(), whole.var(0).astype(float), rtol=1e-6, atol=1e-12)
    else:
        assert not moments.mean.any()
        assert not moments.variance.any()


def test_sums_of_squares_would_have_cancelled() -> None:
    """The law above can fail: what a running sum of squares makes of N(10⁸, 0.1)."""
    x = np.random.default_rng(0).normal(-1e8, 0.1, 1000)
    naive = (x**2).mean() - x.mean() ** 2
    assert abs(naive - x.var()) > 0.5 * x.var()


@settings(max_examples=15)
@given(seeds, st.integers(2, 3), st.sampled_from([(0.0, 1.0), (1e6, 1.0)]))
def test_several_learners_move_as_one_with_all_their_data(seed: int, workers: int, kind: tuple[float, float]) -> None:
    rng = np.random.default_rng(seed)
    rounds = [parts_of(rng, [int(rng.integers(0, 20)) for _ in range(workers)], *kind) for _ in range(3)]
    every, mean = [Moments(3) for _ in range(workers)], together(workers)

    def work(rank: int) -> None:
        for batches in rounds:
            x, weight = batches[rank]
            every[rank].move(torch.from_numpy(x), torch.from_numpy(weight), mean(rank))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    whole = np.concatenate([x[weight > 0] for batches in rounds for x, weight in batches])
    for moments in every:
        assert all(map(torch.equal, moments.buffers(), every[0].buffers()))
        assert float(moments.count) * workers == pytest.approx(len(whole))
        if len(whole):
            np.testing.assert_allclose(moments.mean, whole.mean(0), rtol=1e-12)
            np.testing.assert_allclose(moments.variance, whole.var(0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_observation_normalizer_is_the_identity_until_it_knows_something(dtype: torch.dtype) -> None:
    normalizer = ObservationNormalizer(torch.tensor([True, False, True]), dtype)
    x = torch.tensor([[1e3, -7.0, 0.5], [-1e6, 1e6, 0.0]], dtype=dtype)
    assert torch.equal(normalizer(x), x.float())
    normalizer.move(x, torch.zeros(2), alone)  # no row counts
    assert torch.equal(normalizer(x), x.float())
    rng = np.random.default_rng(1)
    seen = torch.from_numpy(rng.normal([1e4, 5, -3], [2, 1, 0.1], (4, 500, 3))).to(dtype)
    normalizer.move(seen, torch.ones(4, 500), alone)
    held = seen.double().numpy().reshape(-1, 3)
    expected = (held - held.mean(0)) / np.sqrt(held.var(0) + 1e-8)
    expected[:, 1] = held[:, 1]
    found = normalizer(seen)
    assert found.dtype == torch.float32
    # 1e4 in float32 has steps of 1e-3.
    np.testing.assert_allclose(found.reshape(-1, 3), expected, atol=2e-3 if dtype == torch.float32 else 1e-5)
    far = normalizer(torch.tensor([[1e9, 1e9, -1e9]], dtype=dtype))
    assert far.tolist() == [[CLIP, 1e9, -CLIP]]
    assert normalizer(torch.full((1, 3), torch.nan, dtype=dtype)).isnan().all()  # is not made a number of


def test_rewards_are_divided_by_the_spread_of_returns_and_keep_their_sign() -> None:
    normalizer = RewardNormalizer()
    reward = torch.tensor([[3.0, -4.0], [20.0, 0.0]])
    assert normalizer(reward).tolist() == [[3, -4], [10, 0]]
    returns = torch.tensor([[1.0, 5.0], [3.0, 100.0]], dtype=torch.float64)
    normalizer.move(returns, torch.tensor([[1.0, 1.0], [1.0, 0.0]]), alone)
    deviation = np.sqrt(np.var([1, 5, 3]) + 1e-8)
    np.testing.assert_allclose(normalizer(reward), [[3 / deviation, -4 / deviation], [10, 0]], rtol=1e-6)


@given(seeds, st.integers(1, 30), st.sampled_from([0.0, 0.9, 0.99, 1.0]), st.booleans())
def test_discounted_returns_are_those_of_a_loop_and_split_rollouts_make_no_difference(
    seed: int, steps: int, gamma: float, same_step: bool
) -> None:
    rng = np.random.default_rng(seed)
    reward, ended = rng.normal(size=(steps, 2)).astype(np.float32), rng.random((steps, 2)) < 0.2
    valid = np.ones((steps, 2), bool)
    if not same_step:  # the row after an end only resets
        for t in range(1, steps):
            ended[t] &= ~ended[t - 1]
        valid[1:] = ~ended[:-1]
        reward[~valid] = 0
    before = rng.normal(size=2)
    expected, running = np.zeros((steps, 2)), before.copy()
    for t in range(steps):
        for b in range(2):
            running[b] = expected[t, b] = gamma * running[b] + float(reward[t, b])
            if ended[t, b]:
                running[b] = 0.0
    given = [torch.from_numpy(held) for held in (reward, before, ended)]
    found = discounted_return(*given, gamma)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert not found[torch.from_numpy(~valid)].any()
    cut = int(rng.integers(0, steps))
    if cut:
        between = torch.from_numpy(np.where(ended[cut - 1], 0.0, expected[cut - 1]))
        rest = discounted_return(given[0][cut:], between, given[2][cut:], gamma)
        torch.testing.assert_close(rest, found[cut:], rtol=1e-12, atol=1e-12)
    assert torch.equal(given[0], torch.from_numpy(reward))  # what it was given is left alone


def test_discounted_returns_of_other_shapes_are_refused() -> None:
    reward, ended = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bool)
    with pytest.raises(ShapeError, match=r"expected reward \[T, B\]"):
        discounted_return(reward[0], torch.zeros(2), ended, 0.9)
    with pytest.raises(ShapeError, match=r"expected before \[2\], given float32 \[3\]"):
        discounted_return(reward, torch.zeros(3), ended, 0.9)
    with pytest.raises(ShapeError, match=r"expected ended bool \[3, 2\]"):
        discounted_return(reward, torch.zeros(2), ended.float(), 0.9)
