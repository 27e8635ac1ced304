"""What policies draw from: the last layer's output as a distribution over actions.

Each is a module without inputs of its own, so that what it learns (a standard deviation) lies beside the network's
other parameters. None draws a random number: noise is drawn once a rollout and handed in, which makes sampling a
function and costs a fifth of what a distribution object per step does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.errors import ConfigError
from headrace.spaces import Box, Discrete, Space

__all__ = ["Categorical", "Distribution", "Normal", "SquashedNormal", "distribution_over"]

_HALF_LOG_TAU: Final = 0.5 * math.log(2 * math.pi)


class Distribution(nn.Module, ABC):
    """A family of distributions; `size` numbers from the network pick one for each observation."""

    size: int

    @abstractmethod
    def noise(self, *leading: int, rng: torch.Generator) -> Tensor:
        """What `sample` needs for actions of these leading axes, float32 on the CPU."""

    @abstractmethod
    def sample(self, logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """The action that this noise picks and its log-probability in nats; without noise, the mode."""

    @abstractmethod
    def evaluate(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probability of an action and the entropy, in nats, each of the leading axes."""

    def environment_action(self, action: Tensor) -> Tensor | None:
        """What the environment is given for an action; None: the action itself."""
        return None


class Categorical(Distribution):
    """One of n actions, numbered from 0; `logits` are unnormalised log-probabilities [..., n]."""

    def __init__(self, space: Discrete) -> None:
        super().__init__()
        self.size, self.start = space.n, space.start

    def noise(self, *leading: int, rng: torch.Generator) -> Tensor:
        """Gumbel noise: the largest of logits + noise is distributed as their softmax."""
        return torch.empty(*leading, self.size).exponential_(generator=rng).log_().neg_()

    def sample(self, logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        action = (logits if noise is None else logits + noise).argmax(-1, keepdim=True)
        log_prob = logits.log_softmax(-1).gather(-1, action)
        return action.squeeze(-1), log_prob.squeeze(-1)

    def evaluate(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, entropy = _CategoricalTerms.apply(logits, action)  # type: ignore[no-untyped-call]
        return log_prob, entropy

    def environment_action(self, action: Tensor) -> Tensor | None:
        return action + self.start if self.start else None


class _CategoricalTerms(torch.autograd.Function):
    """The log-probability of an action and the entropy, as one operation: ten recorded ones take three times as long.

    With p = softmax(l) and H the entropy, ∂ log p_a / ∂ l_i = [i = a] - p_i and ∂H / ∂ l_i = -p_i (log p_i + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)
        probs = log_probs.exp()
        index = action.unsqueeze(-1)
        entropy = -(probs * log_probs).sum(-1)
        ctx.save_for_backward(log_probs, probs, index, entropy)
        ctx.set_materialize_grads(False)
        return log_probs.gather(-1, index).squeeze(-1), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_prob: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, None]:
        log_probs, probs, index, entropy = ctx.saved_tensors
        gradient = None
        if of_log_prob is not None:
            of_log_prob = of_log_prob.unsqueeze(-1)
            gradient = (probs * -of_log_prob).scatter_add_(-1, index, of_log_prob)
        if of_entropy is not None:
            part = probs * (log_probs + entropy.unsqueeze(-1)) * of_entropy.unsqueeze(-1)
            gradient = -part if gradient is None else gradient.sub_(part)
        return gradient, None


class _Scaled(Distribution):
    """Actions of a Box as a vector [..., d] in which -1 and 1 stand for its bounds."""

    low: Tensor
    half_range: Tensor

    def __init__(self, space: Box) -> None:
        super().__init__()
        self.shape, self.dtype, self.size = space.shape, space.dtype, int(np.prod(space.shape))
        low, high = (torch.as_tensor(np.array(bound, np.float32)).flatten() for bound in (space.low, space.high))
        bounded = low.isfinite() & high.isfinite()
        # A dimension without bounds on both sides keeps its unit.
        self.register_buffer("middle", torch.where(bounded, (low + high) / 2, 0.0), persistent=False)
        self.register_buffer("half_range", torch.where(bounded, (high - low) / 2, 1.0), persistent=False)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.log_std = nn.Parameter(torch.zeros(self.size))

    middle: Tensor
    high: Tensor

    def noise(self, *leading: int, rng: torch.Generator) -> Tensor:
        return torch.randn(*leading, self.size, generator=rng)

    def _log_density(self, mean: Tensor, action: Tensor) -> Tensor:
        """Of the normal distribution, summed over the d dimensions."""
        distance = (action - mean) * (-self.log_std).exp()
        return -(0.5 * distance.square() + self.log_std + _HALF_LOG_TAU).sum(-1)

    def _in_box(self, action: Tensor) -> Tensor:
        scaled = self.middle + self.half_range * action
        clipped = torch.minimum(torch.maximum(scaled, self.low), self.high)
        return clipped.reshape(*action.shape[:-1], *self.shape).to(self.dtype)


class Normal(_Scaled):
    """A normal distribution with independent dimensions around the network's output, whose spread is learned.

    The environment is given the action scaled to its Box and clipped there; the log-probability is that of what was
    chosen, before the clip.
    """

    def sample(self, logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        action = logits if noise is None else logits + self.log_std.exp() * noise
        return action, self._log_density(logits, action)

    def evaluate(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        entropy = (self.log_std + (0.5 + _HALF_LOG_TAU)).sum()
        return self._log_density(logits, action), entropy.expand(logits.shape[:-1])

    def environment_action(self, action: Tensor) -> Tensor | None:
        return self._in_box(action)


class SquashedNormal(_Scaled):
    """tanh of a normal distribution, scaled to the Box: every action lies inside, none is clipped.

    An action is kept as what went into the tanh, which the log-probability of an action at a bound needs; its
    log-probability is that of the tanh, log N(u) - Σ log(1 - tanh² u) (Haarnoja et al. 2018, arXiv:1801.01290, eq. 21).
    """

    def __init__(self, space: Box) -> None:
        super().__init__(space)
        if not space.bounded:
            raise ConfigError(f"a squashed policy needs bounds on every action; {space} has none. Use squashed=False.")
        # Gauss-Hermite nodes for the mean of log(1 - tanh²) under a normal distribution, which has no closed form.
        nodes, weights = np.polynomial.hermite_e.hermegauss(12)
        self.register_buffer("nodes", torch.tensor(nodes, dtype=torch.float32), persistent=False)
        self.register_buffer("weights", torch.tensor(weights / weights.sum(), dtype=torch.float32), persistent=False)

    nodes: Tensor
    weights: Tensor

    def sample(self, logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        action = logits if noise is None else logits + self.log_std.exp() * noise
        return action, self._log_density(logits, action) - _log_slope(action).sum(-1)

    def evaluate(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_prob = self._log_density(logits, action) - _log_slope(action).sum(-1)
        spread = logits.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * self.nodes
        slope = (_log_slope(spread) * self.weights).sum((-1, -2))
        return log_prob, (self.log_std + (0.5 + _HALF_LOG_TAU)).sum() + slope

    def environment_action(self, action: Tensor) -> Tensor | None:
        return self._in_box(action.tanh())


def distribution_over(space: Space, squashed: bool = False) -> Distribution:
    """The distribution that fits a space. Raises ConfigError when there is none."""
    if isinstance(space, Discrete):
        if squashed:
            raise ConfigError(f"squashed=True is for actions in a Box; this environment has {space}.")
        return Categorical(space)
    if space.dtype.is_floating_point:
        return SquashedNormal(space) if squashed else Normal(space)
    raise ConfigError(f"there is no policy over a Box of {space.dtype}; actions are a Box of floats or Discrete.")


def _log_slope(action: Tensor) -> Tensor:
    """log(1 - tanh² u) = 2 (log 2 - u - softplus(-2 u)), without the difference that vanishes for large u."""
    return 2 * (math.log(2) - action - nn.functional.softplus(-2 * action))
