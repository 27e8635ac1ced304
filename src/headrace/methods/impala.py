"""IMPALA: actor-critic with V-trace for rollouts of older policies (Espeholt et al. 2018, arXiv:1802.01561)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import optree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, RMSprop

from headrace.data import Loss, Mean, Rollout
from headrace.errors import ConfigError
from headrace.losses import approximate_kl, policy_gradient, squared_error
from headrace.methods.actor_critic import ActorCriticMethod
from headrace.nets import ActorCritic
from headrace.struct import NAMESPACE, Struct, Tree
from headrace.targets import next_value, vtrace

__all__ = ["IMPALA", "Seen", "check_bars", "look"]


@dataclass(frozen=True)
class IMPALA(ActorCriticMethod):
    """One gradient step on each batch, corrected for the updates made since it was acted."""

    learning_rate: float = 6e-4
    """Step size of the optimizer."""
    gae_lambda: float = 1.0
    """Decay of the traces: 1 gives the n-step targets of the paper, 0 those of one step."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus, in loss per nat."""
    max_grad_norm: float | None = 40.0
    """Gradients are scaled down to this Euclidean norm."""
    normalize_advantage: bool = False
    """Must be False: advantages are computed within the loss, which is a sum over rows that are looked at apart."""
    rho_bar: float = 1.0
    """Importance ratios of advantages and TD errors are clipped here: it decides what the values converge to."""
    c_bar: float = 1.0
    """Importance ratios of the traces are clipped here: it decides how fast."""
    rmsprop_alpha: float = 0.99
    """Decay of RMSprop's average of squared gradients."""
    rmsprop_eps: float = 1e-5
    """What RMSprop adds to the root of that average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bars(self.rho_bar, self.c_bar)
        if self.normalize_advantage:
            raise ConfigError(
                "normalize_advantage=True: IMPALA computes advantages within its loss, from the weights that learn, "
                "and has no mean over all of a batch there. Leave it False, or use APPO."
            )

    def prepare(self, net: nn.Module, rollout: Rollout) -> Struct:
        """The rollouts as they are: targets need the policy that the loss needs, so one pass does for both."""
        finals: Tree = rollout.final_observation
        if rollout.final_step is not None:  # unused lines may hold anything, a number that is not finite too
            unused = rollout.final_step < 0
            finals = optree.tree_map(lambda leaf: _without(leaf, unused), finals, namespace=NAMESPACE)
        return rollout.replace(final_observation=finals, running_return=None, running_length=None)

    def losses(self, net: nn.Module, batch: Struct, step: int) -> Iterator[Loss]:
        rollout, net = cast(Rollout, batch), cast(ActorCritic, net)
        seen = look(self, net, rollout)
        log_ratio = seen.log_prob.detach() - cast(Tensor, rollout.log_prob)
        target, advantage = vtrace(
            log_ratio,
            self.scaled(net, rollout.reward),
            seen.value,
            seen.next_value,
            rollout.terminated | rollout.truncated,
            rollout.valid,
            self.gamma,
            self.rho_bar,
            self.c_bar,
            self.gae_lambda,
        )
        policy_loss = policy_gradient(seen.log_prob, advantage)
        value_loss = squared_error(seen.value, target)
        loss = torch.add(policy_loss, value_loss, alpha=self.vf_coef)
        if self.ent_coef:
            loss = loss - self.ent_coef * seen.entropy
        weight = rollout.valid.float()
        with torch.no_grad():
            metrics = self.summed(
                weight,
                policy_loss=policy_loss,
                value_loss=value_loss,
                entropy=seen.entropy,
                approx_kl=approximate_kl(log_ratio),
                rho=log_ratio.exp().clamp(max=self.rho_bar),
                clipfrac=(log_ratio > math.log(self.rho_bar)).float(),
            )
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

    def statistics(self, net: nn.Module, batch: Struct, mean: Mean) -> None:
        rollout, net = cast(Rollout, batch), cast(ActorCritic, net)
        shown = optree.tree_map(lambda leaf: leaf[:-1], rollout.observation, namespace=NAMESPACE)
        weight = rollout.valid.float()
        net.encoder.move(shown, weight, mean)
        if net.reward_normalizer is not None:
            net.reward_normalizer.move(self.running_return(rollout, _ended(rollout)), weight, mean)

    def describe(self, batch: Struct) -> dict[str, Tensor]:
        return {}  # a batch holds no targets yet


class Seen(NamedTuple):
    """What a network says of rollouts, [T, B]: the first three with a graph."""

    log_prob: Tensor
    """Of the actions taken, in nats."""
    entropy: Tensor
    """Of the policy there, in nats."""
    value: Tensor
    """Of the observations that were acted on."""
    next_value: Tensor
    """What follows each step, as `targets.next_value` has it."""
    first: Tensor | None
    """Whether an episode begins here; None from a network without a memory."""


def look(method: ActorCriticMethod, net: ActorCritic, rollout: Rollout) -> Seen:
    """One pass over all T + 1 observations, with the memory that the actor began with."""
    first = remembered = None
    if net.gru is None:
        features = net.features(rollout.observation)
    else:  # an episode begins after a reset row, or at once after an end; the actor saw to the first row itself
        begins = ~rollout.valid if rollout.final_step is None else _ended(rollout)
        first = torch.cat([torch.zeros_like(begins[:1]), begins])
        remembered = net.memories(rollout.observation, cast(Tensor, rollout.memory), first)
        features = net.above(remembered)
        first = first[:-1]
    values = net.values(features)
    with torch.no_grad():
        following = next_value(values, rollout.terminated, *method.final_values(net, rollout, remembered))
    shown = optree.tree_map(lambda leaf: leaf[:-1], rollout.observation, namespace=NAMESPACE)
    log_prob, entropy = net.distribution.evaluate(net.logits(features[:-1], shown), rollout.action)
    return Seen(log_prob, entropy, values[:-1], following, first)


def check_bars(rho_bar: float, c_bar: float) -> None:
    """Raise ConfigError unless both are above 0."""
    for name, bar in (("rho_bar", rho_bar), ("c_bar", c_bar)):
        if not bar > 0:
            raise ConfigError(f"{name}={bar}: give a number above 0; 1 is that of the paper.")


def _ended(rollout: Rollout) -> Tensor:
    return rollout.terminated | rollout.truncated


def _without(leaf: Tensor, unused: Tensor) -> Tensor:
    """The leaf [F, B, ...] with 0 in its unused lines [F, B]; integers are finite, and stay."""
    if not leaf.is_floating_point():
        return leaf
    return leaf.masked_fill(unused.view(*unused.shape, *[1] * (leaf.ndim - 2)), 0)
