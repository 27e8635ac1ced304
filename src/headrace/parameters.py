"""The parameters that a learner steps: one vector for each optimizer, on each of its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headrace.errors import ConfigError

__all__ = ["Group", "Replica"]

_ALIGN = 16  # numbers: parameters begin at multiples of 64 bytes, as memory of their own would


class Group:
    """The parameters that one optimizer steps, as views of one vector, beside their gradients as views of another.

    parts: the parameters of each of the optimizer's own groups, which may have settings of their own.
    """

    def __init__(self, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        self.parameters = [parameter for part in parts for parameter in part]
        first = self.parameters[0]
        offsets, ends, end = [], [], 0
        for part in parts:
            for parameter in part:
                if parameter.dtype != first.dtype:
                    raise ConfigError(
                        f"the parameters of an optimizer have one dtype; found {first.dtype} and {parameter.dtype}."
                    )
                offsets.append(end)
                end += -(-parameter.numel() // _ALIGN) * _ALIGN
            ends.append(end)
        self.flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.flat)
        self.views = []
        for parameter, offset in zip(self.parameters, offsets, strict=True):
            span = slice(offset, offset + parameter.numel())
            view = self.flat[span].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.gradient[span].view_as(parameter)
            self.views.append((view.data_ptr(), parameter.grad))
        self.vectors = []
        for low, high in pairwise([0, *ends]):
            vector = nn.Parameter(self.flat[low:high])
            vector.grad = self.gradient[low:high]
            self.vectors.append(vector)

    def check(self, name: str) -> None:
        """Raise ConfigError if the parameters are not the views that they were made."""
        for parameter, (address, gradient) in zip(self.parameters, self.views, strict=True):
            if parameter.data_ptr() != address or parameter.grad is not gradient:
                raise ConfigError(
                    f"a parameter of group {name!r} (shape {list(parameter.shape)}) was moved, replaced or lost its "
                    "gradient after the learner was built. Say devices=(…) instead of net.to(…), copy into parameters "
                    "instead of replacing them, and leave zero_grad to the learner."
                )


def stepped_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Replica:
    """The network on one device."""

    def __init__(self, net: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        every = [id(parameter) for optimizer in optimizers.values() for parameter in stepped_by(optimizer)]
        if len(every) != len(set(every)):
            raise ConfigError(f"a parameter is in two of the optimizers {', '.join(optimizers)}; each belongs to one.")
        self.net = net
        self.groups = {
            name: Group([group["params"] for group in optimizer.param_groups]) for name, optimizer in optimizers.items()
        }

    def tensors(self) -> list[Tensor]:
        """All that learning changes here: the weights of every group, and the buffers."""
        return [*(group.flat for group in self.groups.values()), *self.net.buffers()]
