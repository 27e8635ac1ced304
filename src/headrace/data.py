"""What moves between actors and learners, and what a method yields: rollouts, decisions, losses, gradients.

Data is time-major. The action at t is chosen at the observation at t, the reward at t follows it, and the observation
at t + 1 is its result, so a rollout holds one observation more than it has steps:

    observation   o₀   o₁   o₂   o₃        T + 1 rows
    action        a₀   a₁   a₂             T rows: chosen at o_t
    reward        r₀   r₁   r₂             received for a_t, on arriving at o_{t+1}
    terminated    0    1    0              a₁ ended the task: o₂ is the final observation of its episode
    valid         1    1    0              the step after an end only resets: a₂ was ignored, o₃ begins an episode

An auto-reset row (`valid` false) is no environment step: it enters no loss, no return and no replayed transition.

Environments that reset within the step that ends an episode have no such rows: o₂ begins the next episode already. What
a truncated episode ended with lies in a table beside the rows, one line for each that can occur:

    final_step          1   −1            a₁ led to it; −1: this line is not used
    final_observation   o′   ·            what would have stood in row 2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.struct import Struct, Tree, axes

__all__ = ["Decision", "Gradient", "Loss", "Mean", "Rollout", "Sampling", "Transitions"]

Mean: TypeAlias = Callable[[Tensor, Tensor | float], Tensor]
"""mean(vector [N], weight) averages over all who learn together, by weight; on one learner it returns the vector."""


class Rollout(Struct):
    """T consecutive steps of B environments, as one actor made them. Rollouts are joined along B."""

    observation: Tree = axes("T+1 B ...")
    """As the environment's spec says; the last row is what the last step led to."""
    action: Tree = axes("T B ...")
    """What the policy chose. `Decision.environment_action` says what the environment was given for it."""
    log_prob: Tensor | None = axes("T B", torch.float32, default=None)
    """Of the action under the behaviour policy, in nats; absent where the method does not tell."""
    reward: Tensor = axes("T B", torch.float32)
    terminated: Tensor = axes("T B", torch.bool)
    """The task ended with this step: nothing comes after it."""
    truncated: Tensor = axes("T B", torch.bool)
    """The episode was stopped after this step, though the task would have gone on."""
    valid: Tensor = axes("T B", torch.bool)
    """Whether this is an environment step: false on the row after an end, which only resets, and on the rows that a
    rollout lacks which was handed in early."""
    version: Tensor = axes("T B", torch.int32)
    """Of the weights that chose the action; −1 on rows that it lacks."""
    memory: Tree | None = axes("B ...", default=None)
    """What a recurrent policy remembered before the first row."""
    final_observation: Tree | None = axes("F B ...", default=None)
    """What truncated episodes ended with; only of environments that reset within the step."""
    final_step: Tensor | None = axes("F B", torch.int32, default=None)
    """The row of the step that led to it, −1 where there is none."""
    discounted_return: Tensor | None = axes("B", torch.float64, default=None)
    """The discounted sum of the running episode's rewards before the first row, where a method scales by its spread."""
    environment: Tensor = axes("B", torch.int32)
    """Index of the environment among all of the run."""
    rank: Tensor = axes("B", torch.int64)
    """Of the actor."""
    sequence: Tensor = axes("B", torch.int64)
    """How many rollouts that actor had made before."""
    env_steps: Tensor = axes("B", torch.int64)
    """Environment steps in this rollout, counted where they happened."""
    episode_return: Tensor = axes("T B", torch.float32)
    """The sum of an episode's raw rewards in the row where it ended, 0 in all other rows."""
    episode_length: Tensor = axes("T B", torch.int32)
    """Environment steps of the episode that ended in this row, 0 in all other rows."""
    running_return: Tensor | None = axes("B", torch.float32, default=None)
    """The sum of raw rewards so far of the episode that runs on after the last row."""
    running_length: Tensor | None = axes("B", torch.int32, default=None)
    """Environment steps of that episode so far; 0 where the last row ended one."""


class Transitions(Struct):
    """B steps that were drawn from replay, each by itself, with what n steps from there came to."""

    observation: Tree = axes("B ...")
    action: Tree = axes("B ...")
    """As the rollout has it: in the policy's own units."""
    reward: Tensor = axes("B", torch.float32)
    """The discounted sum over up to n steps, fewer where the episode or what is stored ended before."""
    discount: Tensor = axes("B", torch.float32)
    """What the value of `next_observation` is multiplied by: γ to the number of those steps, 0 where the task ended."""
    next_observation: Tree = axes("B ...")
    """After those steps; where an episode ended among them, its final observation."""
    weight: Tensor = axes("B", torch.float32)
    """Of importance, which makes up for how often a row is drawn: 1 where all are drawn equally often."""
    row: Tensor = axes("B", torch.int64)
    """Where replay keeps the step."""
    generation: Tensor = axes("B", torch.int64)
    """How often that place had been written. What is there by now may be another step, with a priority of its own."""
    noise: Tree | None = axes("B ...", default=None)
    """What a loss needs to be random, drawn in `Method.minibatches`."""


@dataclass(frozen=True)
class Sampling:
    """What a method that learns from replay asks of it."""

    gamma: float = 0.99
    """Discount."""
    n_step: int = 1
    """Steps of which the rewards are summed."""
    alpha: float = 0.0
    """Exponent of priorities (Schaul et al. 2016, arXiv:1511.05952, eq. 1); 0: every row is drawn equally often."""
    beta: float = 1.0
    """Exponent of the importance weights (§3.4): 1 makes up for alpha whole."""


class Decision(Struct):
    """What a policy chose for B observations."""

    action: Tree = axes("B ...")
    """In the policy's own units: what `log_prob` is the probability of, and what a loss is computed from."""
    log_prob: Tensor | None = axes("B", torch.float32, default=None)
    """In nats; absent from a method that has no use for it, or that gives logits."""
    logits: Tensor | None = axes("B ...", torch.float32, default=None)
    """What the action was drawn from, in place of log_prob: `Method.log_prob` is asked once for a whole rollout."""
    environment_action: Tree | None = axes("B ...", default=None)
    """What the environment is given, in its units, where that is not the action itself."""
    memory: Tree | None = axes("B ...", default=None)
    """What a recurrent policy remembers from now on."""


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Loss(NamedTuple):
    """A sum over some rows, which the learner divides by its weight when all parts of a minibatch are in."""

    total: Tensor
    """The sum over this part's rows, a scalar with a graph."""
    weight: Tensor | float
    """What the sum is divided by: the number of rows that count."""
    group: str = "net"
    """Which of the method's optimizers takes a step for it."""
    max_grad_norm: float | None = None
    """The gradient of the group is scaled down to this Euclidean norm."""
    metrics: Mapping[str, Tensor] = _NOTHING
    """What to report: detached sums over the same rows, divided by the same weight."""
    limits: Mapping[str, float] = _NOTHING
    """When one of these metrics is higher than this, the update ends before this step is taken."""
    priority: Tensor | None = None
    """For replayed rows [B]: how much each should be replayed from now on."""


class Gradient(Struct):
    """The gradient of one loss, as it moves from who computed it to who applies it."""

    flat: Tensor = axes("N", torch.float32)
    """Of the mean loss, by all parameters of the group, one after the other."""
    weight: Tensor = axes("1", torch.float64)
    """How many rows the mean is over."""
    max_grad_norm: Tensor = axes("1", torch.float64)
    """What the mean over everybody is scaled down to before the step; infinite: nothing."""
