"""What SAC and TD3 share: a policy that climbs several action-values, learned from replay."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from headrace.critics import OffPolicyNet
from headrace.data import Loss, Sampling, Transitions
from headrace.errors import ConfigError
from headrace.method import Method

__all__ = ["OffPolicyMethod"]


@dataclass(frozen=True)
class OffPolicyMethod(Method):
    """A policy beside several action-values, each with an optimizer of its own, and targets that follow them slowly."""

    learning_rate: float = 3e-4
    """Step size of the policy, and of a learned temperature."""
    q_learning_rate: float | None = None
    """Step size of the action-values; None: the same."""
    anneal_lr: bool = False
    """Let both fall linearly to 0 over the run."""
    gamma: float = 0.99
    """Discount: what a reward one step later is worth."""
    n_step: int = 1
    """Steps of which a target sums the rewards."""
    tau: float = 0.005
    """How much of the way the target networks go at a time."""
    critics: int = 2
    """Action-values that are learned; a target takes the least of them."""
    epsilon: float = 0.0
    """Share of actions that are uniformly random instead."""
    prioritized_replay_alpha: float = 0.0
    """Exponent of the priorities, which are TD errors; 0: every step is replayed equally often."""
    prioritized_replay_beta: float = 0.4
    """Exponent of the importance weights where the run begins; it rises to 1."""
    prioritized_replay_eps: float = 1e-6
    """What is added to the TD errors, so that every step can be drawn again."""
    reward_scale: float = 1.0
    """Multiply rewards by this."""
    hidden: tuple[int, ...] = (256, 256)
    """Units of each hidden layer, of the policy and of each of the action-values."""
    activation: str = "relu"
    """After each hidden layer: tanh or relu."""

    def __post_init__(self) -> None:
        for name in ("gamma", "epsilon", "prioritized_replay_beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number from 0 to 1.")
        if not 0 < self.tau <= 1:
            raise ConfigError(f"tau={self.tau}: give a number above 0, up to 1.")
        for name in ("learning_rate", "q_learning_rate", "prioritized_replay_alpha", "prioritized_replay_eps"):
            given = getattr(self, name)
            if given is not None and not 0 <= given < math.inf:
                raise ConfigError(f"{name}={given}: give a number from 0 on.")
        for name in ("n_step", "critics"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least 1.")
        if not 0 < self.reward_scale < math.inf:
            raise ConfigError(f"reward_scale={self.reward_scale}: give a number above 0.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.gamma, self.n_step, self.prioritized_replay_alpha, self.prioritized_replay_beta)

    def anneal(self, progress: float) -> Self:
        beta = self.prioritized_replay_beta
        if self.prioritized_replay_alpha:
            beta += progress * (1 - beta)
        left = max(0.0, 1 - progress) if self.anneal_lr else 1.0
        of_critics = self.q_learning_rate
        return replace(
            self,
            learning_rate=left * self.learning_rate,
            q_learning_rate=None if of_critics is None else left * of_critics,
            anneal_lr=False,
            prioritized_replay_beta=beta,
        )

    def at_random(self) -> Self:
        return replace(self, epsilon=1.0)

    def acting(self, net: nn.Module) -> nn.Module:
        return cast(OffPolicyNet, net).policy

    def target(self, batch: Transitions, following: Tensor) -> Tensor:
        """What the action-values are trained towards [B], from the value [B] of what follows."""
        reward = batch.reward if self.reward_scale == 1 else self.reward_scale * batch.reward
        return torch.addcmul(reward, batch.discount, following)

    def critic_loss(self, q: Tensor, target: Tensor, weight: Tensor) -> Loss:
        """Σ w (Q − y)² over all of q [K, B]; y and the importance weights w are [B]."""
        error = q - target
        squared = weight * error.square()
        with torch.no_grad():
            losses, values = squared.sum(1).unbind(), q.sum(1).unbind()
            metrics = {"losses/qf_loss": torch.stack(losses).mean()}
            for number, (loss, value) in enumerate(zip(losses, values, strict=True), start=1):
                metrics |= {f"losses/qf{number}_loss": loss, f"losses/qf{number}_values": value}
            priority = None
            if self.prioritized_replay_alpha:
                priority = error.abs().mean(0).add_(self.prioritized_replay_eps)
        return Loss(squared.sum(), float(len(target)), "critics", metrics=metrics, priority=priority)

    def optimizers(self, net: nn.Module) -> dict[str, Optimizer]:
        net = cast(OffPolicyNet, net)
        of_critics = self.learning_rate if self.q_learning_rate is None else self.q_learning_rate
        return {
            "critics": Adam(net.critics.parameters(), of_critics, fused=True),
            "policy": Adam(net.policy.parameters(), self.learning_rate, fused=True),
        }
