"""A2C: advantage actor-critic, the synchronous form of A3C (Mnih et al. 2016, arXiv:1602.01783)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer, RMSprop

from headrace.data import Loss, Mean
from headrace.losses import policy_gradient, squared_error
from headrace.methods.actor_critic import ActorCriticMethod, Batch
from headrace.struct import Struct

__all__ = ["A2C"]


@dataclass(frozen=True)
class A2C(ActorCriticMethod):
    """One gradient step on each batch of fresh rollouts."""

    learning_rate: float = 7e-4
    """Step size of the optimizer."""
    gae_lambda: float = 1.0
    """Decay of the advantage estimator: 1 gives the n-step returns of the paper."""
    normalize_advantage: bool = False
    """Shift and scale the advantages of each batch to mean 0 and standard deviation 1."""
    rmsprop_alpha: float = 0.99
    """Decay of RMSprop's average of squared gradients."""
    rmsprop_eps: float = 1e-5
    """What RMSprop adds to the root of that average."""

    def minibatches(self, batch: Struct, rng: torch.Generator, mean: Mean) -> Iterator[Struct]:
        yield self.normalized(batch, mean)

    def losses(self, net: nn.Module, batch: Struct, step: int) -> Iterator[Loss]:
        batch = cast(Batch, batch)
        log_prob, entropy, value = self.evaluate(net, batch)
        policy_loss = policy_gradient(log_prob, batch.advantage)
        value_loss = squared_error(value, batch.target)
        loss = torch.add(policy_loss, value_loss, alpha=self.vf_coef)
        if self.ent_coef:
            loss = loss - self.ent_coef * entropy
        weight = batch.weight
        with torch.no_grad():
            metrics = self.summed(weight, policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)
        yield Loss(
            total=torch.dot(weight.flatten(), loss.flatten()),
            weight=weight.sum(),
            max_grad_norm=self.max_grad_norm,
            metrics=metrics,
        )

    def optimizers(self, net: nn.Module) -> dict[str, Optimizer]:
        return {
            "net": RMSprop(
                net.parameters(), lr=self.learning_rate, alpha=self.rmsprop_alpha, eps=self.rmsprop_eps, foreach=True
            )
        }
