"""Losses against slow loops over the samples, their gradients by the rules of the papers, and cases by their ids."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ShapeError
from headrace.losses import (
    approximate_kl,
    clipped_share,
    clipped_squared_error,
    clipped_surrogate,
    policy_gradient,
    squared_error,
)

Loss = Callable[..., Tensor]

CLIP = 0.2

PAIRS: dict[str, Loss] = {
    "policy_gradient": policy_gradient,
    "clipped_surrogate": partial(clipped_surrogate, clip_range=CLIP),
    "squared_error": squared_error,
}
"""The losses of two tensors."""


def samples(count: int = 3, shape: tuple[int, ...] = (7, 5)) -> list[Tensor]:
    rng = np.random.default_rng(count)
    return [torch.tensor(rng.normal(0, 0.5, shape)) for _ in range(count)]


def reference(function: Callable[..., float], *arguments: Tensor) -> NDArray[np.float64]:
    columns = zip(*(tensor.flatten().tolist() for tensor in arguments), strict=True)
    return np.array([function(*numbers) for numbers in columns]).reshape(tuple(arguments[0].shape))


def check(loss: Loss, function: Callable[..., float], *arguments: Tensor) -> None:
    """The same as the slow function of each sample, in both precisions, of the same shape and dtype."""
    expected = reference(function, *arguments)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        given = loss(*(tensor.to(dtype) for tensor in arguments))
        assert given.dtype is dtype
        assert given.shape == arguments[0].shape
        np.testing.assert_allclose(given.numpy(), expected, rtol=tolerance, atol=tolerance)


# References -----------------------------------------------------------------------------------------------------------


def test_policy_gradient() -> None:
    check(policy_gradient, lambda log_prob, advantage: -log_prob * advantage, *samples(2))


@pytest.mark.parametrize("clip", [0.1, 0.2, 0.9])
def test_clipped_surrogate(clip: float) -> None:
    def slow(log_ratio: float, advantage: float) -> float:
        ratio = math.exp(log_ratio)
        bound = 1 + clip if advantage > 0 else 1 - clip
        outside = ratio > bound if advantage > 0 else ratio < bound
        return -(bound if outside else ratio) * advantage

    check(partial(clipped_surrogate, clip_range=clip), slow, *samples(2))


def test_squared_error() -> None:
    check(squared_error, lambda value, target: (value - target) ** 2, *samples(2))


@pytest.mark.parametrize("clip", [0.05, 0.2, 1.0])
def test_clipped_squared_error(clip: float) -> None:
    def slow(value: float, behaviour_value: float, target: float) -> float:
        bounded = min(max(value, behaviour_value - clip), behaviour_value + clip)
        return max((value - target) ** 2, (bounded - target) ** 2)

    check(partial(clipped_squared_error, clip_range=clip), slow, *samples(3))


def test_approximate_kl() -> None:
    check(approximate_kl, lambda log_ratio: math.exp(log_ratio) - 1 - log_ratio, *samples(1))


@pytest.mark.parametrize("clip", [0.1, 0.2, 0.9])
def test_clipped_share(clip: float) -> None:
    def slow(log_ratio: float) -> float:
        return float(not 1 - clip <= math.exp(log_ratio) <= 1 + clip)

    check(partial(clipped_share, clip_range=clip), slow, *samples(1))


# What they mean -------------------------------------------------------------------------------------------------------


def test_approximate_kl_is_never_negative_and_its_mean_is_the_divergence() -> None:
    size = torch.logspace(-30, 1, 2000, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        assert (approximate_kl(torch.cat([size, -size]).to(dtype)) >= 0).all()
    assert approximate_kl(torch.zeros(3)).tolist() == [0, 0, 0]
    behaviour, policy = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.1, 0.5]], dtype=torch.float64)
    exact = (behaviour * (behaviour / policy).log()).sum()
    torch.testing.assert_close((behaviour * approximate_kl((policy / behaviour).log())).sum(), exact)


def gradient(loss: Loss, first: Tensor, *others: Tensor) -> Tensor:
    """By the first argument; the others ask for gradients too and must get none."""
    leaves = [tensor.clone().requires_grad_() for tensor in (first, *others)]
    loss(*leaves).sum().backward()
    assert all(leaf.grad is None for leaf in leaves[1:])
    assert leaves[0].grad is not None
    return leaves[0].grad


def test_gradients_flow_through_the_first_argument_only() -> None:
    first, second, third = samples(3)
    torch.testing.assert_close(gradient(policy_gradient, first, second), -second)
    torch.testing.assert_close(gradient(squared_error, first, second), 2 * (first - second))
    torch.testing.assert_close(gradient(approximate_kl, first), first.exp() - 1)
    error = partial(clipped_squared_error, clip_range=CLIP)
    # Where the clipped error is the larger one, the value has no part in it.
    inside = (first - second).abs() <= CLIP
    bounded = second + (first - second).clamp(-CLIP, CLIP)
    plain = inside | ((first - third).abs() >= (bounded - third).abs())
    assert 0 < plain.sum() < plain.numel()
    torch.testing.assert_close(gradient(error, first, second, third), 2 * (first - third) * plain)
    assert not clipped_share(first.requires_grad_(), CLIP).requires_grad


def test_the_surrogates_gradient_stops_where_the_ratio_left_the_range_in_the_direction_asked_for() -> None:
    log_ratio = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1, -0.1], dtype=torch.float64)
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    passes = torch.tensor([0, 1, 1, 0, 1, 1])
    given = gradient(partial(clipped_surrogate, clip_range=CLIP), log_ratio, advantage)
    torch.testing.assert_close(given, -log_ratio.exp() * advantage * passes)


def test_before_the_first_gradient_step_the_surrogates_gradient_is_the_policy_gradient() -> None:
    log_prob, advantage = samples(2)
    surrogate = partial(clipped_surrogate, clip_range=CLIP)
    given = gradient(surrogate, torch.zeros_like(log_prob), advantage)
    assert torch.equal(given, gradient(policy_gradient, log_prob, advantage))


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("wrong", [(3, 1), (1,), (1, 3), (4,)], ids=str)
def test_LC_49_two_arguments_of_unequal_shapes_raise_an_error_that_names_both(
    name: str, wrong: tuple[int, ...]
) -> None:
    message = (
        rf"^{name}: expected \w+ \[3\], the shape of \w+, given {re.escape(str(list(wrong)))}; nothing is broadcast$"
    )
    with pytest.raises(ShapeError, match=message):
        PAIRS[name](torch.zeros(3), torch.zeros(wrong))


@pytest.mark.parametrize("name", ["behaviour_value", "target"])
def test_LC_49_a_third_argument_is_checked_as_well(name: str) -> None:
    arguments = {"behaviour_value": torch.zeros(3, 2), "target": torch.zeros(3, 2)} | {name: torch.zeros(3, 1)}
    with pytest.raises(ShapeError, match=rf"expected {name} \[3, 2\], the shape of value, given \[3, 1\]"):
        clipped_squared_error(torch.zeros(3, 2), **arguments, clip_range=CLIP)


def test_LC_49_a_critic_that_is_right_has_no_loss() -> None:
    value = torch.tensor([1.0, 2.0, 3.0])
    for critic in (value, value.view(3, 1), value.view(3, 1, 1)):
        assert squared_error(critic, critic.clone()).mean() == 0
        if critic.ndim > 1:
            with pytest.raises(ShapeError):
                squared_error(critic, value)
