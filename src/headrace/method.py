"""What a method is: how to act, what to learn from, and how. It does not know where or beside what it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import optree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headrace.data import Decision, Loss, Mean, Rollout, Sampling
from headrace.spaces import Spec, zeros
from headrace.struct import NAMESPACE, Struct, Tree

__all__ = ["Method"]


@dataclass(frozen=True)
class Method(ABC):
    """A policy, its targets and its losses, as one frozen value whose fields are the hyperparameters.

    The docstring under each field is its help. Nothing here holds state: what changes lives in the network, which
    `build` makes and every other function is given. All random numbers come from the generator that is passed in.
    """

    @abstractmethod
    def build(self, spec: Spec, rng: torch.Generator) -> nn.Module:
        """A fresh network for these spaces. Raises ConfigError when the method cannot learn in them."""

    def initial_memory(self, net: nn.Module, batch_size: int) -> Tree | None:
        """What a recurrent network remembers at the start of B episodes, [B, ...]; None: it has no memory."""
        return None

    def noise(self, net: nn.Module, num_steps: int, batch_size: int, rng: torch.Generator) -> Tree:
        """All randomness that `act` needs for one rollout, [T, B, ...], on the CPU."""
        return None

    @abstractmethod
    def act(self, net: nn.Module, observation: Tree, memory: Tree | None, noise: Tree) -> Decision:
        """Choose for B observations [B, ...]. noise None: the mode of the policy, for evaluation."""

    def log_prob(self, net: nn.Module, logits: Tensor, action: Tree) -> Tensor:
        """Of the actions [T, B, ...] that `act` chose with these logits [T, B, ...], in nats; where it gives logits."""
        raise NotImplementedError(f"{type(self).__name__}.act gives logits: write log_prob, or give log_prob there.")

    def prepare(self, net: nn.Module, rollout: Rollout) -> Struct:
        """What an update learns from, with targets, from what the actors sent. Runs without gradients."""
        return rollout

    def minibatches(self, batch: Struct, rng: torch.Generator, mean: Mean) -> Iterator[Struct]:
        """What each gradient step learns from; by default the batch, once.

        Everything that is random or depends on the whole minibatch is settled here, before a minibatch is split into
        microbatches or over devices: moments (through `mean`, over all who learn together) and noise for the losses.
        """
        yield batch

    @abstractmethod
    def losses(self, net: nn.Module, batch: Struct, step: int) -> Iterator[Loss]:
        """The losses of a minibatch or of a part of it, in order; `step` counts the minibatches learned before.

        The learner reduces the gradient of each, clips it and steps its group before it asks for the next one.
        """

    @abstractmethod
    def optimizers(self, net: nn.Module) -> dict[str, Optimizer]:
        """An optimizer for each group of parameters. A parameter that is in none is never stepped.

        Asked for again when `anneal` gave another value: the live optimizers then take over learning rates and the
        other settings, and keep their state.
        """

    def statistics(self, net: nn.Module, batch: Struct, mean: Mean) -> None:  # noqa: B027
        """Move running statistics, such as a normaliser's, by an update's batch, after its last gradient step.

        They are buffers of the network, in float64, and so travel and are saved with the weights.
        """

    def after_update(self, net: nn.Module, version: int) -> None:  # noqa: B027  # most methods have nothing to do
        """Change what no optimizer steps, such as target networks, after the update that made this version."""

    def acting(self, net: nn.Module) -> nn.Module:
        """The part of the network that `act` needs, which is published to actors."""
        return net

    def behaviour(self, environments: range, of: int) -> Self:
        """How these of all the environments explore: a function of the environment, not of the number of actors."""
        return self

    def at_random(self) -> Self:
        """How it acts before it has learned anything: uniformly at random where its exploration begins so."""
        return self

    @property
    def sampling(self) -> Sampling | None:
        """What it learns from: transitions that replay draws like this; None: rollouts, fresh from the actors.

        With it, minibatches and losses are given Transitions, and `prepare` is not asked.
        """
        return None

    def anneal(self, progress: float) -> Self:
        """This method with what its schedules give at this share (0 to 1) of the environment steps."""
        return self

    @property
    def return_discount(self) -> float | None:
        """The discount of the running return that actors tell of each environment; None: they tell none."""
        return None

    def check(self, num_steps: int, num_envs: int) -> None:  # noqa: B027
        """Raise ConfigError if batches of T steps of B environments do not fit the hyperparameters."""

    def describe(self, batch: Struct) -> dict[str, Tensor]:
        """What to report of a batch besides the metrics of its losses: named scalars."""
        return {}

    def example(self, net: nn.Module, spec: Spec, num_steps: int, num_envs: int) -> Rollout:
        """A rollout of zeros, shaped as actors make them: what the slots of a lane look like."""
        observation = zeros(spec.observation, num_steps + 1, num_envs)
        finals = spec.final_rows(num_steps)
        memory = self.initial_memory(net, num_envs)
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            noise = optree.tree_map(lambda leaf: leaf[0], self.noise(net, 1, num_envs, rng), namespace=NAMESPACE)
            device = next(iter(net.parameters()), torch.empty(0)).device
            first = optree.tree_map(lambda leaf: leaf[0].to(device), observation, namespace=NAMESPACE)
            decision = self.act(net, first, memory, noise)

        def rows(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_steps, num_envs, dtype=dtype)

        def columns(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_envs, dtype=dtype)

        return Rollout(
            observation=observation,
            action=optree.tree_map(
                lambda leaf: torch.zeros((num_steps, *leaf.shape), dtype=leaf.dtype),
                decision.action,
                namespace=NAMESPACE,
            ),
            log_prob=None if decision.log_prob is None and decision.logits is None else rows(torch.float32),
            reward=rows(torch.float32),
            terminated=rows(torch.bool),
            truncated=rows(torch.bool),
            valid=rows(torch.bool),
            version=rows(torch.int32),
            memory=memory,
            final_observation=zeros(spec.observation, finals, num_envs) if finals else None,
            final_step=torch.full((finals, num_envs), -1, dtype=torch.int32) if finals else None,
            discounted_return=None if self.return_discount is None else columns(torch.float64),
            environment=columns(torch.int32),
            rank=columns(torch.int64),
            sequence=columns(torch.int64),
            env_steps=columns(torch.int64),
            episode_return=rows(torch.float32),
            episode_length=rows(torch.int32),
            running_return=columns(torch.float32),
            running_length=columns(torch.int32),
        ).check()
