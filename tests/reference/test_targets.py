"""Targets against slow loops over whole episodes, and the cases of other libraries' users, by their ids.

The references never look at a whole stream: they cut it into episodes first and sum over each by the definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ConfigError, ShapeError
from headrace.targets import gae, next_value, standardized, vtrace

Array = NDArray[np.float64]

SHAPES = [(1, 1), (2, 3), (3, 1), (7, 2), (8, 4), (33, 3), (128, 5)]


class Stream(NamedTuple):
    """Random steps, as next-step auto-reset gives them: the row after an end is a reset row."""

    reward: Array
    value: Array  # [T+1, B]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    log_ratio: Array


def stream(seed: int, rows: int, columns: int, resets: bool = True, ends: float = 0.25) -> Stream:
    rng = np.random.default_rng((seed, rows, columns))
    terminated, truncated = rng.random((2, rows, columns)) < ends / 2
    valid = np.ones((rows, columns), bool)
    if resets:
        valid[0] = rng.random(columns) < 0.5
        for t in range(rows):
            terminated[t] &= valid[t]
            truncated[t] &= valid[t]
            if t + 1 < rows:
                valid[t + 1] = ~(terminated[t] | truncated[t])
    reward, log_ratio = rng.normal(size=(2, rows, columns))
    return Stream(reward, rng.normal(size=(rows + 1, columns)), terminated, truncated, valid, log_ratio)


class Episode(NamedTuple):
    """Consecutive steps of one environment up to an end or the cut, and the value of what follows."""

    column: int
    rows: list[int]
    tail: float


def episodes(s: Stream, final: dict[tuple[int, int], float] | None = None) -> Iterator[Episode]:
    """final: the values of final observations, where they are not in the stream."""
    rows, columns = s.reward.shape
    for b in range(columns):
        steps: list[int] = []
        for t in range(rows):
            if not s.valid[t, b]:
                assert not steps
                continue
            steps.append(t)
            if s.terminated[t, b]:
                yield Episode(b, steps, 0.0)
            elif s.truncated[t, b]:
                yield Episode(b, steps, s.value[t + 1, b] if final is None else final[t, b])
            elif t == rows - 1:
                yield Episode(b, steps, s.value[rows, b])
            else:
                continue
            steps = []


def slow_gae(s: Stream, found: Iterator[Episode], gamma: float, lam: float) -> Array:
    advantage = np.zeros_like(s.reward)
    for b, rows, tail in found:
        values = [s.value[t, b] for t in rows] + [tail]
        delta = [s.reward[t, b] + gamma * values[i + 1] - values[i] for i, t in enumerate(rows)]
        for i, t in enumerate(rows):
            advantage[t, b] = sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
    return advantage


def slow_vtrace(
    s: Stream, found: Iterator[Episode], gamma: float, rho_bar: float, c_bar: float, lam: float
) -> tuple[Array, Array]:
    target, advantage = s.value[:-1].copy(), np.zeros_like(s.reward)
    for b, rows, tail in found:
        ratio = [float(np.exp(s.log_ratio[t, b])) for t in rows]
        rho, c = [min(rho_bar, x) for x in ratio], [lam * min(c_bar, x) for x in ratio]
        values = [s.value[t, b] for t in rows] + [tail]
        delta = [rho[i] * (s.reward[t, b] + gamma * values[i + 1] - values[i]) for i, t in enumerate(rows)]
        count = len(rows)
        corrected = [
            values[i] + sum(gamma ** (j - i) * float(np.prod(c[i:j])) * delta[j] for j in range(i, count))
            for i in range(count)
        ] + [tail]
        for i, t in enumerate(rows):
            target[t, b] = corrected[i]
            advantage[t, b] = rho[i] * (s.reward[t, b] + gamma * corrected[i + 1] - values[i])
    return target, advantage


def tensors(s: Stream, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """All arguments that the targets share, of a stream with its final observations inside."""
    value, terminated = torch.tensor(s.value, dtype=dtype), torch.tensor(s.terminated)
    return {
        "reward": torch.tensor(s.reward, dtype=dtype),
        "value": value[:-1],
        "next_value": next_value(value, terminated),
        "ended": terminated | torch.tensor(s.truncated),
        "valid": torch.tensor(s.valid),
    }


def close(given: Tensor, expected: Array, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(given.numpy(), expected, rtol=tolerance, atol=tolerance)


# References -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 0.0), (0.97, 1.0), (1.0, 1.0), (0.0, 0.5)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gae_equals_explicit_sums_over_episodes(shape: tuple[int, int], gamma: float, lam: float) -> None:
    s = stream(1, *shape)
    expected = slow_gae(s, episodes(s), gamma, lam)
    close(gae(**tensors(s), gamma=gamma, gae_lambda=lam), expected)
    single = gae(**tensors(s, torch.float32), gamma=gamma, gae_lambda=lam)
    assert single.dtype is torch.float32
    close(single, expected, 2e-5)


@pytest.mark.parametrize(
    ("rho_bar", "c_bar", "lam"), [(1.0, 1.0, 1.0), (2.0, 0.7, 0.9), (0.5, 0.5, 0.0), (9.0, 1.5, 1.0)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_vtrace_equals_explicit_products_over_episodes(
    shape: tuple[int, int], rho_bar: float, c_bar: float, lam: float
) -> None:
    s = stream(2, *shape)
    target, advantage = slow_vtrace(s, episodes(s), 0.97, rho_bar, c_bar, lam)
    ratio = torch.tensor(s.log_ratio)
    given = vtrace(ratio, **tensors(s), gamma=0.97, rho_bar=rho_bar, c_bar=c_bar, lambda_=lam)
    # Products of ratios up to 1.5 grow with the length, and rounding with them.
    scale = max(1.0, float(np.abs(target).max()))
    close(given.target / scale, target / scale)
    close(given.advantage / scale, advantage / scale)
    single = vtrace(ratio.float(), **tensors(s, torch.float32), gamma=0.97, rho_bar=rho_bar, c_bar=c_bar, lambda_=lam)
    assert single.target.dtype is single.advantage.dtype is torch.float32
    close(single.target / scale, target / scale, 2e-5)
    close(single.advantage / scale, advantage / scale, 2e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_next_value_is_zero_after_a_termination_and_the_next_row_elsewhere(shape: tuple[int, int]) -> None:
    s = stream(3, *shape)
    expected = s.value[1:].copy()
    for t, b in np.ndindex(shape):
        if s.terminated[t, b]:
            expected[t, b] = 0
    close(next_value(torch.tensor(s.value), torch.tensor(s.terminated)), expected, 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_step_reset_takes_the_values_of_its_table(shape: tuple[int, int]) -> None:
    """Without reset rows: the row after an end is a step of the next episode."""
    s = stream(4, *shape, resets=False)
    ended = s.terminated | s.truncated
    index = np.argwhere(ended)
    values = np.random.default_rng(4).normal(size=len(index))
    final = {(int(t), int(b)): float(v) for (t, b), v in zip(index, values, strict=True)}
    order = np.random.default_rng(5).permutation(len(index))  # of no importance
    after = next_value(
        torch.tensor(s.value), torch.tensor(s.terminated), torch.tensor(values[order]), torch.tensor(index[order])
    )
    arguments = tensors(s) | {"next_value": after}
    close(gae(**arguments, gamma=0.9, gae_lambda=0.8), slow_gae(s, episodes(s, final), 0.9, 0.8))
    target, advantage = slow_vtrace(s, episodes(s, final), 0.9, 1.0, 1.0, 0.8)
    given = vtrace(torch.tensor(s.log_ratio), **arguments, gamma=0.9, lambda_=0.8)
    close(given.target, target)
    close(given.advantage, advantage)


@pytest.mark.parametrize("kind", ["ones", "zeros and ones", "real", "bool"])
@pytest.mark.parametrize("shape", [(512,), (2, 3), (7, 11)], ids=str)
def test_standardized_equals_two_plain_passes(shape: tuple[int, ...], kind: str) -> None:
    rng = np.random.default_rng(6)
    values = rng.normal(3, 5, shape)
    weight = {"ones": np.ones(shape), "real": rng.random(shape)}.get(kind, (rng.random(shape) < 0.7).astype(float))
    total = mean = variance = 0.0
    for w, x in zip(weight.flat, values.flat, strict=True):
        total += w
        mean += w * x
    mean /= total
    for w, x in zip(weight.flat, values.flat, strict=True):
        variance += w * (x - mean) ** 2 / total
    expected = np.where(weight != 0, (values - mean) / variance**0.5, 0)
    given = torch.tensor(weight) if kind != "bool" else torch.tensor(weight).bool()
    close(standardized(torch.tensor(values), given, alone), expected)
    single = standardized(torch.tensor(values).float(), given, alone)
    assert single.dtype is torch.float32
    close(single, expected, 1e-5)


# Cases ----------------------------------------------------------------------------------------------------------------


def alone(vector: Tensor, weight: float) -> Tensor:
    """The mean over the workers where there is one."""
    return vector


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers).unsqueeze(1)


def flags(*numbers: int) -> Tensor:
    return torch.tensor(numbers).bool().unsqueeze(1)


def advantage(
    reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    after = next_value(value, terminated)
    return gae(reward, value[:-1], after, terminated | truncated, torch.ones_like(terminated), gamma, gae_lambda)


def near(given: Tensor, *expected: float) -> None:
    assert given.squeeze(1).tolist() == pytest.approx(expected, abs=1e-5)


def test_LC_01_a_truncated_episode_bootstraps_from_its_final_observation_a_terminated_one_does_not() -> None:
    reward, value = column(1, 1, 1), column(0.5, 1.0, 1.5, 2.0)
    end, never = flags(0, 0, 1), flags(0, 0, 0)
    given = advantage(reward, value, never, end, 0.9, 0.8)
    near(given, 3.04592, 2.286, 1.3)
    near(given + value[:-1], 3.54592, 3.286, 2.8)
    given = advantage(reward, value, end, never, 0.9, 0.8)
    near(given, 2.1128, 0.99, -0.5)
    near(given + value[:-1], 2.6128, 1.99, 1.0)


def test_LC_03_no_sum_runs_over_the_end_of_an_episode() -> None:
    reward, value, never = column(1, 2, 3, 4), column(0.5, 0.6, 0.7, 0.8, 0.9), flags(0, 0, 0, 0)
    given = advantage(reward, value, flags(0, 1, 0, 0), never, 0.99, 0.95)
    near(given, 2.4107, 1.4, 6.939585, 4.091)
    first = advantage(reward[:2], value[:3], flags(0, 1), never[:2], 0.99, 0.95)
    second = advantage(reward[2:], value[2:], never[2:], never[2:], 0.99, 0.95)
    assert torch.equal(given, torch.cat([first, second]))


def test_LC_05_the_step_before_the_last_one_bootstraps_when_lambda_is_0() -> None:
    reward, value, end = column(0, 1, 0, 1), column(0.3, 0.8, 0.3, 0.8, 0.3), flags(0, 1, 0, 1)
    never = torch.zeros_like(end)
    near(advantage(reward, value, end, never, 0.9, 0.0) + value[:-1], 0.72, 1.0, 0.72, 1.0)
    two = (torch.cat([x[:2], x[2:4]], 1) for x in (reward, end, never))
    reward, end, never = two
    value = torch.tensor([[0.3, 0.3], [0.8, 0.8], [7.0, 7.0]])
    given = advantage(reward, value, end, never, 0.9, 0.0) + value[:-1]
    torch.testing.assert_close(given, torch.tensor([[0.72, 0.72], [1.0, 1.0]]))


def test_LC_10_the_last_step_of_a_rollout_has_its_advantage() -> None:
    reward, never = torch.ones(8, 4), torch.zeros(8, 4, dtype=torch.bool)
    given = advantage(reward, torch.zeros(9, 4), never, never, 0.5, 0.0)
    assert torch.equal(given, torch.ones(8, 4))
    assert reward.sum() == 32


def test_LC_48_one_element_or_equal_ones_come_out_0_and_the_deviation_is_the_populations() -> None:
    given = standardized(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4), alone)
    assert given.tolist() == pytest.approx([-1.341641, -0.447214, 0.447214, 1.341641], abs=1e-6)
    for number in (0.0, 0.1, -3.7, 1e-30, 1e30):
        for count in (1, 2, 3, 64, 1000):
            for dtype in (torch.float32, torch.float64):
                equal = torch.full((count,), number, dtype=dtype)
                for weight in (torch.ones(count), torch.full((count,), 0.3), torch.eye(count)[-1]):
                    assert torch.equal(standardized(equal, weight, alone), torch.zeros_like(equal))
    sample = torch.randn(65, generator=torch.Generator().manual_seed(0))
    for minibatch in sample.split(64):
        assert standardized(minibatch, torch.ones_like(minibatch), alone).isfinite().all()
    assert standardized(torch.empty(0), torch.empty(0), alone).shape == (0,)


@pytest.mark.parametrize("wrong", ["[3]", "[3, 1, 1]", "[1, 2]", "[2, 3]"])
@pytest.mark.parametrize("name", ["log_ratio", "value", "next_value", "ended", "valid"])
def test_LC_49_nothing_is_broadcast_and_the_error_names_both_shapes(name: str, wrong: str) -> None:
    bad = torch.zeros([int(size) for size in re.findall(r"\d", wrong)])
    arguments = {key: torch.zeros(3, 2) for key in ("log_ratio", "reward", "value", "next_value")}
    arguments |= {key: torch.zeros(3, 2).bool() for key in ("ended", "valid")}
    arguments[name] = bad.bool() if name in ("ended", "valid") else bad
    message = re.escape(f"expected {name} ") + "(bool )?" + re.escape("[3, 2], given ") + r"\w+ " + re.escape(wrong)
    with pytest.raises(ShapeError, match=f"^vtrace: {message}"):
        vtrace(**arguments, gamma=0.9)
    if arguments.pop("log_ratio").shape == (3, 2):
        with pytest.raises(ShapeError, match=f"^gae: {message}"):
            gae(**arguments, gamma=0.9, gae_lambda=0.9)


def test_LC_49_a_critic_of_three_shapes_never_makes_a_matrix_of_targets() -> None:
    reward, end = column(1, 2, 3), flags(0, 0, 1)
    for critic in (torch.zeros(4), torch.zeros(4, 1, 1)):
        with pytest.raises(ShapeError, match=r"expected value \[T\+1, B\], given \[4(, 1, 1)?\]"):
            next_value(critic, end)
    for wrong in (torch.zeros(3), torch.zeros(3, 1, 1), torch.zeros(1, 3)):
        shape = re.escape(str(list(wrong.shape)))
        with pytest.raises(ShapeError, match=rf"^gae: expected value \[3, 1\], given float32 {shape}"):
            gae(reward, wrong, torch.zeros(3, 1), end, ~end, 0.9, 0.9)
        with pytest.raises(ShapeError, match=rf"^standardized: expected weight \[3, 1\], given float32 {shape}"):
            standardized(reward, wrong, alone)


def test_LC_55_returns_stop_at_the_end_of_an_episode() -> None:
    reward, end, zero = column(1, 1, 1, 2, 2), flags(0, 0, 1, 0, 1), torch.zeros(6, 1)
    near(advantage(reward, zero, end, torch.zeros_like(end), 0.5, 1.0), 1.75, 1.5, 1, 3, 2)
    both = vtrace(zero[1:], reward, zero[1:], next_value(zero, end), end, torch.ones_like(end), 0.5)
    near(both.target, 1.75, 1.5, 1, 3, 2)
    near(both.advantage, 1.75, 1.5, 1, 3, 2)


# What enters, what comes out ------------------------------------------------------------------------------------------


def test_one_axis_is_refused_since_it_may_be_a_flattened_rollout() -> None:
    flat, never = torch.zeros(6), torch.zeros(6).bool()
    with pytest.raises(ShapeError, match=r"^gae: expected reward \[T, B\], given \[6\]$"):
        gae(flat, flat, flat, never, ~never, 0.9, 0.9)


@pytest.mark.parametrize("name", ["ended", "valid"])
def test_flags_are_bool(name: str) -> None:
    zero, never = torch.zeros(3, 2), torch.zeros(3, 2).bool()
    arguments = {"ended": never, "valid": ~never} | {name: zero}
    with pytest.raises(ShapeError, match=rf"^gae: expected {name} bool \[3, 2\], given float32 \[3, 2\]"):
        gae(zero, zero, zero, **arguments, gamma=0.9, gae_lambda=0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terminated": torch.zeros(4, 2).bool()}, r"expected terminated bool \[3, 2\], given bool \[4, 2\]"),
        ({"terminated": torch.zeros(3, 2)}, r"expected terminated bool \[3, 2\], given float32 \[3, 2\]"),
        ({"final_value": torch.zeros(2, 1)}, r"expected final_value \[2\], given float32 \[2, 1\]"),
        ({"final_value": torch.zeros(3)}, r"expected final_index \[3, 2\], given int64 \[2, 2\]"),
        ({"final_index": torch.zeros(2, 3).long()}, r"expected final_index \[2, 2\], given int64 \[2, 3\]"),
    ],
)
def test_next_value_checks_its_arguments(changes: dict[str, Tensor], message: str) -> None:
    arguments = {
        "value": torch.zeros(4, 2),
        "terminated": torch.zeros(3, 2).bool(),
        "final_value": torch.zeros(2),
        "final_index": torch.zeros(2, 2).long(),
    }
    assert next_value(**arguments).shape == (3, 2)
    with pytest.raises(ShapeError, match=f"^next_value: {message}"):
        next_value(**arguments | changes)


def test_half_a_table_of_final_values_is_refused() -> None:
    value, never = torch.zeros(4, 2), torch.zeros(3, 2).bool()
    for half in ({"final_value": torch.zeros(1)}, {"final_index": torch.zeros(1, 2).long()}):
        with pytest.raises(ConfigError, match="give both or neither"):
            next_value(value, never, **half)


def calls(device: str) -> list[Callable[[], Tensor]]:
    """Every function, on tensors that ask for gradients."""
    number = torch.zeros(5, 2, device=device, requires_grad=True)
    flag = torch.zeros(5, 2, device=device, dtype=torch.bool)
    value = torch.zeros(6, 2, device=device, requires_grad=True)
    index = torch.zeros(1, 2, device=device, dtype=torch.long)
    common = (number, number, number, flag, ~flag)
    return [
        lambda: next_value(value, flag, value[0, :1], index),
        lambda: gae(*common, 0.9, 0.9),
        lambda: vtrace(number, *common, 0.9).target,
        lambda: vtrace(number, *common, 0.9).advantage,
        lambda: standardized(number, number, alone),
        lambda: standardized(number, flag, alone),
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_gradient_flows_and_no_number_leaves_an_accelerator(device: str) -> None:
    """On the device "meta" nothing is computed, so a read of a number on the host would raise."""
    for call in calls(device):
        given = call()
        assert given.shape == (5, 2)
        assert given.device.type == device
        assert not given.requires_grad


def test_arguments_are_left_as_they_are() -> None:
    s = stream(7, 16, 3)
    arguments = tensors(s) | {"log_ratio": torch.tensor(s.log_ratio)}
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    vtrace(**arguments, gamma=0.9)
    log_ratio = arguments.pop("log_ratio")
    gae(**arguments, gamma=0.9, gae_lambda=0.9)
    standardized(log_ratio, arguments["valid"], alone)
    next_value(torch.tensor(s.value), arguments["ended"])
    for name, tensor in (arguments | {"log_ratio": log_ratio}).items():
        assert torch.equal(tensor, before[name])


def test_numbers_that_have_diverged_come_out_as_such_without_a_warning() -> None:
    s = stream(8, 16, 3, ends=0)
    for number in (torch.inf, torch.nan):
        arguments = tensors(s)
        arguments["reward"][9, 1] = number
        given = gae(**arguments, gamma=0.9, gae_lambda=0.9)
        assert not given[9, 1].isfinite()
        assert given[10:].isfinite().all()
        assert given[:, [0, 2]].isfinite().all()
    huge = tensors(s, torch.float32) | {"reward": torch.full((16, 3), 3e38)}
    assert not gae(**huge, gamma=1.0, gae_lambda=1.0)[0].isfinite().any()
