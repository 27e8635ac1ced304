"""SAC: soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), for actions of a Box or of a Discrete space."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from headrace.critics import CategoricalPolicy, Critics, OffPolicyNet, SquashedPolicy
from headrace.data import Decision, Loss, Mean, Transitions
from headrace.errors import ConfigError
from headrace.methods.off_policy import OffPolicyMethod
from headrace.spaces import Box, Discrete, Spec
from headrace.struct import Struct, Tree

__all__ = ["SAC"]


@dataclass(frozen=True)
class SAC(OffPolicyMethod):
    """A random policy that is paid for its entropy, learned from replay with the least of two action-values."""

    ent_coef: float | Literal["auto"] = "auto"
    """The temperature: reward per nat of entropy. auto: learned, so that the policy keeps the target entropy."""
    target_entropy: float | Literal["auto"] = "auto"
    """Nats. auto: minus the number of dimensions of a Box; 0.98 of the most that a Discrete space allows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ent_coef != "auto" and not 0 <= self.ent_coef < math.inf:
            raise ConfigError(f'ent_coef={self.ent_coef}: give a number from 0 on, or "auto".')
        if self.target_entropy != "auto" and not math.isfinite(self.target_entropy):
            raise ConfigError(f'target_entropy={self.target_entropy}: give a number of nats, or "auto".')

    def build(self, spec: Spec, rng: torch.Generator) -> nn.Module:
        kind: type[SquashedPolicy] | type[CategoricalPolicy]
        if isinstance(spec.action, Box):
            kind = SquashedPolicy
        elif isinstance(spec.action, Discrete):
            kind = CategoricalPolicy
        else:
            raise ConfigError(f"sac needs one Box or one Discrete space of actions; this is {spec.action}. Try: ppo.")
        policy = kind(spec, self.hidden, self.activation, rng)
        critics = Critics(spec, self.critics, self.hidden, self.activation, rng)
        return OffPolicyNet(policy, critics, log_alpha=0.0 if self.ent_coef == "auto" else None)

    def noise(self, net: nn.Module, num_steps: int, batch_size: int, rng: torch.Generator) -> Tree:
        return _policy(net).noise(num_steps, batch_size, epsilon=self.epsilon, rng=rng)

    def act(self, net: nn.Module, observation: Tree, memory: Tree | None, noise: Tree) -> Decision:
        return _policy(net).act(observation, noise)

    def minibatches(self, batch: Struct, rng: torch.Generator, mean: Mean) -> Iterator[Struct]:
        """With noise [B, 2, d]: for the policy's actions at the observation and at the next one."""
        action = cast(Transitions, batch).action
        if action.is_floating_point():
            rows, size = action.shape
            batch = batch.replace(noise=torch.randn(rows, 2, size, generator=rng))
        yield batch

    def losses(self, net: nn.Module, batch: Struct, step: int) -> Iterator[Loss]:
        batch, net = cast(Transitions, batch), cast(OffPolicyNet, net)
        policy, rows = _policy(net.policy), float(len(batch.reward))
        noise, next_noise = (None, None) if batch.noise is None else batch.noise.unbind(1)
        alpha = batch.reward.new_tensor(self.ent_coef) if net.log_alpha is None else net.log_alpha.detach().exp()
        with torch.no_grad():
            then = policy.choices(batch.next_observation, next_noise)
            following = net.target_critics(batch.next_observation, then.action).amin(0)
            target = self.target(batch, then.mean(following - alpha * then.log_prob))
        yield self.critic_loss(net.critics(batch.observation, batch.action), target, batch.weight)

        now = policy.choices(batch.observation, noise)
        value = net.critics(batch.observation, now.action, frozen=True).amin(0)
        loss = now.mean(alpha * now.log_prob - value).sum()
        with torch.no_grad():
            entropy = -now.mean(now.log_prob)
            metrics = {
                "losses/actor_loss": loss.detach(),
                "losses/entropy": entropy.sum(),
                "losses/alpha": alpha * rows,
            }
        if net.log_alpha is not None:  # each of the two sums is a constant to the other's parameters
            given = self.target_entropy
            wanted = policy.target_entropy(batch.observation) if given == "auto" else given
            alpha_loss = net.log_alpha.exp() * (entropy - wanted).sum()
            metrics["losses/alpha_loss"] = alpha_loss.detach()
            loss = loss + alpha_loss
        yield Loss(loss, rows, "policy", metrics=metrics)

    def optimizers(self, net: nn.Module) -> dict[str, Optimizer]:
        found = super().optimizers(net)
        if (log_alpha := cast(OffPolicyNet, net).log_alpha) is not None:
            found["policy"].add_param_group({"params": [log_alpha]})
        return found

    def after_update(self, net: nn.Module, version: int) -> None:
        cast(OffPolicyNet, net).follow(self.tau)


def _policy(net: nn.Module) -> SquashedPolicy | CategoricalPolicy:
    return cast(SquashedPolicy | CategoricalPolicy, net)
