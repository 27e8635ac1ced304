"""APPO: PPO for rollouts of older policies, with V-trace targets of a target network (see docs/methods/appo.md)."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import optree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headrace.data import Loss, Mean, Rollout
from headrace.errors import ConfigError
from headrace.methods.actor_critic import Batch
from headrace.methods.impala import check_bars, look
from headrace.methods.ppo import PPO
from headrace.nets import ActorCritic
from headrace.spaces import Spec
from headrace.struct import NAMESPACE, Struct
from headrace.targets import gae, vtrace

__all__ = ["APPO"]


@dataclass(frozen=True)
class APPO(PPO):
    """PPO whose advantages are corrected for the updates made since its rollouts were acted."""

    rho_bar: float = 1.0
    """Importance ratios of TD errors are clipped here: it decides what the values converge to."""
    c_bar: float = 1.0
    """Importance ratios of the traces are clipped here: it decides how fast."""
    target_update_interval: int = 1
    """Updates after which the target network, which computes the targets, becomes a copy of what was learned."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bars(self.rho_bar, self.c_bar)
        if self.target_update_interval < 1:
            raise ConfigError(f"target_update_interval={self.target_update_interval}: give at least 1.")

    def build(self, spec: Spec, rng: torch.Generator) -> nn.Module:
        online = super().build(spec, rng)
        return nn.ModuleDict({"online": online, "target": deepcopy(online).requires_grad_(False)})

    def acting(self, net: nn.Module) -> nn.Module:
        return _parts(net)[0]

    def prepare(self, net: nn.Module, rollout: Rollout) -> Struct:
        online, target = _parts(net)
        seen = look(self, target, rollout)
        reward = self.scaled(online, rollout.reward)
        ended, valid = rollout.terminated | rollout.truncated, rollout.valid
        aim = vtrace(
            seen.log_prob - cast(Tensor, rollout.log_prob),
            reward,
            seen.value,
            seen.next_value,
            ended,
            valid,
            self.gamma,
            self.rho_bar,
            self.c_bar,
            self.gae_lambda,
        ).target
        # The surrogate has the ratio of the step itself: its advantage is V-trace's without ρ, and GAE where μ = π.
        following = seen.next_value.clone()
        following[:-1] += self.gae_lambda * (aim - seen.value)[1:].masked_fill(ended[:-1], 0)
        return Batch(
            observation=optree.tree_map(lambda leaf: leaf[:-1], rollout.observation, namespace=NAMESPACE),
            action=rollout.action,
            log_prob=cast(Tensor, rollout.log_prob),
            value=seen.value,
            advantage=gae(reward, seen.value, following, ended, valid, self.gamma, 0.0),
            target=aim,
            weight=valid.float(),
            first=seen.first,
            memory=rollout.memory,
            running_return=self.running_return(rollout, ended) if self.normalize_reward else None,
        )

    def losses(self, net: nn.Module, batch: Struct, step: int) -> Iterator[Loss]:
        return super().losses(self.acting(net), batch, step)

    def optimizers(self, net: nn.Module) -> dict[str, Optimizer]:
        return super().optimizers(self.acting(net))

    def statistics(self, net: nn.Module, batch: Struct, mean: Mean) -> None:
        super().statistics(self.acting(net), batch, mean)

    def after_update(self, net: nn.Module, version: int) -> None:
        if version % self.target_update_interval == 0:
            online, target = _parts(net)
            target.load_state_dict(online.state_dict())


def _parts(net: nn.Module) -> tuple[ActorCritic, ActorCritic]:
    """The network that learns and acts, and the target network."""
    both = cast(nn.ModuleDict, net)
    return cast(ActorCritic, both["online"]), cast(ActorCritic, both["target"])
