"""Consecutive rows that are drawn together, for what a recurrent policy learns from."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.struct import Struct, Tree, axes

__all__ = ["Sequences"]


class Sequences(Struct):
    """B times T consecutive rows of one environment each, from where a rollout began."""

    observation: Tree = axes("T+1 B ...")
    action: Tree = axes("T B ...")
    reward: Tensor = axes("T B", torch.float32)
    terminated: Tensor = axes("T B", torch.bool)
    truncated: Tensor = axes("T B", torch.bool)
    valid: Tensor = axes("T B", torch.bool)
    """Whether this is an environment step, as in a rollout."""
    memory: Tree | None = axes("B ...", default=None)
    """What the policy remembered before the first row."""
    row: Tensor = axes("B", torch.int64)
    """Where replay keeps the first row."""
    generation: Tensor = axes("B", torch.int64)
    """How often that place had been written."""
