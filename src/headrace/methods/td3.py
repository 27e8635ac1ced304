"""TD3: twin delayed deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477), of which DDPG is a case."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from headrace.critics import Critics, DeterministicPolicy, OffPolicyNet
from headrace.data import Decision, Loss, Mean, Transitions
from headrace.errors import ConfigError
from headrace.methods.off_policy import OffPolicyMethod
from headrace.spaces import Box, Spec
from headrace.struct import Struct, Tree

__all__ = ["TD3"]


@dataclass(frozen=True)
class TD3(OffPolicyMethod):
    """A deterministic policy, which learns more slowly than the two action-values it climbs, from replay.

    DDPG (Lillicrap et al. 2015, arXiv:1509.02971) is TD3(critics=1, policy_delay=1, target_noise=0).
    """

    learning_rate: float = 1e-3
    """Step size of the policy."""
    policy_delay: int = 2
    """Updates of the action-values to one of the policy and of the target networks."""
    target_noise: float = 0.2
    """Standard deviation of the noise on a target's actions, in halves of the Box's width."""
    target_noise_clip: float = 0.5
    """That noise is clipped to ± this."""
    exploration_noise: float = 0.1
    """Standard deviation of the noise on the actions that are taken, in halves of the Box's width."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy_delay < 1:
            raise ConfigError(f"policy_delay={self.policy_delay}: give at least 1.")
        for name in ("target_noise", "target_noise_clip", "exploration_noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number from 0 on.")

    def build(self, spec: Spec, rng: torch.Generator) -> nn.Module:
        if not isinstance(spec.action, Box):
            raise ConfigError(f"td3 needs one Box of actions; this is {spec.action}. Try: dqn, sac, ppo.")
        policy = DeterministicPolicy(spec, self.hidden, self.activation, rng)
        critics = Critics(spec, self.critics, self.hidden, self.activation, rng)
        return OffPolicyNet(policy, critics, target_policy=True)

    def noise(self, net: nn.Module, num_steps: int, batch_size: int, rng: torch.Generator) -> Tree:
        policy = cast(DeterministicPolicy, net)
        return policy.noise(num_steps, batch_size, scale=self.exploration_noise, epsilon=self.epsilon, rng=rng)

    def act(self, net: nn.Module, observation: Tree, memory: Tree | None, noise: Tree) -> Decision:
        return cast(DeterministicPolicy, net).act(observation, noise)

    def minibatches(self, batch: Struct, rng: torch.Generator, mean: Mean) -> Iterator[Struct]:
        """With the noise [B, d] on the target's actions, clipped."""
        if self.target_noise:
            noise = torch.randn(cast(Transitions, batch).action.shape, generator=rng).mul_(self.target_noise)
            batch = batch.replace(noise=noise.clamp_(-self.target_noise_clip, self.target_noise_clip))
        yield batch

    def losses(self, net: nn.Module, batch: Struct, step: int) -> Iterator[Loss]:
        batch, net = cast(Transitions, batch), cast(OffPolicyNet, net)
        assert net.target_policy is not None
        with torch.no_grad():
            action = net.target_policy(batch.next_observation)
            if batch.noise is not None:
                action = action.add_(batch.noise).clamp_(-1, 1)
            target = self.target(batch, net.target_critics(batch.next_observation, action).amin(0))
        yield self.critic_loss(net.critics(batch.observation, batch.action), target, batch.weight)

        if (step + 1) % self.policy_delay == 0:
            action = net.policy(batch.observation)
            loss = -net.critics(batch.observation, action, frozen=True, first=1).sum()
            yield Loss(loss, float(len(target)), "policy", metrics={"losses/actor_loss": loss.detach()})

    def after_update(self, net: nn.Module, version: int) -> None:
        if version % self.policy_delay == 0:
            cast(OffPolicyNet, net).follow(self.tau)
