"""Networks for replayed experience: action-values, several evaluated together, and the policies that climb them.

An action of a Box is a vector [..., d] in which −1 and 1 stand for its bounds: what policies choose, what action-values
are given and what replay keeps. Only the environment sees it scaled.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.data import Decision
from headrace.distributions import Categorical, InBox
from headrace.errors import ConfigError
from headrace.nets import ACTIVATIONS, MLP, Activation, Encoder, linear
from headrace.spaces import MASK, Box, Discrete, Space, Spec
from headrace.struct import Tree

__all__ = [
    "CategoricalPolicy",
    "Choices",
    "Critics",
    "DeterministicPolicy",
    "Exploration",
    "OffPolicyNet",
    "SquashedPolicy",
    "Stack",
]

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_LOG_STD = (-20.0, 2.0)  # Haarnoja et al.'s own
_SMALL = 0.01  # gain of a policy's last layer, so that it begins in the middle of the Box


def bounded(space: Box) -> InBox:
    """What scales actions to this Box. Raises ConfigError for one without bounds on every side."""
    if not space.bounded:
        raise ConfigError(f"policies that replay need bounds on every action; {space} lacks some.")
    return InBox(space)


class Exploration(NamedTuple):
    """The randomness of policies some of whose actions are uniformly random, for [T, B]."""

    noise: Tensor
    explore: Tensor
    """[..., 1] bool: where the action is uniformly random."""
    random: Tensor | None
    """That action [..., d]; None where it comes of the noise."""


class Choices(NamedTuple):
    """What a policy would do at B observations: m actions each with their probabilities, or a single drawn one."""

    action: Tensor | None
    """The drawn one [B, d], with a graph; None: all m of a Discrete space."""
    log_prob: Tensor
    """[B, m] or, of a drawn one, [B], in nats."""
    prob: Tensor | None
    """[B, m]; None: a single drawn one."""

    def mean(self, values: Tensor) -> Tensor:
        """The expectation [B] of values [B, m]; a drawn one's value [B] estimates it by itself."""
        return values if self.prob is None else (self.prob * values).sum(-1)


class SquashedPolicy(nn.Module):
    """tanh of a normal distribution whose mean and spread both depend on the observation."""

    def __init__(self, spec: Spec, hidden: Sequence[int], activation: str, rng: torch.Generator) -> None:
        super().__init__()
        self.encoder = Encoder(spec.observation, rng)
        self.in_box = bounded(spec.action)
        outputs = 2 * self.in_box.size
        self.mlp = MLP(self.encoder.outputs, hidden, outputs, gain=_SMALL, activation=activation, rng=rng)

    def _normal(self, observation: Tree) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation, each [..., d], of what goes into the tanh."""
        mean, log_std = self.mlp(self.encoder(observation)).chunk(2, -1)
        return mean, log_std.clamp(*_LOG_STD)

    def noise(self, *leading: int, epsilon: float, rng: torch.Generator) -> Tensor | Exploration:
        return _exploring(torch.randn(*leading, self.in_box.size, generator=rng), self.in_box, epsilon, rng)

    def act(self, observation: Tree, noise: Tensor | Exploration | None) -> Decision:
        mean, log_std = self._normal(observation)
        drawn = noise.noise if isinstance(noise, Exploration) else noise
        action = (mean if drawn is None else mean + log_std.exp() * drawn).tanh()
        return _decided(action, noise, self.in_box)

    def choices(self, observation: Tree, noise: Tensor | None) -> Choices:
        """The action that this noise [B, d] picks: log N(u) − Σ log(1 − tanh² u) (arXiv:1812.05905, appendix C)."""
        assert noise is not None
        mean, log_std = self._normal(observation)
        raw = torch.addcmul(mean, log_std.exp(), noise)
        # (u − mean) / std is the noise. log(1 − tanh² u) = 2 (log 2 − u − softplus(−2 u)): no difference that vanishes.
        density = (0.5 * noise.square() + (_HALF_LOG_TAU + 2 * math.log(2))).add_(log_std)
        log_prob = (2 * (raw + F.softplus(-2 * raw)) - density).sum(-1)
        return Choices(raw.tanh(), log_prob, None)

    def target_entropy(self, observation: Tree) -> float:
        """−d nats (arXiv:1812.05905, appendix D)."""
        return -float(self.in_box.size)


class CategoricalPolicy(nn.Module):
    """One of n actions, with probabilities; what the observation's action mask forbids has none."""

    def __init__(self, spec: Spec, hidden: Sequence[int], activation: str, rng: torch.Generator) -> None:
        super().__init__()
        self.encoder = Encoder(spec.observation, rng)
        self.distribution = Categorical(spec.action)
        self.has_mask = _has_mask(spec)
        size = self.distribution.size
        self.mlp = MLP(self.encoder.outputs, hidden, size, gain=_SMALL, activation=activation, rng=rng)

    def _masked(self, logits: Tensor, observation: Tree) -> Tensor:
        return self.distribution.masked(logits, observation[MASK]) if self.has_mask else logits

    def noise(self, *leading: int, epsilon: float, rng: torch.Generator) -> Tensor | Exploration:
        return _exploring(self.distribution.noise(*leading, rng=rng), None, epsilon, rng)

    def act(self, observation: Tree, noise: Tensor | Exploration | None) -> Decision:
        logits: Tensor = self.mlp(self.encoder(observation))
        drawn = noise.noise if isinstance(noise, Exploration) else noise
        if isinstance(noise, Exploration):  # among those that are allowed
            logits = logits.masked_fill(noise.explore, 0.0)
        action = self.distribution.draw(self._masked(logits, observation), drawn)
        return Decision(action=action, environment_action=self.distribution.environment_action(action))

    def choices(self, observation: Tree, noise: Tensor | None = None) -> Choices:
        """All n actions: there is nothing to draw."""
        log_prob = self._masked(self.mlp(self.encoder(observation)), observation).log_softmax(-1)
        return Choices(None, log_prob, log_prob.exp())

    def target_entropy(self, observation: Tree) -> float | Tensor:
        """0.98 of the largest that there is, log n nats (arXiv:1910.07207): n are those that are allowed."""
        if not self.has_mask:
            return 0.98 * math.log(self.distribution.size)
        allowed = observation[MASK].bool().sum(-1)
        return 0.98 * torch.where(allowed == 0, self.distribution.size, allowed).float().log()


class DeterministicPolicy(nn.Module):
    """One action for each observation, to which noise is added where it explores."""

    def __init__(self, spec: Spec, hidden: Sequence[int], activation: str, rng: torch.Generator) -> None:
        super().__init__()
        self.encoder = Encoder(spec.observation, rng)
        self.in_box = bounded(spec.action)
        size = self.in_box.size
        self.mlp = MLP(self.encoder.outputs, hidden, size, gain=_SMALL, activation=activation, rng=rng)

    def forward(self, observation: Tree) -> Tensor:
        """[..., d] between −1 and 1."""
        action: Tensor = self.mlp(self.encoder(observation))
        return action.tanh()

    def noise(self, *leading: int, scale: float, epsilon: float, rng: torch.Generator) -> Tensor | Exploration:
        """scale: the standard deviation of what is added, where a Box is 2 wide."""
        drawn = torch.randn(*leading, self.in_box.size, generator=rng).mul_(scale)
        return _exploring(drawn, self.in_box, epsilon, rng)

    def act(self, observation: Tree, noise: Tensor | Exploration | None) -> Decision:
        action = self(observation)
        drawn = noise.noise if isinstance(noise, Exploration) else noise
        if drawn is not None:
            action = (action + drawn).clamp_(-1, 1)
        return _decided(action, noise, self.in_box)


def _exploring(noise: Tensor, box: InBox | None, epsilon: float, rng: torch.Generator) -> Tensor | Exploration:
    """The noise [..., d], with what a share of epsilon of the actions is instead."""
    if not epsilon:
        return noise
    leading = noise.shape[:-1]
    explore = torch.rand(*leading, 1, generator=rng) < epsilon
    return Exploration(noise, explore, None if box is None else box.uniform(*leading, rng=rng))


def _decided(action: Tensor, noise: Tensor | Exploration | None, box: InBox) -> Decision:
    if isinstance(noise, Exploration):
        assert noise.random is not None
        action = torch.where(noise.explore, noise.random, action)
    return Decision(action=action, environment_action=box(action))


class _Stacked(torch.autograd.Function):
    """K equal stacks of layers, relu or tanh after each but the last, as one operation on all of them.

    x [B, inputs] → [K, B, outputs]; parameters: weights [K, inputs, outputs] and biases [K, 1, outputs] in turn. Where
    the parameters need no gradient, none is computed for them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, *parameters: Tensor) -> Tensor:
        y, last = x.expand(parameters[0].shape[0], *x.shape), len(parameters) - 2
        held = [x]
        for layer in range(0, len(parameters), 2):
            y = torch.baddbmm(parameters[layer + 1], y, parameters[layer])
            if layer < last:
                held.append(activation.apply_(y))
        ctx.activation = activation
        ctx.save_for_backward(*held, *parameters[::2])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        layers = len(ctx.saved_tensors) // 2
        held, weights = ctx.saved_tensors[:layers], ctx.saved_tensors[layers:]
        learns = ctx.needs_input_grad[2]
        given: list[Tensor | None] = []
        for layer in reversed(range(layers)):
            if layer < layers - 1:
                gradient = ctx.activation.backward(gradient, held[layer + 1])
            inputs = held[layer] if layer else held[0].expand(gradient.shape[0], *held[0].shape)
            if learns:
                given += [gradient.sum(1, keepdim=True), torch.bmm(inputs.transpose(1, 2), gradient)]
            else:
                given += [None, None]
            if layer or ctx.needs_input_grad[0]:
                gradient = torch.bmm(gradient, weights[layer].transpose(1, 2))
        return (gradient.sum(0) if ctx.needs_input_grad[0] else None, None, *reversed(given))


class Stack(nn.Module):
    """K multilayer perceptrons of the same sizes and with weights of their own, evaluated together on one input.

    Operations on all of them begin once, where networks one after the other begin K times as many.
    """

    def __init__(
        self, count: int, inputs: int, hidden: Sequence[int], out: int, *, activation: str, rng: torch.Generator
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation={activation!r}: choose one of {', '.join(ACTIVATIONS)}.")
        self.activation = activation
        sizes = [inputs, *hidden, out]
        self.layers = nn.ParameterList()
        for number, (before, after) in enumerate(pairwise(sizes)):
            gain = 1.0 if number == len(hidden) else math.sqrt(2)
            weights = [linear(before, after, gain, rng).weight.detach().t() for _ in range(count)]
            self.layers.append(nn.Parameter(torch.stack(weights)))
            self.layers.append(nn.Parameter(torch.zeros(count, 1, after)))

    def forward(self, x: Tensor, *, frozen: bool = False, first: int | None = None) -> Tensor:
        """[B, inputs] → [K, B, out]. frozen: for gradients with respect to x alone. first: only so many of the K."""
        # Past the list of parameters: to ask it for each takes as long as a small layer computes.
        parameters: list[Tensor] = list(cast(dict[str, Tensor], self.layers._parameters).values())
        if first is not None:
            parameters = [parameter[:first] for parameter in parameters]
        if frozen:
            parameters = [parameter.detach() for parameter in parameters]
        y: Tensor = _Stacked.apply(x, ACTIVATIONS[self.activation], *parameters)  # type: ignore[no-untyped-call]
        return y


class Critics(nn.Module):
    """K action-values of the same observations, on one encoder: of an action of a Box, or of all n of a Discrete."""

    def __init__(self, spec: Spec, count: int, hidden: Sequence[int], activation: str, rng: torch.Generator) -> None:
        super().__init__()
        self.encoder = Encoder(spec.observation, rng)
        inputs, out = self.encoder.outputs, 1
        self.discrete = isinstance(spec.action, Discrete)
        if self.discrete:
            out = spec.action.n
        else:
            inputs += math.prod(spec.action.shape)
        self.stack = Stack(count, inputs, hidden, out, activation=activation, rng=rng)

    def forward(
        self, observation: Tree, action: Tensor | None, *, frozen: bool = False, first: int | None = None
    ) -> Tensor:
        """Q [K, B] of actions [B, d] of a Box or [B] of a Discrete space; without an action, of all n, [K, B, n].

        frozen: for gradients with respect to the action alone. first: only so many of the K.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            x = self.encoder(observation)
        if not self.discrete:
            assert action is not None
            x = torch.cat((x, action), -1)
        q: Tensor = self.stack(x, frozen=frozen, first=first)
        if not self.discrete:
            return q.squeeze(-1)
        if action is None:
            return q
        return q.gather(-1, action.expand(q.shape[0], -1).unsqueeze(-1)).squeeze(-1)


class OffPolicyNet(nn.Module):
    """A policy, its critics, and their targets, which follow slowly; one of the policy too, where it is asked for."""

    def __init__(
        self, policy: nn.Module, critics: Critics, *, target_policy: bool = False, log_alpha: float | None = None
    ) -> None:
        super().__init__()
        self.policy, self.critics = policy, critics
        self.target_critics: Critics = copy.deepcopy(critics).requires_grad_(False)
        self.target_policy = copy.deepcopy(policy).requires_grad_(False) if target_policy else None
        self.log_alpha = None if log_alpha is None else nn.Parameter(torch.tensor(log_alpha))

    def follow(self, tau: float) -> None:
        """Move each target by this share of the way to what it follows (arXiv:1509.02971, algorithm 1)."""
        targets: list[Tensor] = list(self.target_critics.parameters())
        online: list[Tensor] = list(self.critics.parameters())
        if self.target_policy is not None:
            targets += self.target_policy.parameters()
            online += self.policy.parameters()
        torch._foreach_lerp_(targets, online, tau)


def _has_mask(spec: Spec) -> bool:
    """Whether observations say which of n actions are allowed. Raises ConfigError for a mask of another shape."""
    if not isinstance(spec.observation, dict) or MASK not in spec.observation:
        return False
    space: Space = spec.observation[MASK]
    if space.shape != (spec.action.n,):
        raise ConfigError(
            f"the observations hold {MASK}: {space}; of {spec.action} shape ({spec.action.n},) was expected."
        )
    return True
