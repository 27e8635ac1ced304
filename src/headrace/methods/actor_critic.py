"""What A2C and PPO share: a policy with a value beside it, learned from fresh rollouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
import optree
import torch
from torch import Tensor, nn

from headrace.data import Decision, Mean, Rollout
from headrace.errors import ConfigError
from headrace.method import Method
from headrace.nets import ActorCritic
from headrace.spaces import Spec
from headrace.struct import NAMESPACE, Struct, Tree, axes
from headrace.targets import discounted_return, gae, next_value, standardized

__all__ = ["ActorCriticMethod", "Batch"]


class Batch(Struct):
    """Rollouts with their targets, [T, B]; minibatches of a feed-forward policy have both axes merged, ["T*B"]."""

    observation: Tree = axes("T B ...")
    action: Tree = axes("T B ...")
    log_prob: Tensor = axes("T B", torch.float32)
    value: Tensor = axes("T B", torch.float32)
    """Of the observation, under the weights that the update begins with."""
    advantage: Tensor = axes("T B", torch.float32)
    target: Tensor = axes("T B", torch.float32)
    """What the value is trained towards: advantage + value."""
    weight: Tensor = axes("T B", torch.float32)
    """1 for an environment step, 0 for a reset row."""
    first: Tensor | None = axes("T B", torch.bool, default=None)
    """Whether an episode begins here: a recurrent network forgets before this row."""
    memory: Tree | None = axes("B ...", default=None)
    running_return: Tensor | None = axes("T B", torch.float64, default=None)
    """The discounted sum of the episode's raw rewards up to this row, where rewards are scaled by its spread."""


@dataclass(frozen=True)
class ActorCriticMethod(Method):
    """A policy and a value of the same observations, and advantages between them."""

    learning_rate: float = 3e-4
    """Step size of the optimizer."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to 0 over the run."""
    gamma: float = 0.99
    """Discount: what a reward one step later is worth."""
    gae_lambda: float = 0.95
    """Decay of the advantage estimator: 0 is the one-step TD error, 1 is Monte Carlo."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus, in loss per nat."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float | None = 0.5
    """Gradients are scaled down to this Euclidean norm."""
    normalize_advantage: bool = True
    """Shift and scale the advantages of each minibatch to mean 0 and standard deviation 1."""
    normalize_observation: bool = False
    """Shift and scale what lies in boxes of floats to mean 0 and standard deviation 1 over the run, clipped to ±10."""
    normalize_reward: bool = False
    """Divide rewards by the standard deviation of the discounted returns over the run, and clip them to ±10."""
    reward_clip: float | None = None
    """Clip rewards to ± this, after they are normalised; None: not at all."""
    reward_scale: float = 1.0
    """Multiply rewards by this, after they are clipped."""
    hidden: tuple[int, ...] | None = None
    """Units of each hidden layer of a tower; None: two of 64, or none above the layers for images."""
    activation: str = "tanh"
    """After each hidden layer: tanh or relu."""
    shared: bool = False
    """Let policy and value share their hidden layers."""
    memory: str | None = None
    """"gru": a recurrent layer below the towers, with as many units as the first hidden layer, or 512 above images."""
    squashed: bool = False
    """For actions in a Box: a normal distribution squashed by tanh instead of one that is clipped."""

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number from 0 to 1.")
        if not self.learning_rate >= 0:
            raise ConfigError(f"learning_rate={self.learning_rate}: give a number from 0 on.")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm={self.max_grad_norm}: give a number above 0, or None.")
        if self.reward_clip is not None and not self.reward_clip > 0:
            raise ConfigError(f"reward_clip={self.reward_clip}: give a number above 0, or None.")
        if not 0 < self.reward_scale < float("inf"):
            raise ConfigError(f"reward_scale={self.reward_scale}: give a number above 0.")

    def build(self, spec: Spec, rng: torch.Generator) -> nn.Module:
        return ActorCritic(
            spec,
            self.hidden,
            shared=self.shared,
            memory=self.memory,
            activation=self.activation,
            squashed=self.squashed,
            normalize_observation=self.normalize_observation,
            normalize_reward=self.normalize_reward,
            rng=rng,
        )

    def initial_memory(self, net: nn.Module, batch_size: int) -> Tree | None:
        gru = _cast(net).gru
        return None if gru is None else gru.cell.weight_hh.new_zeros(batch_size, gru.size)

    def noise(self, net: nn.Module, num_steps: int, batch_size: int, rng: torch.Generator) -> Tree:
        return _cast(net).distribution.noise(num_steps, batch_size, rng=rng)

    def act(self, net: nn.Module, observation: Tree, memory: Tree | None, noise: Tree) -> Decision:
        net = _cast(net)
        # NumPy shall be as silent as PyTorch about numbers that are not finite: they are found in what comes of them.
        with np.errstate(all="ignore"):
            if net.gru is None:
                features = net.features(observation)
            else:
                memory = net.remember(observation, cast(Tensor, memory))
                features = net.above(memory)
            logits, distribution = net.logits(features, observation), net.distribution
            action = distribution.draw(logits, noise)
            given = distribution.environment_action(action)
            return Decision(action=action, logits=logits, environment_action=given, memory=memory)

    def log_prob(self, net: nn.Module, logits: Tensor, action: Tree) -> Tensor:
        return _cast(net).distribution.log_prob(logits, action)

    def prepare(self, net: nn.Module, rollout: Rollout) -> Struct:
        net = _cast(net)
        ended = rollout.terminated | rollout.truncated
        first = remembered = None
        if net.gru is None:
            values = net.values(net.features(rollout.observation))
        else:  # an episode begins after a reset row, or at once after an end; the actor saw to the first row itself
            begins = ~rollout.valid if rollout.final_step is None else ended
            first = torch.cat([torch.zeros_like(begins[:1]), begins])
            remembered = net.memories(rollout.observation, cast(Tensor, rollout.memory), first)
            values = net.values(net.above(remembered))
        value = values[:-1]
        advantage = gae(
            self.scaled(net, rollout.reward),
            value,
            next_value(values, rollout.terminated, *self.final_values(net, rollout, remembered)),
            ended,
            rollout.valid,
            self.gamma,
            self.gae_lambda,
        )
        return Batch(
            observation=optree.tree_map(lambda leaf: leaf[:-1], rollout.observation, namespace=NAMESPACE),
            action=rollout.action,
            log_prob=cast(Tensor, rollout.log_prob),
            value=value,
            advantage=advantage,
            target=advantage + value,
            weight=rollout.valid.float(),
            first=None if first is None else first[:-1],
            memory=rollout.memory,
            running_return=self.running_return(rollout, ended) if self.normalize_reward else None,
        )

    def scaled(self, net: ActorCritic, reward: Tensor) -> Tensor:
        """The rewards [T, B] as they are learned from: normalised, then clipped, then scaled, as is asked for."""
        if net.reward_normalizer is not None:
            reward = net.reward_normalizer(reward)
        if self.reward_clip is not None:
            reward = reward.clamp(-self.reward_clip, self.reward_clip)
        return reward if self.reward_scale == 1 else reward * self.reward_scale

    def running_return(self, rollout: Rollout, ended: Tensor) -> Tensor:
        """The discounted sums of raw rewards [T, B] whose spread rewards are divided by."""
        return discounted_return(rollout.reward, cast(Tensor, rollout.discounted_return), ended, self.gamma)

    def statistics(self, net: nn.Module, batch: Struct, mean: Mean) -> None:
        net, held = _cast(net), cast(Batch, batch)
        net.encoder.move(held.observation, held.weight, mean)
        if net.reward_normalizer is not None:
            net.reward_normalizer.move(cast(Tensor, held.running_return), held.weight, mean)

    @property
    def return_discount(self) -> float | None:
        return self.gamma if self.normalize_reward else None

    def final_values(self, net: ActorCritic, rollout: Rollout, remembered: Tensor | None) -> tuple[Tensor | None, ...]:
        """The values [N] of final observations that no row shows, and the (t, b) [N, 2] of the steps that led there.

        remembered [T+1, B, size]: after each row, from a network with a memory. Without such observations two Nones.
        """
        if rollout.final_step is None:
            return None, None
        line, column = (rollout.final_step >= 0).nonzero().unbind(1)
        step = rollout.final_step[line, column].long()
        finals: Tree = rollout.final_observation
        final = optree.tree_map(lambda leaf: leaf[line, column], finals, namespace=NAMESPACE)
        if remembered is None:
            features = net.features(final)
        else:
            features = net.above(net.remember(final, remembered[step, column]))
        return net.values(features), torch.stack((step, column), 1)

    def normalized(self, batch: Struct, mean: Mean, parts: int = 1) -> Struct:
        """The batch with advantages of mean 0 and standard deviation 1 in each of its parts, if that is asked for."""
        if not self.normalize_advantage:
            return batch
        held = cast(Batch, batch)
        return batch.replace(advantage=standardized(held.advantage, held.weight, mean, parts))

    def evaluate(self, net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probability of each action, the policy's entropy and the value there, under the network as it is."""
        net = _cast(net)
        features = net.features(batch.observation, batch.memory, batch.first)
        log_prob, entropy = net.distribution.evaluate(net.logits(features, batch.observation), batch.action)
        return log_prob, entropy, net.values(features)

    def summed(self, weight: Tensor, **rows: Tensor) -> dict[str, Tensor]:
        """Weighted sums of what is to be reported, by CleanRL's names."""
        sums = torch.stack([row.flatten() for row in rows.values()]) @ weight.flatten()
        return dict(zip((f"losses/{name}" for name in rows), sums.unbind(), strict=True))

    def anneal(self, progress: float) -> Self:
        if not self.anneal_lr:
            return self
        return replace(self, learning_rate=self.learning_rate * max(0.0, 1 - progress), anneal_lr=False)

    def describe(self, batch: Struct) -> dict[str, Tensor]:
        """The share of the targets' variance that the value explains: 1 is perfect, 0 no better than their mean."""
        held = cast(Batch, batch)
        counted = held.weight.sum().clamp_min(1)

        def variance(values: Tensor) -> Tensor:
            mean = (held.weight * values).sum() / counted
            return (held.weight * (values - mean).square()).sum() / counted

        unexplained = variance(held.target - held.value) / variance(held.target).clamp_min(1e-12)
        return {"losses/explained_variance": 1 - unexplained}


def _cast(net: nn.Module) -> ActorCritic:
    return cast(ActorCritic, net)
