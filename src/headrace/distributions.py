"""What policies draw from: the last layer's output as a distribution over actions.

Each is a module without inputs of its own, so that what it learns (a standard deviation) lies beside the network's
other parameters. None draws a random number: noise is drawn once a rollout and handed in, which makes sampling a
function and costs a fifth of what a distribution object per step does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import optree
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.errors import ConfigError
from headrace.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, leaves
from headrace.struct import NAMESPACE, Tree

__all__ = [
    "Bernoulli",
    "Categorical",
    "Distribution",
    "InBox",
    "MultiCategorical",
    "Normal",
    "SquashedNormal",
    "TreeDistribution",
    "distribution_over",
]

_HALF_LOG_TAU: Final = 0.5 * math.log(2 * math.pi)
_LARGEST_INTEGER: Final = 2**24  # up to which float32 has all of them
_SURE: Final = 1e9  # a logit beyond any that a network gives, and still finite: 0 · ∞ would be NaN


def by_numpy(x: Tensor) -> bool:
    """Whether NumPy computes with x, because it begins sooner: float32 on the CPU, and no gradient is asked for."""
    return x.is_cpu and x.dtype is torch.float32 and not (torch.is_grad_enabled() or x.requires_grad)


class Distribution(nn.Module, ABC):
    """A family of distributions; `size` numbers from the network pick one for each observation."""

    size: int
    choices: int = 0
    """How many numbers of an action mask it has use for; 0: none can be forbidden."""

    @abstractmethod
    def noise(self, *leading: int, rng: torch.Generator) -> Tensor:
        """What `sample` needs for actions of these leading axes [..., size], float32 on the CPU."""

    @abstractmethod
    def draw(self, logits: Tensor, noise: Tensor | None) -> Tree:
        """The action that this noise picks; without noise, the mode."""

    @abstractmethod
    def log_prob(self, logits: Tensor, action: Tree) -> Tensor:
        """The log-probability of an action, in nats, of the leading axes."""

    def sample(self, logits: Tensor, noise: Tensor | None) -> tuple[Tree, Tensor]:
        """The action that this noise picks and its log-probability; see `draw`."""
        action = self.draw(logits, noise)
        return action, self.log_prob(logits, action)

    @abstractmethod
    def evaluate(self, logits: Tensor, action: Tree) -> tuple[Tensor, Tensor]:
        """The log-probability of an action and the entropy, in nats, each of the leading axes."""

    def environment_action(self, action: Tree) -> Tree | None:
        """What the environment is given for an action; None: the action itself."""
        return None

    def masked(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Logits under which what the mask [..., choices] forbids has probability 0; void where it forbids all."""
        raise ConfigError(f"{type(self).__name__}: no action of this kind can be forbidden by an action mask.")


class Categorical(Distribution):
    """One of n actions, numbered from 0; `logits` are unnormalised log-probabilities [..., n]."""

    def __init__(self, space: Discrete) -> None:
        super().__init__()
        self.size, self.start = space.n, space.start
        self.choices = self.size

    def masked(self, logits: Tensor, mask: Tensor) -> Tensor:
        return _forbid(logits, mask)

    def noise(self, *leading: int, rng: torch.Generator) -> Tensor:
        """Gumbel noise: the largest of logits + noise is distributed as their softmax."""
        return torch.empty(*leading, self.size).exponential_(generator=rng).log_().neg_()

    def draw(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        if by_numpy(logits):
            array = logits.numpy() if noise is None else logits.numpy() + noise.numpy()
            return torch.from_numpy(np.asarray(array.argmax(-1)))  # of a single row argmax makes no array
        return (logits if noise is None else logits + noise).argmax(-1)

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def evaluate(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, entropy = _CategoricalTerms.apply(logits, action)  # type: ignore[no-untyped-call]
        return log_prob, entropy

    def environment_action(self, action: Tensor) -> Tensor | None:
        return action + self.start if self.start else None


class MultiCategorical(Distribution):
    """Several integers, drawn independently: a `Categorical` for each, whose logits lie one after the other."""

    def __init__(self, space: MultiDiscrete) -> None:
        super().__init__()
        self.sizes = list(space.sizes)
        self.size = self.choices = sum(space.sizes)
        self.shifted = any(space.starts)
        self.parts = nn.ModuleList(Categorical(Discrete(n)) for n in space.sizes)
        self.register_buffer("starts", torch.tensor(space.starts), persistent=False)

    starts: Tensor

    def _split(self, numbers: Tensor) -> Sequence[Tensor]:
        return numbers.split(self.sizes, -1)  # type: ignore[no-untyped-call, no-any-return]

    def noise(self, *leading: int, rng: torch.Generator) -> Tensor:
        return torch.empty(*leading, self.size).exponential_(generator=rng).log_().neg_()

    def draw(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        noises = [None] * len(self.sizes) if noise is None else self._split(noise)
        parts = zip(self.parts, self._split(logits), noises, strict=True)
        return torch.stack([part.draw(*pair) for part, *pair in parts], -1)  # type: ignore[operator]

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        parts = zip(self.parts, self._split(logits), action.unbind(-1), strict=True)
        return torch.stack([part.log_prob(*pair) for part, *pair in parts], -1).sum(-1)  # type: ignore[operator]

    def evaluate(self, logits: Tensor, action: Tree) -> tuple[Tensor, Tensor]:
        terms = [
            part.evaluate(*pair)  # type: ignore[operator]
            for part, *pair in zip(self.parts, self._split(logits), action.unbind(-1), strict=True)
        ]
        log_probs, entropies = zip(*terms, strict=True)
        return torch.stack(log_probs, -1).sum(-1), torch.stack(entropies, -1).sum(-1)

    def environment_action(self, action: Tree) -> Tree | None:
        return action + self.starts if self.shifted else None

    def masked(self, logits: Tensor, mask: Tensor) -> Tensor:
        parts = zip(self._split(logits), self._split(mask), strict=True)
        return torch.cat([_forbid(*part) for part in parts], -1)


class Bernoulli(Distribution):
    """Zeros and ones, drawn independently; a logit for each is the log of how much likelier one is than zero."""

    def __init__(self, space: MultiBinary) -> None:
        super().__init__()
        self.shape, self.size = space.shape, math.prod(space.shape)
        self.choices = 2 * self.size

    def noise(self, *leading: int, rng: torch.Generator) -> Tensor:
        """Logistic noise: logit + noise is above 0 with the probability that the logit stands for."""
        uniform = torch.rand(*leading, self.size, generator=rng)
        return uniform.clamp_(1e-7, 1 - 1e-7).logit_()

    def draw(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        return ((logits if noise is None else logits + noise) > 0).to(torch.int8)

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        return -nn.functional.softplus(torch.where(action > 0, -logits, logits)).sum(-1)

    def evaluate(self, logits: Tensor, action: Tree) -> tuple[Tensor, Tensor]:
        p = logits.sigmoid()
        entropy = nn.functional.softplus(logits) - p * logits
        return self.log_prob(logits, action), entropy.sum(-1)

    def environment_action(self, action: Tree) -> Tree | None:
        return action.reshape(*action.shape[:-1], *self.shape) if len(self.shape) > 1 else None

    def masked(self, logits: Tensor, mask: Tensor) -> Tensor:
        off, on = mask.reshape(*mask.shape[:-1], self.size, 2).bool().unbind(-1)
        return logits.masked_fill(off & ~on, -_SURE).masked_fill(on & ~off, _SURE)


class TreeDistribution(Distribution):
    """A dict or tuple of actions, drawn independently; the logits of its spaces lie one after the other."""

    def __init__(self, spaces: Spaces, squashed: bool) -> None:
        super().__init__()
        found, self.structure = optree.tree_flatten(spaces, namespace=NAMESPACE)
        self.parts = nn.ModuleList(distribution_over(space, squashed and isinstance(space, Box)) for space in found)
        kinds = cast(Sequence[Distribution], list(self.parts))
        self.sizes, self.uses = [kind.size for kind in kinds], [kind.choices for kind in kinds]
        self.size, self.choices = sum(self.sizes), sum(self.uses)

    def _zipped(self, *columns: Sequence[Any]) -> Iterator[Any]:
        return zip(cast(Sequence[Distribution], list(self.parts)), *columns, strict=True)

    def _split(self, numbers: Tensor) -> Sequence[Tensor]:
        return numbers.split(self.sizes, -1)  # type: ignore[no-untyped-call, no-any-return]

    def noise(self, *leading: int, rng: torch.Generator) -> Tensor:
        return torch.cat([part.noise(*leading, rng=rng) for (part,) in self._zipped()], -1)

    def draw(self, logits: Tensor, noise: Tensor | None) -> Tree:
        noises = [None] * len(self.sizes) if noise is None else self._split(noise)
        return self.structure.unflatten(part.draw(*pair) for part, *pair in self._zipped(self._split(logits), noises))

    def log_prob(self, logits: Tensor, action: Tree) -> Tensor:
        parts = self._zipped(self._split(logits), self.structure.flatten_up_to(action))
        return torch.stack([part.log_prob(*pair) for part, *pair in parts], -1).sum(-1)

    def evaluate(self, logits: Tensor, action: Tree) -> tuple[Tensor, Tensor]:
        actions = self.structure.flatten_up_to(action)
        terms = [part.evaluate(*pair) for part, *pair in self._zipped(self._split(logits), actions)]
        log_probs, entropies = zip(*terms, strict=True)
        return torch.stack(log_probs, -1).sum(-1), torch.stack(entropies, -1).sum(-1)

    def environment_action(self, action: Tree) -> Tree | None:
        actions = self.structure.flatten_up_to(action)
        given = [part.environment_action(chosen) for part, chosen in self._zipped(actions)]
        return self.structure.unflatten(
            [chosen if other is None else other for chosen, other in zip(actions, given, strict=True)]
        )

    def masked(self, logits: Tensor, mask: Tensor) -> Tensor:
        masks = mask.split(self.uses, -1)  # type: ignore[no-untyped-call]
        return torch.cat(
            [
                part.masked(numbers, allowed) if part.choices else numbers
                for part, numbers, allowed in self._zipped(self._split(logits), masks)
            ],
            -1,
        )


class _CategoricalTerms(torch.autograd.Function):
    """The log-probability of an action and the entropy, as one operation: ten recorded ones take three times as long.

    With p = softmax(l) and H the entropy, ∂ log p_a / ∂ l_i = [i = a] - p_i and ∂H / ∂ l_i = -p_i (log p_i + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)
        probs = log_probs.exp()
        index = action.unsqueeze(-1)
        entropy = (probs * log_probs).sum(-1).neg_()
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


class InBox(nn.Module):
    """Scales actions [..., d] in which -1 and 1 stand for the bounds of a Box; of integers, to the nearest one.

    None leaves the Box. A dimension without bounds on both sides keeps its unit. Raises ConfigError for integers that
    float32 does not have.
    """

    def __init__(self, space: Box) -> None:
        super().__init__()
        self.shape, self.dtype, self.size = space.shape, space.dtype, int(np.prod(space.shape))
        low, high = (torch.as_tensor(np.array(bound)).flatten() for bound in (space.low, space.high))
        if not self.dtype.is_floating_point:
            low, high = low.double(), high.double()
            if max(low.abs().max(), high.abs().max()) > _LARGEST_INTEGER:
                raise ConfigError(
                    f"there is no policy over {space}: of integers beyond ±2²⁴ it could not choose every one. Narrow "
                    "the bounds in a wrapper, or use MultiDiscrete."
                )
        middle, half_range = ((high + part * low).float() / 2 for part in (1, -1))
        bounded = half_range.isfinite()
        self.register_buffer("middle", torch.where(bounded, middle, 0.0), persistent=False)
        self.register_buffer("half_range", torch.where(bounded, half_range, 1.0), persistent=False)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self._arrays = [bound.numpy() for bound in (self.middle, self.half_range, low, high)]  # where by_numpy
        self._scales = not ((self.middle == 0).all() and (self.half_range == 1).all())

    middle: Tensor
    half_range: Tensor
    low: Tensor
    high: Tensor

    def forward(self, action: Tensor) -> Tensor:
        """[..., d] → [..., *shape] of the Box's dtype."""
        # Clipped in the precision of the bounds: float32 may round one of float64 to what lies outside.
        if by_numpy(action):
            middle, half_range, low, high = self._arrays
            array = action.numpy()
            if self._scales:
                array = middle + half_range * array
            if not self.dtype.is_floating_point:
                array = array.round()
            array = np.minimum(np.maximum(array.astype(low.dtype, copy=False), low), high)
            if len(self.shape) != 1:
                array = array.reshape(*array.shape[:-1], *self.shape)
            return torch.from_numpy(array).to(self.dtype)
        scaled = self.middle + self.half_range * action
        if not self.dtype.is_floating_point:
            scaled = scaled.round()
        clipped = scaled.to(self.low.dtype).clamp(self.low, self.high)
        return clipped.reshape(*action.shape[:-1], *self.shape).to(self.dtype)

    def uniform(self, *leading: int, rng: torch.Generator) -> Tensor:
        """Actions [..., d] that are uniform in the Box; of integers, each equally often."""
        drawn = torch.rand(*leading, self.size, generator=rng)
        if not self.dtype.is_floating_point:
            count = (self.high - self.low + 1).float()  # in each dimension
            drawn = (drawn * count).floor_().div_((count - 1).clamp_min(1))
        return drawn.mul_(2).sub_(1)


class _Scaled(Distribution):
    """Actions of a Box as a vector [..., d] in which -1 and 1 stand for its bounds."""

    def __init__(self, space: Box) -> None:
        super().__init__()
        self.in_box = InBox(space)
        self.size = self.in_box.size
        self.log_std = nn.Parameter(torch.zeros(self.size))

    def noise(self, *leading: int, rng: torch.Generator) -> Tensor:
        return torch.randn(*leading, self.size, generator=rng)

    def draw(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Before the tanh, where there is one."""
        if noise is None:
            return logits
        if by_numpy(logits):
            return torch.from_numpy(logits.numpy() + np.exp(self.log_std.detach().numpy()) * noise.numpy())
        return logits + self.log_std.exp() * noise

    def _log_density(self, mean: Tensor, action: Tensor) -> Tensor:
        """Of the normal distribution, summed over the d dimensions."""
        distance = (action - mean) * (-self.log_std).exp()
        return -(0.5 * distance.square() + self.log_std + _HALF_LOG_TAU).sum(-1)


class Normal(_Scaled):
    """A normal distribution with independent dimensions around the network's output, whose spread is learned.

    The environment is given the action scaled to its Box and clipped there; the log-probability is that of what was
    chosen, before the clip.
    """

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        return self._log_density(logits, action)

    def evaluate(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        entropy = (self.log_std + (0.5 + _HALF_LOG_TAU)).sum()
        return self._log_density(logits, action), entropy.expand(logits.shape[:-1])

    def environment_action(self, action: Tensor) -> Tensor | None:
        return self.in_box.forward(action)  # what calling a module does besides costs as much


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

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        return self._log_density(logits, action) - _log_slope(action).sum(-1)

    def evaluate(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        spread = logits.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * self.nodes
        slope = (_log_slope(spread) * self.weights).sum((-1, -2))
        return self.log_prob(logits, action), (self.log_std + (0.5 + _HALF_LOG_TAU)).sum() + slope

    def environment_action(self, action: Tensor) -> Tensor | None:
        return self.in_box.forward(action.tanh())


def distribution_over(space: Spaces, squashed: bool = False) -> Distribution:
    """The distribution that fits a space, or a dict or tuple of them. Raises ConfigError when there is none.

    squashed: for what lies in a Box. Raises ConfigError when nothing does.
    """
    if squashed and not any(isinstance(inner, Box) for _, inner in leaves(space)):
        raise ConfigError(f"squashed=True is for actions in a Box; this environment has {space}.")
    if not isinstance(space, Space):
        return TreeDistribution(space, squashed)
    for kind, made in ((Discrete, Categorical), (MultiDiscrete, MultiCategorical), (MultiBinary, Bernoulli)):
        if isinstance(space, kind):
            return made(space)  # type: ignore[arg-type]
    assert isinstance(space, Box)
    return SquashedNormal(space) if squashed else Normal(space)


def _forbid(logits: Tensor, mask: Tensor) -> Tensor:
    allowed = mask.bool()
    void = ~allowed.any(-1, keepdim=True)  # as where an environment gives no mask yet
    return logits.masked_fill(~(allowed | void), -_SURE)


def _log_slope(action: Tensor) -> Tensor:
    """log(1 - tanh² u) = 2 (log 2 - u - softplus(-2 u)), without the difference that vanishes for large u."""
    return 2 * (math.log(2) - action - nn.functional.softplus(-2 * action))
