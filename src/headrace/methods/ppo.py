"""PPO: proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from headrace.data import Loss, Mean
from headrace.errors import ConfigError
from headrace.losses import (
    approximate_kl,
    clipped_share,
    clipped_squared_error,
    clipped_surrogate,
    squared_error,
)
from headrace.methods.actor_critic import ActorCriticMethod, Batch
from headrace.struct import Struct

__all__ = ["PPO"]


@dataclass(frozen=True)
class PPO(ActorCriticMethod):
    """Several epochs over fresh rollouts, in which the policy is kept near the one that acted."""

    update_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 4
    """Gradient steps of each pass. With a memory, minibatches are whole columns: environments."""
    clip_range: float = 0.2
    """How far the importance ratio may move away from 1 before it stops to pay."""
    clip_range_vf: float | None = None
    """How far the value may move away from the old one before it stops to pay; None: as far as it likes."""
    target_kl: float | None = None
    """End the update when the approximate KL divergence, in nats, is above 1.5 times this; None: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("update_epochs", "num_minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least 1.")

    def check(self, num_steps: int, num_envs: int) -> None:
        samples, unit = (num_envs, "environments") if self.memory else (num_envs * num_steps, "samples")
        if samples % self.num_minibatches:
            below, above = (
                next((n for n in numbers if samples % n == 0), None)
                for numbers in (range(self.num_minibatches, 0, -1), range(self.num_minibatches, samples + 1))
            )
            raise ConfigError(
                f"num_envs {num_envs} × num_steps {num_steps}: {samples} {unit} cannot be cut into "
                f"{self.num_minibatches} equal minibatches. Nearest: num_minibatches {below}"
                + (f" or {above}." if above else ".")
            )

    def minibatches(self, batch: Struct, rng: torch.Generator, mean: Mean) -> Iterator[Struct]:
        axis = "B"
        if not self.memory:  # every step by itself
            batch, axis = batch.flatten("T", "B"), "T*B"
        rows = batch.size(axis)
        size = -(-rows // self.num_minibatches)
        together = axis == "T*B" and rows % self.num_minibatches == 0  # all of an epoch's are normalised at once
        for _ in range(self.update_epochs):
            shuffled = batch.shuffle(rng, axis)
            if together:
                shuffled = self.normalized(shuffled, mean, self.num_minibatches)
            for minibatch in shuffled.split(size, axis):
                yield minibatch if together else self.normalized(minibatch, mean)

    def losses(self, net: nn.Module, batch: Struct, step: int) -> Iterator[Loss]:
        batch = cast(Batch, batch)
        log_prob, entropy, value = self.evaluate(net, batch)
        log_ratio = log_prob - batch.log_prob
        policy_loss = clipped_surrogate(log_ratio, batch.advantage, self.clip_range)
        if self.clip_range_vf is None:
            value_loss = squared_error(value, batch.target)
        else:
            value_loss = clipped_squared_error(value, batch.value, batch.target, self.clip_range_vf)
        loss = torch.add(policy_loss, value_loss, alpha=self.vf_coef)
        if self.ent_coef:
            loss = loss - self.ent_coef * entropy
        weight = batch.weight
        with torch.no_grad():
            metrics = self.summed(
                weight,
                policy_loss=policy_loss,
                value_loss=value_loss,
                entropy=entropy,
                approx_kl=approximate_kl(log_ratio),
                clipfrac=clipped_share(log_ratio, self.clip_range),
            )
        yield Loss(
            total=torch.dot(weight.flatten(), loss.flatten()),
            weight=weight.sum(),
            max_grad_norm=self.max_grad_norm,
            metrics=metrics,
            limits={} if self.target_kl is None else {"losses/approx_kl": 1.5 * self.target_kl},
        )

    def optimizers(self, net: nn.Module) -> dict[str, Optimizer]:
        return {"net": Adam(net.parameters(), lr=self.learning_rate, eps=1e-5, fused=True)}
