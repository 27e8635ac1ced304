"""What is minimised: losses as pure functions, one number per sample.

Each result has the shape of the arguments and is reduced by nobody here: the learner weighs the samples and sums them.
All tensor arguments of one function have equal shapes, else ShapeError: nothing is ever broadcast. Gradients flow
through the first argument only; the others are data.

`log_ratio` is log π − log μ of the action taken, in nats: the log-probability under the policy being learned minus the
one under the behaviour policy, as recorded. It is computed once and shared by the functions that need it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import ShapeError

__all__ = [
    "approximate_kl",
    "clipped_share",
    "clipped_squared_error",
    "clipped_surrogate",
    "policy_gradient",
    "squared_error",
]


def policy_gradient(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """−log π · A: its gradient is the policy gradient, descended (Mnih et al. 2016, arXiv:1602.01783, §4).

    log_prob: nats, of the action taken. advantage: of the same shape. Raises ShapeError.
    """
    if log_prob.shape != advantage.shape:
        raise _unequal("policy_gradient", "advantage", advantage, "log_prob", log_prob)
    return -log_prob * advantage.detach()


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """−min(ρ·A, clip(ρ, 1 − ε, 1 + ε)·A), ρ = exp(log_ratio): PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    log_ratio, advantage: of one shape. clip_range: ε. The gradient is 0 where ρ has left the range in the direction
    that A asks for. Reduces to the gradient of `policy_gradient` when ρ = 1. Raises ShapeError.
    """
    if log_ratio.shape != advantage.shape:
        raise _unequal("clipped_surrogate", "advantage", advantage, "log_ratio", log_ratio)
    cost = -advantage.detach()
    ratio = log_ratio.exp()
    loss = ratio * cost
    # The clipped loss is a constant: recording how it is computed would only take time.
    clipped = ratio.detach().clamp(1 - clip_range, 1 + clip_range).mul_(cost)
    return torch.where(loss.detach() >= clipped, loss, clipped)


def squared_error(value: Tensor, target: Tensor) -> Tensor:
    """(V − target)², without a factor ½. Both of one shape. Raises ShapeError."""
    if value.shape != target.shape:
        raise _unequal("squared_error", "target", target, "value", value)
    return F.mse_loss(value, target.detach(), reduction="none")


def clipped_squared_error(value: Tensor, behaviour_value: Tensor, target: Tensor, clip_range: float) -> Tensor:
    """max((V − target)², (V' − target)²) with V' = V₀ + clip(V − V₀, −ε, ε), without a factor ½.

    behaviour_value: V₀, the value when the target was made. clip_range: ε, in units of value. All of one shape.
    Not in the paper of PPO, but in its first implementation. Reduces to `squared_error` when |V − V₀| ≤ ε.
    Raises ShapeError.
    """
    if value.shape != target.shape:
        raise _unequal("clipped_squared_error", "target", target, "value", value)
    if value.shape != behaviour_value.shape:
        raise _unequal("clipped_squared_error", "behaviour_value", behaviour_value, "value", value)
    behaviour_value, target = behaviour_value.detach(), target.detach()
    clipped = behaviour_value + (value - behaviour_value).clamp(-clip_range, clip_range)
    return torch.maximum((value - target).square(), (clipped - target).square())


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """(ρ − 1) − log ρ ≥ 0, whose mean over the behaviour policy's actions is KL(μ ‖ π), nats.

    The estimator k₃ of Schulman, "Approximating KL Divergence" (2020): unbiased as −log ρ is, with less variance, and
    0 only where ρ = 1.
    """
    return log_ratio.expm1() - log_ratio


def clipped_share(log_ratio: Tensor, clip_range: float) -> Tensor:
    """1.0 where the ratio lies outside 1 ± clip_range, else 0.0: its mean is the share of samples clipped, for reports.

    No gradient flows.
    """
    log_ratio = log_ratio.detach()
    outside = log_ratio > math.log1p(clip_range)
    if clip_range < 1:
        outside = outside.logical_or_(log_ratio < math.log1p(-clip_range))
    return outside.to(log_ratio.dtype)


def _unequal(function: str, name: str, given: Tensor, like: str, expected: Tensor) -> ShapeError:
    return ShapeError(
        f"{function}: expected {name} {list(expected.shape)}, the shape of {like}, given {list(given.shape)}; "
        "nothing is broadcast"
    )
