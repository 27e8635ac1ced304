"""Normalisers: running statistics that lie in the network, and so travel, act and are saved with its weights.

They are moved by the learner alone, once an update, after its last gradient step (`Method.statistics`); whoever acts
or evaluates with a network uses them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["CLIP", "Moments", "ObservationNormalizer", "RewardNormalizer"]

Mean: TypeAlias = Callable[[Tensor, float], Tensor]  # as data.Mean, as far as it is used here

CLIP = 10.0
"""Where normalised observations and rewards are clipped, in standard deviations."""

_EPSILON = 1e-8  # added to a variance before its root is divided by
_TINY = torch.finfo(torch.float64).tiny


class Moments(nn.Module):
    """How many vectors [N] there were, their mean and their variance: float64, moved batch by batch.

    Batches are merged by means and sums of squared deviations (Chan, Golub, LeVeque 1983, "Algorithms for computing
    the sample variance"), which no offset makes cancel: the result is that of all vectors at once.
    """

    count: Tensor
    """Vectors so far, []; where several learn together, how many each of them had on average."""
    mean: Tensor
    squares: Tensor
    """Sums of squared deviations from the mean [N], on the scale of `count`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))

    @property
    def variance(self) -> Tensor:
        """Of all vectors so far, each component by itself, divided by their number; 0 before the first."""
        return self.squares / self.count.clamp_min(_TINY)

    def move(self, vectors: Tensor, weight: Tensor, mean: Mean) -> None:
        """Take in the vectors [R, N] whose weight [R] is above 0.

        mean: averages over all who learn together. It is called twice with weight 1.0, for the sums that make the
        batch's mean and then for those of the deviations from it: all of these learners end with the same bits.
        """
        counted = weight.detach() > 0
        x = vectors.detach().double().masked_fill_(~counted.unsqueeze(-1), 0)
        number = counted.sum(dtype=torch.float64).reshape(1)
        sums = mean(torch.cat([number, x.sum(0)]), 1.0)
        number, centre = sums[0], sums[1:] / sums[0].clamp_min(_TINY)
        squares = mean((x - centre).square_().masked_fill_(~counted.unsqueeze(-1), 0).sum(0), 1.0)
        total = self.count + number
        shift, share = centre - self.mean, number / total.clamp_min(_TINY)
        self.squares += squares + shift.square() * (self.count * share)
        self.mean += shift * share
        self.count.copy_(total)


class ObservationNormalizer(nn.Module):
    """(x − mean) / √(variance + 10⁻⁸), clipped to ±10, of some components of a vector; the identity before any data.

    normalized [N] bool: which components; the others pass through. dtype: in which this is computed; the result is
    float32 in any case.
    """

    columns: Tensor
    shift: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, normalized: Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        size = len(normalized)
        self.moments = Moments(int(normalized.sum()))
        self.register_buffer("columns", normalized.nonzero().squeeze(1), persistent=False)
        # What the moments come to, so that acting takes three operations.
        self.register_buffer("shift", torch.zeros(size, dtype=dtype))
        self.register_buffer("scale", torch.ones(size, dtype=dtype))
        self.register_buffer("low", torch.full((size,), -torch.inf, dtype=dtype))
        self.register_buffer("high", torch.full((size,), torch.inf, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] → [..., N] float32."""
        return (x - self.shift).mul_(self.scale).clamp_(self.low, self.high).float()

    def move(self, x: Tensor, weight: Tensor, mean: Mean) -> None:
        """Take in the vectors [..., N] whose weight [...] is above 0; see `Moments.move`."""
        self.moments.move(x.reshape(-1, x.shape[-1]).index_select(1, self.columns), weight.flatten(), mean)
        known = self.moments.count > 0
        scale = (self.moments.variance + _EPSILON).rsqrt()
        for held, value in (
            (self.shift, self.moments.mean),
            (self.scale, torch.where(known, scale, 1.0)),
            (self.low, torch.where(known, -CLIP, -torch.inf).expand_as(scale)),
            (self.high, torch.where(known, CLIP, torch.inf).expand_as(scale)),
        ):
            held.index_copy_(0, self.columns, value.to(held.dtype))


class RewardNormalizer(nn.Module):
    """r / √(variance of the discounted returns + 10⁻⁸), clipped to ±10; a variance of 1 is assumed before any data.

    Rewards are scaled and not shifted: what is good stays good.
    """

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.moments = Moments(1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, reward: Tensor) -> Tensor:
        """[T, B] → [T, B]."""
        return (reward * self.scale).clamp_(-CLIP, CLIP)

    def move(self, returns: Tensor, weight: Tensor, mean: Mean) -> None:
        """Take in the running discounted returns [...] whose weight [...] is above 0; see `Moments.move`."""
        self.moments.move(returns.reshape(-1, 1), weight.flatten(), mean)
        scale = (self.moments.variance + _EPSILON).rsqrt().squeeze()
        self.scale.copy_(torch.where(self.moments.count > 0, scale, 1.0))
