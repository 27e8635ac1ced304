"""Rainbow: DQN with six additions at once (Hessel et al. 2018, arXiv:1710.02298)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.methods.dqn import DQN

__all__ = ["Rainbow"]


@dataclass(frozen=True)
class Rainbow(DQN):
    """DQN with double, dueling, n-step, prioritised, distributional and noisy: the same class with other defaults.

    The numbers are of the paper's Table 1; where it counts frames, one update is 16 of them.
    """

    learning_rate: float = 6.25e-5
    adam_eps: float = 1.5e-4
    n_step: int = 3
    target_update_interval: int = 2000
    exploration_initial_eps: float = 0.0
    exploration_final_eps: float = 0.0
    double: bool = True
    dueling: bool = True
    prioritized_replay_alpha: float = 0.5
    distributional: Literal["none", "c51", "quantile"] = "c51"
    noisy: bool = True
