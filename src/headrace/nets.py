"""Networks: stacks of layers, convolutions for images, a memory, and a policy with a value beside it.

Every weight is drawn from a generator that is handed in: building a network moves no global one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeGuard, cast

import numpy as np
import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.data import Mean
from headrace.distributions import by_numpy, distribution_over
from headrace.errors import ConfigError
from headrace.normalizers import ObservationNormalizer, RewardNormalizer
from headrace.spaces import MASK, Box, Discrete, MultiDiscrete, Space, Spaces, Spec, leaves
from headrace.struct import NAMESPACE, Tree

__all__ = ["CNN", "GRU", "MLP", "ActorCritic", "Encoder", "is_image"]

Array: TypeAlias = np.ndarray[Any, Any]

SIDE = 36
"""Pixels that a picture has on either side at least: fewer leave nothing for the last convolution."""
CHUNK = 128
"""Images that are looked at together where no gradient is asked for: what they come to then stays in the cache."""
SMALL = 2**18
"""Multiplications of a layer up to which NumPy computes it, where its OpenBLAS takes one thread on any machine."""
FEW = 32
"""Rows that count at least: a layer of one row is a matrix times a vector, for which OpenBLAS takes threads earlier."""


def tanh_(x: Tensor) -> Tensor:
    """The hyperbolic tangent in place; on the CPU by NumPy: 12 µs for [512, 64] where PyTorch 2.13 takes 84."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return x.tanh_()
    held = x.numpy()
    np.tanh(held, out=held)
    return x


class Activation(NamedTuple):
    """What follows a layer: in place, the same of an array (y, out), and what a gradient by its output y becomes."""

    apply_: Callable[[Tensor], Tensor]
    array: Callable[[Array, Array], object]
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "tanh": Activation(tanh_, np.tanh, torch.ops.aten.tanh_backward.default),
    "relu": Activation(
        torch.relu_,
        lambda y, out: np.maximum(y, 0, out=out),
        lambda gradient, y: torch.ops.aten.threshold_backward.default(gradient, y, 0),
    ),
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


class _Arrays:
    """NumPy's views of weights, transposed, and biases: what is copied into the parameters is seen in them."""

    def __init__(self) -> None:
        self._held: tuple[list[int], list[tuple[Array, Array]]] = [], []

    def __reduce__(self) -> tuple[Any, ...]:
        return _Arrays, ()  # a copy of the module has memory of its own

    def of(self, parameters: Sequence[Tensor]) -> list[tuple[Array, Array]]:
        """The pair of each layer; made anew where a parameter lies elsewhere than before."""
        addresses = [parameter.data_ptr() for parameter in parameters]
        if addresses != self._held[0]:
            arrays = [parameter.detach().numpy().T for parameter in parameters]
            self._held = addresses, list(zip(arrays[::2], arrays[1::2], strict=True))
        return self._held[1]


def linear(inputs: int, outputs: int, gain: float, rng: torch.Generator) -> nn.Linear:
    """A layer with orthogonal weights of this gain and biases of 0 (Saxe et al. 2014, arXiv:1312.6120)."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    nn.init.orthogonal_(layer.weight, gain, generator=rng)
    nn.init.zeros_(layer.bias)
    return layer


def convolution(inputs: int, outputs: int, size: int, stride: int, rng: torch.Generator) -> nn.Conv2d:
    """A convolution without padding, begun as `linear` with gain √2."""
    layer: nn.Conv2d = nn.utils.skip_init(nn.Conv2d, inputs, outputs, size, stride)  # type: ignore[no-untyped-call]
    nn.init.orthogonal_(layer.weight, math.sqrt(2), generator=rng)
    assert layer.bias is not None
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
        layers = [*self.hidden] if self.out is None else [*self.hidden, self.out]
        self._largest = max((layer.weight.numel() for layer in layers), default=0)  # weights of a layer
        self._arrays = _Arrays()

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
        y: Tensor
        small = activated and max(rows.shape[0], FEW) * self._largest <= SMALL
        if small and by_numpy(rows) and parameters[0].dtype is rows.dtype:
            y = self._by_numpy(rows, activated, parameters)
        elif torch.is_grad_enabled():
            y = _Layers.apply(rows, ACTIVATIONS[self.activation], activated, *parameters)  # type: ignore[no-untyped-call]
        else:
            y = rows
            for layer in range(0, len(parameters), 2):
                y = F.linear(y, parameters[layer], parameters[layer + 1])
                if layer < 2 * activated:
                    y = ACTIVATIONS[self.activation].apply_(y)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.outputs)

    def _by_numpy(self, rows: Tensor, activated: int, parameters: Sequence[Tensor]) -> Tensor:
        """The same without a gradient in NumPy: it begins sooner, and leaves more of the cache to the environments."""
        activation = ACTIVATIONS[self.activation].array
        y = rows.numpy()
        for weight, bias in self._arrays.of(parameters):
            y = np.dot(y, weight)
            y += bias
            if activated:
                activation(y, y)
                activated -= 1
        return torch.from_numpy(y)


def is_image(space: Space) -> TypeGuard[Box]:
    """Whether it is a Box of three axes with finite bounds and at least 36 pixels on either side.

    The channels are the first axis where that is shorter than the last one, else the last.
    """
    if not isinstance(space, Box) or len(space.shape) != 3 or not space.bounded:
        return False
    first, middle, last = space.shape
    return min(middle, max(first, last)) >= SIDE


class CNN(nn.Module):
    """The convolutions of Mnih et al. 2015 (doi:10.1038/nature14236) and a layer of 512 units, each followed by a relu.

    It is given images as the environment shows them; here they become float32, scaled so that the lowest of the Box's
    bounds is 0 and the highest 1.
    """

    outputs = 512

    def __init__(self, space: Box, rng: torch.Generator) -> None:
        super().__init__()
        first, middle, last = space.shape
        self.channels_first = first < last
        channels, sides = (first, (middle, last)) if self.channels_first else (last, (first, middle))
        self.low = float(space.low.min())
        self.span = float(space.high.max()) - self.low or 1.0
        layers = ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
        self.convolutions = nn.ModuleList(convolution(*sizes, rng) for sizes in layers)
        for _, _, size, stride in layers:
            sides = ((sides[0] - size) // stride + 1, (sides[1] - size) // stride + 1)
        self.out = linear(64 * sides[0] * sides[1], self.outputs, math.sqrt(2), rng)

    def forward(self, image: Tensor) -> Tensor:
        """[..., *shape] → [..., 512]."""
        leading = image.shape[:-3]
        rows = image.reshape(-1, *image.shape[-3:])
        if not self.channels_first:
            rows = rows.permute(0, 3, 1, 2)
        if not torch.is_grad_enabled() and len(rows) > CHUNK:
            features = torch.cat([self._look(part) for part in torch.split(rows, CHUNK)])
        else:
            features = self._look(rows)
        return features.view(*leading, self.outputs)

    def _look(self, rows: Tensor) -> Tensor:
        """[N, channels, height, width] → [N, 512]."""
        if torch.is_grad_enabled() and rows.device.type == "cpu":
            # With channels last, forwards and backwards take 147 ms for 256 images of 4 × 84 × 84 instead of 208.
            rows = rows.contiguous(memory_format=torch.channels_last)
        x = self.scaled(rows)
        for layer in self.convolutions:
            x = layer(x).relu_()
        x = x.permute(0, 2, 3, 1).flatten(1)  # no copy where the channels are last in memory
        return F.linear(x, self.out.weight, self.out.bias).relu_()

    def scaled(self, image: Tensor) -> Tensor:
        """The same image as float32 from 0 to 1."""
        x = image.to(torch.float32, copy=True)
        if self.low:
            x.sub_(self.low)
        return x if self.span == 1 else x.div_(self.span)


class Encoder(nn.Module):
    """Observations as vectors of float32: an image by a CNN of its own, all else by its numbers, one after the other.

    A Box is flattened, integers are one-hot, dicts and tuples joined; images come first. The action mask is no
    observation: it tells what is allowed, not what there is.

    rng: for the layers that images need. normalize: let what lies in boxes of floats that are no images be normalised.
    Raises ConfigError if there is nothing to observe, or nothing to normalise.
    """

    def __init__(self, spaces: Spaces, rng: torch.Generator | None = None, *, normalize: bool = False) -> None:
        super().__init__()
        kept = [(place, space) for place, (path, space) in enumerate(leaves(spaces)) if path != f"[{MASK!r}]"]
        self.images = [place for place, space in kept if is_image(space)]
        self.vectors = [(place, space) for place, space in kept if not is_image(space)]
        rng = rng or torch.Generator()
        self.cnns = nn.ModuleList(CNN(space, rng) for _, space in kept if is_image(space))
        widths = [_width(space) for _, space in self.vectors]
        self.outputs = sum(widths) + CNN.outputs * len(self.images)
        if not self.outputs:
            raise ConfigError(f"there is nothing to observe in {spaces}.")
        floats = [isinstance(space, Box) and space.dtype.is_floating_point for _, space in self.vectors]
        wide = normalize and any(space.dtype == torch.float64 for _, space in self.vectors)
        self.dtype = torch.float64 if wide else torch.float32  # of the vector before it is normalised
        self.normalizer = None
        if normalize:
            if not any(floats):
                raise ConfigError(
                    f"normalize_observation=True: there is nothing to normalise in {spaces}; boxes of floats that are "
                    "no images are normalised."
                )
            normalized = torch.tensor(floats).repeat_interleave(torch.tensor(widths))
            self.normalizer = ObservationNormalizer(normalized, self.dtype)
        # Most observations are vectors already: nothing to do, but perhaps for their dtype.
        self.direct = isinstance(spaces, Box) and len(spaces.shape) == 1 and not normalize

    def forward(self, observation: Tree) -> Tensor:
        """[..., *shape] → [..., outputs]."""
        if self.direct:
            return cast(Tensor, observation).to(self.dtype)
        found = _leaves(observation)
        parts = [cnn(found[place]) for place, cnn in zip(self.images, self.cnns, strict=True)]
        if self.vectors:
            vector = self._joined(found)
            parts.append(vector if self.normalizer is None else self.normalizer(vector))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def move(self, observation: Tree, weight: Tensor, mean: Mean) -> None:
        """Let the normaliser take in the observations [..., *shape] whose weight [...] is above 0."""
        if self.normalizer is not None:
            self.normalizer.move(self._joined(_leaves(observation)), weight, mean)

    def _joined(self, found: Sequence[Tensor]) -> Tensor:
        """All but the images as one vector [..., N]."""
        parts = [_vector(space, found[place], self.dtype) for place, space in self.vectors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _leaves(tree: Tree) -> list[Any]:
    return [tree] if isinstance(tree, Tensor) else optree.tree_leaves(tree, namespace=NAMESPACE)


def _width(space: Space) -> int:
    """How many numbers a value of this space becomes."""
    match space:
        case Discrete():
            return space.n
        case MultiDiscrete():
            return sum(space.sizes)
    return math.prod(space.shape)


def _vector(space: Space, value: Tensor, dtype: torch.dtype) -> Tensor:
    match space:
        case Discrete():
            return F.one_hot(value - space.start, space.n).to(dtype)
        case MultiDiscrete():
            columns = zip(value.unbind(-1), space.starts, space.sizes, strict=True)
            return torch.cat([F.one_hot(column - start, n) for column, start, n in columns], -1).to(dtype)
    if len(space.shape) != 1:
        value = value.reshape(*value.shape[: value.ndim - len(space.shape)], _width(space))
    return value.to(dtype)


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


def floats(x: Tensor) -> Tensor:
    """The same numbers as float32; where it is acted by NumPy, which begins sooner."""
    if x.dtype is torch.float32 or not x.is_cpu or not torch.is_inference_mode_enabled():
        return x.float()
    return torch.from_numpy(x.numpy().astype(np.float32))


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
    """A policy and a value, each with a tower of its own or on a shared one, with a memory below them on request.

    hidden: None for two layers of 64, or none above images. What encodes the observations, and a memory, both share.
    """

    def __init__(
        self,
        spec: Spec,
        hidden: Sequence[int] | None = None,
        *,
        shared: bool = False,
        memory: str | None = None,
        activation: str = "tanh",
        squashed: bool = False,
        normalize_observation: bool = False,
        normalize_reward: bool = False,
        rng: torch.Generator,
    ) -> None:
        super().__init__()
        if memory not in (None, "gru"):
            raise ConfigError(f'memory={memory!r}: choose "gru" or None.')
        self.encoder = Encoder(spec.observation, rng, normalize=normalize_observation)
        self.direct = self.encoder.direct
        self.reward_normalizer = RewardNormalizer() if normalize_reward else None
        if hidden is None:
            hidden = () if self.encoder.images else (64, 64)
        if memory and not hidden and not self.encoder.images:
            raise ConfigError("memory='gru' has as many units as hidden's first layer; hidden is empty.")
        self.distribution = distribution_over(spec.action, squashed)
        self.has_mask = _check_mask(spec, self.distribution.choices)
        inputs = self.encoder.outputs
        self.gru = GRU(inputs, hidden[0] if hidden else CNN.outputs, rng) if memory else None
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
            # Past the encoder where that would only do this: calling a module costs more.
            return self.above(floats(cast(Tensor, observation)) if self.direct else self.encoder(observation))
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
