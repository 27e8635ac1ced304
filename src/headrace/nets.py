"""Networks: stacks of layers, a memory, and a policy with a value beside it.

Every weight is drawn from a generator that is handed in: building a network moves no global one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.distributions import distribution_over
from headrace.errors import ConfigError
from headrace.spaces import MASK, Box, Discrete, MultiDiscrete, Space, Spaces, Spec, leaves
from headrace.struct import NAMESPACE, Tree

__all__ = ["GRU", "MLP", "ActorCritic", "Encoder"]


def tanh_(x: Tensor) -> Tensor:
    """The hyperbolic tangent in place; on the CPU by NumPy: 12 µs for [512, 64] where PyTorch 2.13 takes 84."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return x.tanh_()
    held = x.numpy()
    np.tanh(held, out=held)
    return x


class Activation(NamedTuple):
    """What follows a layer: in place, and what a gradient by its output y becomes."""

    apply_: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "tanh": Activation(tanh_, torch.ops.aten.tanh_backward.default),
    "relu": Activation(torch.relu_, lambda gradient, y: torch.ops.aten.threshold_backward.default(gradient, y, 0)),
}


class _Layers(torch.autograd.Function):
    """Linear layers with an activation after each but perhaps the last, as one operation.

    What layers of this size compute takes less time than recording and replaying them one by one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, activated: int, *parameters: Tensor) -> Tensor:
        outputs = list(_layers(x, activation, activated, parameters))
        ctx.activation, ctx.activated = activation, activated
        ctx.save_for_backward(x, *outputs[:activated], *parameters[::2])
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        activation, activated, saved = ctx.activation, ctx.activated, ctx.saved_tensors
        held, weights = saved[: activated + 1], saved[activated + 1 :]  # the input, and what follows each activation
        given: list[Tensor] = []
        for layer in reversed(range(len(weights))):
            if layer < activated:
                gradient = activation.backward(gradient, held[layer + 1])
            inputs = held[layer]
            # The narrow side first: for 4 inputs and 64 outputs that takes 8 µs, the other way round 40.
            narrow = inputs.shape[1] < gradient.shape[1]
            given += [gradient.sum(0), (inputs.t() @ gradient).t() if narrow else gradient.t() @ inputs]
            if layer or ctx.needs_input_grad[0]:
                gradient = gradient @ weights[layer]
        return (gradient if ctx.needs_input_grad[0] else None, None, None, *reversed(given))


def _layers(x: Tensor, activation: Activation, activated: int, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """The output of each layer; the first `activated` are followed by the activation."""
    for layer, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
        x = torch.addmm(bias, x, weight.t())
        if layer < activated:
            x = activation.apply_(x)
        yield x


def linear(inputs: int, outputs: int, gain: float, rng: torch.Generator) -> nn.Linear:
    """A layer with orthogonal weights of this gain and biases of 0 (Saxe et al. 2014, arXiv:1312.6120)."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    nn.init.orthogonal_(layer.weight, gain, generator=rng)
    nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Module):
    """Linear layers with an activation after each; with `out`, a last layer of that many outputs without one.

    gain: of the last layer's weights; small for a policy, so that it begins near uniform.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        out: int | None = None,
        *,
        gain: float = 1.0,
        activation: str = "tanh",
        rng: torch.Generator,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation={activation!r}: choose one of {', '.join(ACTIVATIONS)}.")
        self.activation = activation
        sizes = [inputs, *hidden]
        self.hidden = nn.ModuleList(linear(a, b, math.sqrt(2), rng) for a, b in pairwise(sizes))
        self.out = None if out is None else linear(sizes[-1], out, gain, rng)
        self.outputs = sizes[-1] if out is None else out

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]. Differentiable once."""
        # Asking a module for its weights takes as long as a small layer computes: they are read past it.
        layers: Any = self._modules
        parameters: list[Tensor] = []
        for layer in layers["hidden"]._modules.values():
            parameters += layer._parameters.values()
        activated = len(parameters) // 2
        if (out := layers.get("out")) is not None:
            parameters += out._parameters.values()
        if not parameters:
            return x
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        activation = ACTIVATIONS[self.activation]
        if torch.is_grad_enabled():
            y: Tensor = _Layers.apply(rows, activation, activated, *parameters)  # type: ignore[no-untyped-call]
        else:
            y = rows
            for layer in range(0, len(parameters), 2):
                y = F.linear(y, parameters[layer], parameters[layer + 1])
                if layer < 2 * activated:
                    y = activation.apply_(y)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.outputs)


class Encoder(nn.Module):
    """Observations as vectors of float32: a Box flattened, integers as one-hot, a dict or tuple one after the other.

    The action mask is no observation: it tells what is allowed, not what there is.
    """

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        self.kept = [path != f"[{MASK!r}]" for path, _ in leaves(spaces)]
        self.spaces = [space for (_, space), kept in zip(leaves(spaces), self.kept, strict=True) if kept]
        self.outputs = sum(map(_width, self.spaces))
        if not self.outputs:
            raise ConfigError(f"there is nothing to observe in {spaces}.")
        # Most observations are vectors already: nothing to do.
        self.plain = isinstance(spaces, Box) and len(spaces.shape) == 1 and spaces.dtype == torch.float32

    def forward(self, observation: Tree) -> Tensor:
        """[..., *shape] → [..., outputs]."""
        found = optree.tree_leaves(observation, namespace=NAMESPACE)
        seen = [leaf for leaf, kept in zip(found, self.kept, strict=True) if kept]
        vectors = [_vector(space, leaf) for space, leaf in zip(self.spaces, seen, strict=True)]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1)


def _width(space: Space) -> int:
    """How many numbers a value of this space becomes."""
    match space:
        case Discrete():
            return space.n
        case MultiDiscrete():
            return sum(space.sizes)
    return math.prod(space.shape)


def _vector(space: Space, value: Tensor) -> Tensor:
    match space:
        case Discrete():
            return F.one_hot(value - space.start, space.n).float()
        case MultiDiscrete():
            columns = zip(value.unbind(-1), space.starts, space.sizes, strict=True)
            return torch.cat([F.one_hot(column - start, n) for column, start, n in columns], -1).float()
    if len(space.shape) != 1:
        value = value.reshape(*value.shape[: value.ndim - len(space.shape)], _width(space))
    return value.float()


def _check_mask(spec: Spec, choices: int) -> bool:
    """Whether the observations hold an action mask. Raises ConfigError for one that is not as it should be."""
    if not isinstance(spec.observation, dict) or MASK not in spec.observation:
        return False
    space = spec.observation[MASK]
    if getattr(space, "shape", None) != (choices,):
        raise ConfigError(
            f"the observations hold {MASK}: {space}; for the actions {spec.action} a mask of shape ({choices},) was "
            "expected: for every value of a Discrete or MultiDiscrete whether it is allowed, for every element of a "
            "MultiBinary whether 0 is, and whether 1 is."
        )
    return True


class GRU(nn.Module):
    """A gated recurrent unit (Cho et al. 2014, arXiv:1406.1078) whose memory is cleared where an episode begins."""

    def __init__(self, inputs: int, size: int, rng: torch.Generator) -> None:
        super().__init__()
        self.size = size
        self.cell: nn.GRUCell = nn.utils.skip_init(nn.GRUCell, inputs, size)  # type: ignore[no-untyped-call]
        for weight in (self.cell.weight_ih, self.cell.weight_hh):
            for gate in weight.detach().chunk(3):
                nn.init.orthogonal_(gate, generator=rng)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)

    def forward(self, x: Tensor, memory: Tensor, first: Tensor) -> Tensor:
        """The outputs [T, B, size] for inputs [T, B, inputs], from the memory [B, size] before them.

        first [T, B] bool: a row that begins an episode, before which the memory is cleared.
        """
        keep = (~first).unsqueeze(-1).to(x.dtype)
        outputs = []
        for row, kept in zip(x.unbind(), keep.unbind(), strict=True):
            memory = self.cell(row, memory * kept)
            outputs.append(memory)
        return torch.stack(outputs)


class ActorCritic(nn.Module):
    """A policy and a value, each with a tower of its own or on a shared one, with a memory below them on request."""

    def __init__(
        self,
        spec: Spec,
        hidden: Sequence[int] = (64, 64),
        *,
        shared: bool = False,
        memory: str | None = None,
        activation: str = "tanh",
        squashed: bool = False,
        rng: torch.Generator,
    ) -> None:
        super().__init__()
        if memory not in (None, "gru"):
            raise ConfigError(f'memory={memory!r}: choose "gru" or None.')
        if memory and not hidden:
            raise ConfigError("memory='gru' has as many units as hidden's first layer; hidden is empty.")
        self.encoder = Encoder(spec.observation)
        self.plain = self.encoder.plain
        self.distribution = distribution_over(spec.action, squashed)
        self.has_mask = _check_mask(spec, self.distribution.choices)
        inputs = self.encoder.outputs
        self.gru = GRU(inputs, hidden[0], rng) if memory else None
        inputs = self.gru.size if self.gru else inputs
        self.trunk = MLP(inputs, hidden, activation=activation, rng=rng) if shared else None
        tower: Sequence[int] = () if shared else hidden
        inputs = self.trunk.outputs if self.trunk else inputs
        self.policy = MLP(inputs, tower, self.distribution.size, gain=0.01, activation=activation, rng=rng)
        self.value = MLP(inputs, tower, 1, activation=activation, rng=rng)

    def remember(self, observation: Tree, memory: Tensor) -> Tensor:
        """The memory [B, size] after one more observation [B, ...]."""
        assert self.gru is not None
        remembered: Tensor = self.gru.cell(self.encoder(observation), memory)
        return remembered

    def memories(self, observation: Tree, memory: Tensor, first: Tensor) -> Tensor:
        """The memories [T, B, size] after each of the observations [T, B, ...], from the one [B, size] before them."""
        assert self.gru is not None
        remembered: Tensor = self.gru(self.encoder(observation), memory, first)
        return remembered

    def features(self, observation: Tree, memory: Tensor | None = None, first: Tensor | None = None) -> Tensor:
        """What both towers begin from. With a memory, observation is [T, B, ...], memory [B, size] and first [T, B]."""
        if self.gru is None:
            return self.above(observation if self.plain else self.encoder(observation))
        assert memory is not None
        assert first is not None
        return self.above(self.memories(observation, memory, first))

    def above(self, x: Tensor) -> Tensor:
        """What both towers begin from, above the encoded observations or the memories of them."""
        return x if self.trunk is None else self.trunk(x)

    def logits(self, features: Tensor, observation: Tree = None) -> Tensor:
        """What the distribution is picked by, [..., size]; what the observation's action mask forbids has no chance.

        observation: needed where it holds a mask.
        """
        logits: Tensor = self.policy(features)
        return self.distribution.masked(logits, observation[MASK]) if self.has_mask else logits

    def values(self, features: Tensor) -> Tensor:
        """The value [...] of each observation."""
        value: Tensor = self.value(features)
        return value.squeeze(-1)
