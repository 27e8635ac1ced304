"""What is minimised: losses as pure functions, one number per sample.

Each result has the shape of the arguments and is reduced by nobody here: the learner weighs the samples and sums them.
A distribution is one sample: of losses between distributions [..., N] the result is [...].
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
    "categorical_divergence",
    "clipped_share",
    "clipped_squared_error",
    "clipped_surrogate",
    "huber",
    "policy_gradient",
    "quantile_huber",
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


def huber(value: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    """½u² where |u| ≤ δ, else δ·(|u| − ½δ), with u = V − target: a gradient of at most δ (Huber 1964).

    Both of one shape. delta: δ, in units of value. Half of `squared_error` where |u| ≤ δ. Raises ShapeError.
    """
    if value.shape != target.shape:
        raise _unequal("huber", "target", target, "value", value)
    return F.huber_loss(value, target.detach(), reduction="none", delta=delta)


def categorical_divergence(logits: Tensor, probability: Tensor) -> Tensor:
    """KL(m ‖ p) of a target distribution m and p = softmax(logits), in nats (Bellemare et al. 2017, arXiv:1707.06887).

    logits, probability (m): [..., N], over the same N atoms. The result is [...]; it is 0 only where p = m. Its
    gradient, p − m by logits, is that of the cross-entropy −Σ m log p of algorithm 1. Raises ShapeError.
    """
    if logits.shape != probability.shape:
        raise _unequal("categorical_divergence", "probability", probability, "logits", logits)
    return F.kl_div(logits.log_softmax(-1), probability.detach(), reduction="none").sum(-1)


def quantile_huber(quantile: Tensor, target: Tensor, kappa: float = 1.0) -> Tensor:
    """Σ_i mean_j |τ_i − 1{u < 0}|·L_κ(u)/κ, u = target_j − quantile_i (Dabney et al. 2018, arXiv:1710.10044, eq. 10).

    quantile, target: [..., N], where quantile i is that at τ_i = (i + ½)/N, i from 0 on. kappa: κ > 0, in units of
    value; L_κ is `huber`. The result is [...]. Raises ShapeError.
    """
    if quantile.shape != target.shape:
        raise _unequal("quantile_huber", "target", target, "quantile", quantile)
    count = quantile.shape[-1]
    tau = (torch.arange(count, dtype=quantile.dtype, device=quantile.device).unsqueeze(-1) + 0.5) / count
    u = target.detach().unsqueeze(-2) - quantile.unsqueeze(-1)
    asymmetry = (tau - (u.detach() < 0).to(tau.dtype)).abs_()
    loss = F.huber_loss(u, torch.zeros_like(u), reduction="none", delta=kappa)
    return (loss * asymmetry).mean(-1).sum(-1) / kappa


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
