"""Networks of action values: plain or dueling, of means or of distributions, with noise in their layers on request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.distributions import by_numpy
from headrace.errors import ConfigError
from headrace.nets import ACTIVATIONS, FEW, MLP, SMALL, Encoder, _check_mask
from headrace.spaces import MASK, Box, Discrete, Spec
from headrace.struct import Tree

__all__ = [
    "DISTRIBUTIONAL",
    "NoisyLinear",
    "NoisyMLP",
    "OnlineAndTarget",
    "QNet",
    "factorised_noise",
    "regress",
    "regresses",
]

DISTRIBUTIONAL = ("none", "c51", "quantile")
"""What a network tells of an action's return: its mean, the probabilities of fixed values, or its quantiles."""

Array: TypeAlias = np.ndarray[Any, Any]


def factorised_noise(*shape: int, rng: torch.Generator) -> Tensor:
    """sgn(x)·√|x| of standard normal x (Fortunato et al. 2018, arXiv:1706.10295, eq. 10–11), float32 on the CPU."""
    x = torch.randn(*shape, generator=rng)
    return x.abs().sqrt_().copysign_(x)


class NoisyLinear(nn.Module):
    """A linear layer whose weights are noisy, by as much as it learns (Fortunato et al. 2018, eq. 9).

        y = (μ_w + σ_w·ε_out ε_inᵀ) x + μ_b + σ_b·ε_out

    sigma0: what the first σ are, times the root of the inputs (§3.2).
    """

    def __init__(self, inputs: int, outputs: int, sigma0: float, rng: torch.Generator) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound, generator=rng))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound, generator=rng))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma0 * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma0 * bound))

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """[B, inputs] → [B, outputs]. noise [B, inputs + outputs]: ε of each row, which is transformed already."""
        y = F.linear(x, self.weight, self.bias)
        if noise is None:
            return y
        # The noisy part of the weights is never built: (ε_out ε_inᵀ ∘ σ) x = ε_out ∘ (σ (ε_in ∘ x)).
        below, above = noise[:, : self.inputs], noise[:, self.inputs :]
        return torch.addcmul(y, F.linear(x * below, self.weight_sigma, self.bias_sigma), above)


class NoisyMLP(nn.Module):
    """Noisy linear layers with an activation after each but the last."""

    def __init__(self, sizes: Sequence[int], sigma0: float, activation: str, rng: torch.Generator) -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList(NoisyLinear(inputs, outputs, sigma0, rng) for inputs, outputs in pairwise(sizes))
        self.noise_sizes = [sum(pair) for pair in pairwise(sizes)]

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """[B, inputs] → [B, outputs]. noise [B, Σ (inputs + outputs)]: of one layer after the other."""
        if by_numpy(x):
            return torch.from_numpy(self._by_numpy(x.numpy(), None if noise is None else noise.numpy()))
        parts = [None] * len(self.layers) if noise is None else noise.split(self.noise_sizes, -1)  # type: ignore[no-untyped-call]
        for number, (layer, part) in enumerate(zip(self.layers, parts, strict=True)):
            if number:
                x = torch.tanh(x) if self.activation == "tanh" else torch.relu(x)
            x = layer(x, part)
        return x

    def _by_numpy(self, x: Array, noise: Array | None) -> Array:
        """The same without a gradient in NumPy, which begins each of these small operations sooner."""
        used = 0
        for number, layer in enumerate(self.layers):
            weight, bias, weight_sigma, bias_sigma = (held.detach().numpy() for held in layer._parameters.values())  # type: ignore[union-attr]
            if number:
                ACTIVATIONS[self.activation].array(x, x)
            y = np.dot(x, weight.T)
            y += bias
            if noise is not None:
                middle, end = used + weight.shape[1], used + sum(weight.shape)
                noisy = np.dot(x * noise[:, used:middle], weight_sigma.T)
                noisy += bias_sigma
                noisy *= noise[:, middle:end]
                y += noisy
                used = end
            x = y
        return x


class QNet(nn.Module):
    """The values of n actions, or the distributions of their returns.

    hidden: None for two layers of 64, or none above images. Dueling or noisy, the last hidden layer and the outputs are
    what is doubled or noisy; the layers below are shared and without noise.
    distributional: one of `DISTRIBUTIONAL`. atoms: the values that "c51" gives probabilities of, from v_min to v_max,
    or how many quantiles there are.
    sigma0: None for layers without noise.
    Raises ConfigError for actions that are not Discrete, and for a mask or an activation that is not as it should be.
    """

    def __init__(
        self,
        spec: Spec,
        hidden: Sequence[int] | None = None,
        *,
        activation: str = "relu",
        dueling: bool = False,
        distributional: str = "none",
        atoms: int = 1,
        v_min: float = 0.0,
        v_max: float = 0.0,
        sigma0: float | None = None,
        rng: torch.Generator,
    ) -> None:
        super().__init__()
        if not isinstance(spec.action, Discrete):
            fitting = "SAC, TD3 or PPO" if isinstance(spec.action, Box) else "PPO"
            raise ConfigError(f"DQN chooses one of n actions, a Discrete space; given {spec.action}. Use {fitting}.")
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation={activation!r}: choose one of {', '.join(ACTIVATIONS)}.")
        self.n, self.start = spec.action.n, spec.action.start
        self.has_mask = _check_mask(spec, self.n)
        self.encoder = Encoder(spec.observation, rng)
        self.direct = self.encoder.direct
        self.distributional, self.dueling, self.noisy = distributional, dueling, sigma0 is not None
        self.atoms = 0 if distributional == "none" else atoms
        if distributional == "c51":
            self.register_buffer("support", torch.linspace(v_min, v_max, atoms), persistent=False)
        if hidden is None:
            hidden = () if self.encoder.images else (64, 64)
        inputs, width = self.encoder.outputs, max(1, self.atoms)
        self.trunk = None
        if dueling or self.noisy:
            self.trunk = MLP(inputs, hidden[:-1], activation=activation, rng=rng)
            inputs, hidden = self.trunk.outputs, hidden[-1:]

        def stream(outputs: int) -> MLP | NoisyMLP:
            if sigma0 is not None:
                return NoisyMLP([inputs, *hidden, outputs], sigma0, activation, rng)
            return MLP(inputs, hidden, outputs, activation=activation, rng=rng)

        self.actions = stream(self.n * width)
        """The advantages of the actions, or their values where there is no other stream."""
        self.state = stream(width) if dueling else None
        streams = [each for each in (self.actions, self.state) if isinstance(each, NoisyMLP)]
        self.noise_sizes = [sum(each.noise_sizes) for each in streams]
        self.noise_size = sum(self.noise_sizes)
        """Numbers that each row's noise has."""

    support: Tensor

    def forward(self, observation: Tree, noise: Tensor | None = None) -> Tensor:
        """[B, n], or [B, n, atoms]: logits of the atoms or values of the quantiles. noise [B, noise_size]."""
        x = cast(Tensor, observation).float() if self.direct else self.encoder(observation)
        if self.trunk is not None:
            x = self.trunk(x)
        parts: Sequence[tuple[Tensor, ...]] = [(x,), (x,)]
        if noise is not None:
            parts = [(x, part) for part in noise.split(self.noise_sizes, -1)]  # type: ignore[no-untyped-call]
        q: Tensor = self.actions(*parts[0])
        if self.atoms:
            q = q.view(-1, self.n, self.atoms)
        if self.state is None:
            return q
        value: Tensor = self.state(*parts[1])
        if not self.atoms:
            return value + (q - q.mean(-1, keepdim=True))
        return value.unsqueeze(-2) + (q - q.mean(-2, keepdim=True))

    def values(self, told: Tensor) -> Tensor:
        """The value of each action [B, n] from what `forward` told."""
        if not self.atoms:
            return told
        return told.softmax(-1) @ self.support if self.distributional == "c51" else told.mean(-1)

    def allowed(self, values: Tensor, observation: Tree) -> Tensor:
        """The values [B, n], −∞ where the observation's action mask forbids the action."""
        return values.masked_fill(observation[MASK] == 0, -torch.inf) if self.has_mask else values

    def choose(self, values: Tensor, observation: Tree, keys: Tensor | None) -> Tensor:
        """The allowed action [B] of the highest value; of the highest key in rows whose keys [B, n] are not negative.

        Void where the mask forbids all.
        """
        if not by_numpy(values):
            if keys is not None:
                values = torch.where(keys[:, :1] >= 0, keys, values)
            return self.allowed(values, observation).argmax(-1)
        array = values.numpy()
        if keys is not None:
            drawn = keys.numpy()
            array = np.where(drawn[:, :1] >= 0, drawn, array)
        if self.has_mask:
            array = np.where(observation[MASK].numpy() != 0, array, -np.inf)
        return torch.from_numpy(np.asarray(array.argmax(-1)))


class Regression(NamedTuple):
    """What comes of moving the values of the actions taken towards targets."""

    total: Tensor
    """The sum over the rows of weight times loss, a scalar with a graph."""
    loss: Tensor
    """Of each row [B], detached."""
    error: Tensor
    """Value minus target [B], detached."""
    value: Tensor
    """Of the action taken [B], detached."""


class _WithGradient(torch.autograd.Function):
    """A number beside its gradient, which was computed with it."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        scale = float(factor)
        return None, None, *(ctx.gradients if scale == 1 else [gradient * scale for gradient in ctx.gradients])


def regresses(net: QNet, rows: int) -> bool:
    """Whether `regress` is for this network: small, on the CPU, without a second stream, noise or distributions."""
    mlp = net.actions
    if net.trunk is not None or net.atoms or not isinstance(mlp, MLP) or not net.direct:
        return False
    largest = max(layer.weight.numel() for layer in (*mlp.hidden, mlp.out))
    return max(rows, FEW) * largest <= SMALL and mlp.out.weight.is_cpu  # type: ignore[union-attr]


def regress(net: QNet, observation: Tensor, action: Tensor, target: Tensor, weight: Tensor, huber: bool) -> Regression:
    """The loss of a batch and its gradient in NumPy, layer by layer: half of what recording and replaying them takes.

    action, target, weight [B]. huber: `losses.huber` of each row, else `losses.squared_error`.
    """
    mlp = cast(MLP, net.actions)
    parameters = [held for layer in (*mlp.hidden, mlp.out) for held in layer._parameters.values()]
    arrays = mlp._arrays.of(cast(list[Tensor], parameters))
    rectified, last = mlp.activation == "relu", len(arrays) - 1
    held = [observation.float().numpy()]
    for number, (transposed, bias) in enumerate(arrays):
        y = np.dot(held[-1], transposed)
        y += bias
        if number < last:
            ACTIVATIONS[mlp.activation].array(y, y)
        held.append(y)
    rows, taken, weights = np.arange(len(y)), action.numpy(), weight.numpy()
    value = y[rows, taken]
    error = value - target.numpy()
    if huber:
        slope = error.clip(-1, 1)
        loss = slope * (error - 0.5 * slope)  # ½u² within ± 1, |u| − ½ beyond
    else:
        slope, loss = 2 * error, error * error
    gradient = np.zeros_like(y)
    gradient[rows, taken] = slope * weights
    gradients = []
    for number in range(last, -1, -1):
        if number < last:
            y = held[number + 1]
            gradient = gradient * (y > 0) if rectified else gradient * (1 - y * y)
        gradients += [gradient.sum(0), np.dot(gradient.T, held[number])]
        if number:
            gradient = np.dot(gradient, arrays[number][0].T)
    total = torch.from_numpy(np.asarray(np.dot(weights, loss)))
    total = _WithGradient.apply(total, [torch.from_numpy(found) for found in reversed(gradients)], *parameters)  # type: ignore[no-untyped-call]
    return Regression(total, *map(torch.from_numpy, (loss, error, value)))


class OnlineAndTarget(nn.Module):
    """A network that learns, and a copy that follows it."""

    def __init__(self, online: QNet) -> None:
        super().__init__()
        self.online = online
        self.target = deepcopy(online).requires_grad_(False)

    def follow(self, tau: float) -> None:
        """Move the target's weights this share of the way: θ⁻ + τ (θ − θ⁻); 1 copies."""
        weights: list[Tensor] = list(self.online.parameters())
        held: list[Tensor] = list(self.target.parameters())
        if tau == 1:
            torch._foreach_copy_(held, weights)
        else:
            torch._foreach_lerp_(held, weights, tau)
