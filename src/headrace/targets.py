"""What the losses aim at: advantages and value targets, as pure functions of time-major tensors.

Row t of [T, B] is the step from observation t: action t, reward t, whether it ended an episode. Observation t+1 is its
result, so values of all observations have T+1 rows. Three things never merge:

    terminated   the task ended: nothing follows, the value after it is 0
    truncated    we stopped watching: the episode would have gone on, the value after it is that of its last observation
    the cut      the rollout ends while the episode goes on: the same, without an end

`next_value` alone tells them apart; every target takes its result, and `ended` = terminated | truncated only to know
where one episode stops and another one begins. `valid` is false on the row after an end, which holds the reset: no
step was taken there, its observation is the last one of the episode before. Such rows come out 0 and touch no other.

Tensors are float32 or float64, on any device; no gradient flows. Shapes must be equal: nothing is ever broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, ShapeError

__all__ = [
    "VTrace",
    "at_best",
    "categorical_projection",
    "discounted_return",
    "gae",
    "next_value",
    "standardized",
    "td_target",
    "vtrace",
]


class VTrace(NamedTuple):
    """What `vtrace` returns: two tensors [T, B]."""

    target: Tensor
    """v_t, what the value of observation t is trained towards."""
    advantage: Tensor
    """What the log-probability of action t is weighted with, its clipped importance ratio included."""


def next_value(
    value: Tensor, terminated: Tensor, final_value: Tensor | None = None, final_index: Tensor | None = None
) -> Tensor:
    """The value after each step, [T, B]: V(observation t+1), and 0 where the step terminated.

    value [T+1, B]: of all observations. terminated bool [T, B].
    final_value [N], final_index int64 [N, 2]: only from environments that force same-step reset, where observation t+1
    belongs to the next episode already. They hold the value of each final observation, and the (t, b) of the step that
    led to it. Such a step still gets 0 where it terminated.
    Raises ShapeError, and ConfigError when only one of the two is given.
    """
    if value.ndim != 2:
        raise ShapeError(f"next_value: expected value [T+1, B], given {list(value.shape)}")
    _check("next_value", "terminated", terminated, torch.Size((len(value) - 1, value.shape[1])), flag=True)
    after = value.detach()[1:]
    if final_value is not None and final_index is not None:
        count = final_value.numel()
        _check("next_value", "final_value", final_value, torch.Size((count,)))
        _check("next_value", "final_index", final_index, torch.Size((count, 2)))
        after = after.index_put(final_index.unbind(1), final_value.detach())
    elif final_value is not None or final_index is not None:
        raise ConfigError("next_value: only one of final_value and final_index was given; give both or neither")
    return after.masked_fill(terminated, 0)


def gae(
    reward: Tensor, value: Tensor, next_value: Tensor, ended: Tensor, valid: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimates A [T, B] (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

        δ_t = (r_t + γ·next_value_t − V_t)·valid_t
        A_t = δ_t + γλ·valid_t·(1 − ended_t)·A_{t+1},    A_T = 0

    reward, value (of the observation acted on), next_value: float [T, B]. ended (terminated | truncated), valid: bool.
    A + V is the λ-return. Reduces to the TD error δ when λ = 0. When λ = 1 it reduces to Monte Carlo, minus V: the
    discounted rewards up to the end or the cut, plus the discounted next_value there.
    Raises ShapeError unless all are [T, B].
    """
    _check_all("gae", reward, ended, valid, value=value, next_value=next_value)
    delta = (reward + gamma * next_value - value).detach().masked_fill(~valid, 0)
    return _backwards(delta, torch.full_like(delta, gamma * gae_lambda).masked_fill(ended | ~valid, 0))


def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    ended: Tensor,
    valid: Tensor,
    gamma: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lambda_: float = 1.0,
) -> VTrace:
    """V-trace targets and advantages, each [T, B] (Espeholt et al. 2018, arXiv:1802.01561, eq. 1, remark 2, §4.2).

        ρ_t = min(ρ̄, π/μ),    c_t = λ·min(c̄, π/μ),    δ_t = ρ_t·(r_t + γ·next_value_t − V_t)
        v_t = V_t + δ_t + γ·c_t·(v_{t+1} − V_{t+1}),    advantage_t = ρ_t·(r_t + γ·v_{t+1} − V_t)

    log_ratio [T, B]: log π − log μ of the action taken, nats, of the target policy π and the behaviour policy μ.
    v_{t+1} is next_value_t where an episode ends and at the cut. Where not valid, v = V and the advantage is 0.
    Reduces to A + V of `gae` with the same λ when π = μ and ρ̄, c̄ ≥ 1, so to the n-step return when λ = 1 besides.
    Raises ShapeError unless all are [T, B].
    """
    _check_all("vtrace", reward, ended, valid, log_ratio=log_ratio, value=value, next_value=next_value)
    value, next_value = value.detach(), next_value.detach()
    skipped = ~valid
    stops = ended | skipped
    ratio = log_ratio.detach().exp()
    rho = ratio.clamp(max=rho_bar)
    surprise = reward.detach() - value
    delta = (rho * (surprise + gamma * next_value)).masked_fill(skipped, 0)
    correction = _backwards(delta, (ratio.clamp(max=c_bar) * (gamma * lambda_)).masked_fill(stops, 0))  # v − V
    following = next_value.clone()  # of v_{t+1}, all but its correction
    following[:-1] += correction[1:].masked_fill(stops[:-1], 0)
    advantage = (rho * (surprise + gamma * following)).masked_fill(skipped, 0)
    return VTrace(value + correction, advantage)


def at_best(told: Tensor, value: Tensor) -> Tensor:
    """What is told of the action with the highest value: [B] of told [B, n], [B, N] of told [B, n, N].

    value [B, n]: told's own means for the maximum of Q-learning; those of the online network, while told is the target
    network's, for double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461, eq. 4). −∞: an action not allowed.
    Raises ShapeError.
    """
    if value.ndim != 2 or told.shape[:2] != value.shape:
        raise ShapeError(f"at_best: expected told [B, n, ...] of value [B, n], given {[*told.shape]}, {[*value.shape]}")
    return told.detach()[torch.arange(len(value), device=value.device), value.argmax(-1)]


def td_target(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """reward + discount·next_value, of replayed transitions: all [B]. No gradient flows.

    reward: the discounted sum of n rewards. discount: γⁿ, 0 where the task ended, and not 0 where only a time limit
    did. Raises ShapeError.
    """
    for name, tensor in (("discount", discount), ("next_value", next_value)):
        _check("td_target", name, tensor, reward.shape)
    return torch.addcmul(reward.detach(), discount, next_value.detach())


def categorical_projection(probability: Tensor, reward: Tensor, discount: Tensor, v_min: float, v_max: float) -> Tensor:
    """The distribution of reward + discount·Z on the atoms of Z, [B, N] (Bellemare et al. 2017, arXiv:1707.06887).

    probability [B, N]: of Z at N ≥ 2 atoms, evenly spaced from v_min to v_max. reward, discount [B]: as in `td_target`.
    Equation 7 there: what lies between two atoms is divided between them, more for the nearer one; what lies outside
    goes to the last one. Where nothing does, the mean is kept. No gradient flows. Raises ShapeError.
    """
    if probability.ndim != 2:
        raise ShapeError(f"categorical_projection: expected probability [B, N], given {list(probability.shape)}")
    for name, tensor in (("reward", reward), ("discount", discount)):
        _check("categorical_projection", name, tensor, probability.shape[:1])
    probability = probability.detach()
    last = probability.shape[1] - 1
    atoms = torch.linspace(v_min, v_max, last + 1, dtype=probability.dtype, device=probability.device)
    moved = torch.addcmul(reward.detach().unsqueeze(-1), discount.unsqueeze(-1), atoms)
    place = moved.sub_(v_min).mul_(last / (v_max - v_min)).clamp_(0, last)
    below = place.floor()
    above = probability * place.sub_(below)
    index = below.long()
    projected = torch.zeros_like(probability).scatter_add_(1, index, probability - above)
    return projected.scatter_add_(1, index.add_(1).clamp_(max=last), above)


def discounted_return(reward: Tensor, before: Tensor, ended: Tensor, gamma: float) -> Tensor:
    """The discounted sum R [T, B] of an episode's rewards up to each row, the latest weighing most; float64.

        R_t = r_t + γ·(1 − ended_{t−1})·R_{t−1}

    reward [T, B]: 0 in a row that only resets, which then comes out 0. before [B]: R in the row before the first, 0 if
    an episode ended there. ended bool [T, B]: terminated | truncated, after either of which it begins anew.
    Its variance is what rewards are scaled by (Engstrom et al. 2020, arXiv:2005.12729, §2). Raises ShapeError.
    """
    if reward.ndim != 2:
        raise ShapeError(f"discounted_return: expected reward [T, B], given {list(reward.shape)}")
    _check("discounted_return", "before", before, reward.shape[1:])
    _check("discounted_return", "ended", ended, reward.shape, flag=True)
    constant = reward.detach().double().flip(0)  # a copy, in which time runs backwards
    constant[-1] += gamma * before.detach()
    factor = torch.full_like(constant, gamma)
    factor[:-1].masked_fill_(ended[:-1].flip(0), 0)
    return _backwards(constant, factor).flip(0)


def standardized(values: Tensor, weight: Tensor, mean: Callable[[Tensor, float], Tensor], parts: int = 1) -> Tensor:
    """(values − mean) / deviation over all workers' elements together: mean 0, population standard deviation 1.

    parts: so many equal pieces, one after the other, are standardized each by itself: minibatches that lie in a row.

    values: float, any shape. weight ≥ 0: of the same shape, bool or real. An element of weight 0 counts in neither
    moment, whatever it holds, and comes out 0. So does every element when there is one only, or when the deviation is
    below a millionth of their root mean square: equal but for rounding.
    mean(vector, weight): averages a vector over the workers; on one, `lambda vector, weight: vector`. It is called
    once, with float64 [Σw, Σw·x, Σw·x²], each of all parts, and weight 1.0. Only ratios of these sums are used, so a
    worker without elements adds nothing, a sum serves as well as a mean, and no number has to leave an accelerator.
    Raises ShapeError unless the shapes are equal.
    """
    _check("standardized", "weight", weight, values.shape)
    if values.numel() % parts:
        raise ShapeError(f"standardized: {values.numel()} elements cannot be cut into {parts} equal parts")
    weight = weight.detach().reshape(parts, -1)
    unused = weight.logical_not()
    w = weight.double()
    x = values.detach().double().reshape(parts, -1).masked_fill(unused, 0)
    wx = w * x
    sums = mean(torch.stack((w, wx, wx * x)).sum(2).flatten(), 1.0).view(3, parts, 1)
    _, centre, square = (sums / sums[0]).unbind()
    variance = square - centre * centre
    variance.masked_fill_(variance <= 1e-12 * square, torch.inf)  # x / ∞ = 0
    return (x - centre).mul_(variance.rsqrt()).masked_fill_(unused, 0).to(values.dtype).view(values.shape)


def _backwards(constant: Tensor, factor: Tensor) -> Tensor:
    """x_t = constant_t + factor_t·x_{t+1} with x_T = 0, for all rows of [T, B]; overwrites `constant`.

    By doubling: each pass joins the `span` terms that a row has with those of the row `span` further, which lie behind
    a factor that is the product of `span` factors. log₂ T operations on all rows replace T operations on one.
    """
    x: Any = constant
    f: Any = factor
    if constant.device.type == "cpu":  # NumPy begins a small operation in a third of the time
        x, f = constant.numpy(), factor.numpy()
    rows, span = len(x), 1
    f = f[:-1]  # f[t] leads from row t to row t + span
    with np.errstate(over="ignore", invalid="ignore"):  # as silent as torch where numbers have diverged
        while span < rows:
            x[:-span] += f * x[span:]
            f = f[:-span] * f[span:]
            span *= 2
    return constant


def _check_all(function: str, reward: Tensor, ended: Tensor, valid: Tensor, **others: Tensor) -> None:
    """Raise ShapeError unless all have the shape of reward, which has two axes."""
    if reward.ndim != 2:
        raise ShapeError(f"{function}: expected reward [T, B], given {list(reward.shape)}")
    for name, tensor in others.items():
        _check(function, name, tensor, reward.shape)
    _check(function, "ended", ended, reward.shape, flag=True)
    _check(function, "valid", valid, reward.shape, flag=True)


def _check(function: str, name: str, tensor: Tensor, shape: torch.Size, flag: bool = False) -> None:
    """Raise ShapeError unless the tensor has this shape and, as a flag, is bool."""
    if tensor.shape != shape or (flag and tensor.dtype is not torch.bool):
        given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        expected = f"{'bool ' * flag}{list(shape)}"
        raise ShapeError(f"{function}: expected {name} {expected}, given {given}; nothing is broadcast")
