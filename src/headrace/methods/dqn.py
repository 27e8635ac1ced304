"""DQN: deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236), with each of Rainbow's additions as a field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from headrace.data import Decision, Loss, Mean, Sampling, Transitions
from headrace.errors import ConfigError
from headrace.losses import categorical_divergence, huber, quantile_huber, squared_error
from headrace.method import Method
from headrace.q_nets import DISTRIBUTIONAL, OnlineAndTarget, QNet, factorised_noise, regress, regresses
from headrace.spaces import Spec
from headrace.struct import Struct, Tree
from headrace.targets import at_best, categorical_projection, td_target

__all__ = ["DQN"]


@dataclass(frozen=True)
class DQN(Method):
    """Q-learning from replayed transitions: a network of action values is moved towards targets of its older copy."""

    learning_rate: float = 1e-4
    """Step size of Adam."""
    anneal_lr: bool = False
    """Let the learning rate fall linearly to 0 over the run."""
    adam_eps: float = 1e-8
    """What Adam adds to the root of its average of squared gradients."""
    gamma: float = 0.99
    """Discount: what a reward one step later is worth."""
    n_step: int = 1
    """Steps whose rewards are summed before the value of what follows is added."""
    target_update_interval: int = 250
    """Updates (gradient steps) from one move of the target network to the next."""
    tau: float = 1.0
    """Share of the way that the target network then moves; 1: it becomes a copy."""
    max_grad_norm: float | None = 10.0
    """Gradients are scaled down to this Euclidean norm."""
    loss: Literal["huber", "squared"] = "huber"
    """Of the TD error; squared has no factor ½. Distributions have losses of their own."""
    exploration_initial_eps: float = 1.0
    """Share of random actions at the start."""
    exploration_final_eps: float = 0.05
    """Share of random actions from the end of the decay on."""
    exploration_fraction: float = 0.1
    """Part of the run's environment steps over which the share falls linearly."""
    exploration_ladder: float | tuple[float, ...] | None = None
    """α: environment i of N has the share ε^(1 + α·i/(N − 1)), as in Ape-X, where α is 7 and ε 0.4; None: all the same.
    `behaviour` makes of it the exponents of the environments at hand."""
    double: bool = False
    """Let the online network choose the action whose value the target network tells."""
    dueling: bool = False
    """Add up actions' values from a stream for the state and one for the advantages."""
    prioritized_replay_alpha: float = 0.0
    """Exponent of priorities; 0: every transition is drawn equally often."""
    prioritized_replay_beta: float = 0.4
    """Exponent of the importance weights at the start, from where it rises linearly to 1 over the run."""
    prioritized_replay_eps: float = 1e-6
    """Added to priorities, so that every transition can be drawn."""
    distributional: Literal["none", "c51", "quantile"] = "none"
    """Learn returns' means, their probabilities at fixed atoms, or their quantiles."""
    num_atoms: int = 51
    """Atoms of c51."""
    v_min: float = -10.0
    """Lowest atom of c51, in units of (scaled) return."""
    v_max: float = 10.0
    """Highest atom of c51."""
    num_quantiles: int = 200
    """Quantiles of each action's return."""
    noisy: bool = False
    """Explore by noise in the last layers, drawn for each step; it is added to exploration by random actions."""
    sigma0: float = 0.5
    """How large that noise is at the start."""
    reward_clip: float | None = None
    """Clip rewards to ± this; None: not at all. Only with n_step=1."""
    reward_scale: float = 1.0
    """Multiply rewards by this, after they are clipped."""
    hidden: tuple[int, ...] | None = None
    """Units of each hidden layer; None: two of 64, or none above the layers for images."""
    activation: str = "relu"
    """After each hidden layer: tanh or relu."""

    def __post_init__(self) -> None:
        for name in (
            "gamma",
            "exploration_initial_eps",
            "exploration_final_eps",
            "exploration_fraction",
            "prioritized_replay_alpha",
            "prioritized_replay_beta",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number from 0 to 1.")
        for name, least in (
            ("n_step", 1),
            ("target_update_interval", 1),
            ("num_atoms", 2),
            ("num_quantiles", 1),
            ("learning_rate", 0),
            ("prioritized_replay_eps", 0),
            ("sigma0", 0),
        ):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name}={getattr(self, name)}: give at least {least}.")
        if not 0 < self.tau <= 1:
            raise ConfigError(f"tau={self.tau}: give a number above 0, and 1 at most.")
        for name in ("max_grad_norm", "reward_clip"):
            if (given := getattr(self, name)) is not None and not given > 0:
                raise ConfigError(f"{name}={given}: give a number above 0, or None.")
        if not 0 < self.reward_scale < math.inf:
            raise ConfigError(f"reward_scale={self.reward_scale}: give a number above 0.")
        for name, choices in (("loss", ("huber", "squared")), ("distributional", DISTRIBUTIONAL)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}.")
        if not -math.inf < self.v_min < self.v_max < math.inf:
            raise ConfigError(f"v_min={self.v_min}, v_max={self.v_max}: give two finite numbers, the lower one first.")
        if self.reward_clip is not None and self.n_step > 1:
            raise ConfigError(
                f"reward_clip={self.reward_clip} with n_step={self.n_step}: replay has summed the rewards by then. "
                "Clip them in the environment (for Atari: reward_clipping=True), or use n_step=1."
            )

    def build(self, spec: Spec, rng: torch.Generator) -> nn.Module:
        return OnlineAndTarget(
            QNet(
                spec,
                self.hidden,
                activation=self.activation,
                dueling=self.dueling,
                distributional=self.distributional,
                atoms=self.num_quantiles if self.distributional == "quantile" else self.num_atoms,
                v_min=self.v_min,
                v_max=self.v_max,
                sigma0=self.sigma0 if self.noisy else None,
                rng=rng,
            )
        )

    def acting(self, net: nn.Module) -> nn.Module:
        return _cast(net).online

    def behaviour(self, environments: range, of: int) -> Self:
        if not isinstance(self.exploration_ladder, float | int):
            return self
        exponents = (1 + self.exploration_ladder * number / max(1, of - 1) for number in environments)
        return replace(self, exploration_ladder=tuple(exponents))

    def at_random(self) -> Self:
        return replace(self, exploration_initial_eps=1.0, exploration_final_eps=1.0)

    def anneal(self, progress: float) -> Self:
        left = max(0.0, 1 - progress / self.exploration_fraction) if self.exploration_fraction else 0.0
        epsilon = self.exploration_final_eps + left * (self.exploration_initial_eps - self.exploration_final_eps)
        beta = self.prioritized_replay_beta
        if self.prioritized_replay_alpha:
            beta += progress * (1 - beta)
        return replace(
            self,
            learning_rate=self.learning_rate * max(0.0, 1 - progress) if self.anneal_lr else self.learning_rate,
            anneal_lr=False,
            exploration_initial_eps=epsilon,
            exploration_final_eps=epsilon,
            prioritized_replay_beta=beta,
        )

    @property
    def sampling(self) -> Sampling:
        alpha, beta = self.prioritized_replay_alpha, self.prioritized_replay_beta
        return Sampling(self.gamma, self.n_step, alpha, beta)

    def noise(self, net: nn.Module, num_steps: int, batch_size: int, rng: torch.Generator) -> Tree:
        """Uniform keys [T, B, n], whose highest is chosen, −1 where nothing is random; and the noise of the layers."""
        net = cast(QNet, net)
        drawn = torch.rand(num_steps, batch_size, 1 + net.n, generator=rng)
        epsilon: float | Tensor = self.exploration_initial_eps
        if isinstance(self.exploration_ladder, tuple):
            epsilon = (epsilon ** torch.tensor(self.exploration_ladder)).unsqueeze(-1)
        keys = drawn[..., 1:].masked_fill_(drawn[..., :1] >= epsilon, -1)
        return (keys, factorised_noise(num_steps, batch_size, net.noise_size, rng=rng)) if self.noisy else keys

    def act(self, net: nn.Module, observation: Tree, memory: Tree | None, noise: Tree) -> Decision:
        net = cast(QNet, net)
        keys, perturbation = noise if isinstance(noise, tuple) else (noise, None)
        # NumPy shall be as silent as PyTorch about numbers that are not finite: they are found in what comes of them.
        with np.errstate(all="ignore"):
            action = net.choose(net.values(net(observation, perturbation)), observation, keys)
        return Decision(action=action, environment_action=action + net.start if net.start else None)

    def minibatches(self, batch: Struct, rng: torch.Generator, mean: Mean) -> Iterator[Struct]:
        """The batch, for noisy layers with a seed in each row, the same in all: of the noise that its loss draws."""
        if self.noisy:
            batch = batch.replace(noise=torch.randint(2**62, (1,), generator=rng).expand(batch.size("B")))
        yield batch

    def losses(self, net: nn.Module, batch: Struct, step: int) -> Iterator[Loss]:
        batch, online, target = cast(Transitions, batch), _cast(net).online, _cast(net).target
        predicting, following, choosing = self._perturbations(online, batch)
        reward = batch.reward if self.reward_clip is None else batch.reward.clamp(-self.reward_clip, self.reward_clip)
        if self.reward_scale != 1:
            reward = reward * self.reward_scale
        with torch.no_grad(), np.errstate(all="ignore"):
            chosen_by = after = target(batch.next_observation, following)
            if self.double:
                chosen_by = online(batch.next_observation, choosing)
            best = at_best(after, online.allowed(online.values(chosen_by), batch.next_observation))
            if self.distributional == "c51":
                goal = categorical_projection(best.softmax(-1), reward, batch.discount, self.v_min, self.v_max)
            elif self.distributional == "quantile":
                goal = torch.addcmul(reward.unsqueeze(-1), batch.discount.unsqueeze(-1), best)
            else:
                goal = td_target(reward, batch.discount, best)
        if regresses(online, len(reward)):
            huber_loss = self.loss == "huber"
            with np.errstate(all="ignore"):
                found = regress(online, batch.observation, batch.action, goal, batch.weight, huber_loss)
            total, loss, value, priority = found.total, found.loss, found.value, found.error.abs_()
        else:
            told = online(batch.observation, predicting)
            taken = told[torch.arange(len(told), device=told.device), batch.action]
            if self.distributional == "c51":
                loss = categorical_divergence(taken, goal)
                priority = loss.detach()
            elif self.distributional == "quantile":
                loss = quantile_huber(taken, goal)
                priority = loss.detach() / self.num_quantiles
            else:
                loss = huber(taken, goal) if self.loss == "huber" else squared_error(taken, goal)
                priority = (taken.detach() - goal).abs_()
            total, value = torch.dot(batch.weight, loss), online.values(taken.detach())
        yield Loss(
            total=total,
            weight=float(len(loss)),
            max_grad_norm=self.max_grad_norm,
            metrics={"losses/td_loss": loss.detach().sum(), "losses/q_values": value.sum()},
            priority=priority + self.prioritized_replay_eps,
        )

    def _perturbations(self, online: QNet, batch: Transitions) -> Sequence[Tensor | None]:
        """The noise [B, noise_size] of what is predicted, of what follows and of who chooses: the same in all rows."""
        if batch.noise is None:
            return (None,) * 3
        seeds = cast(Tensor, batch.noise)
        drawn = factorised_noise(3, online.noise_size, rng=torch.Generator().manual_seed(int(seeds[0])))
        return drawn.to(seeds.device).unsqueeze(1).expand(-1, len(seeds), -1).unbind()

    def optimizers(self, net: nn.Module) -> dict[str, Optimizer]:
        parameters = _cast(net).online.parameters()
        return {"net": Adam(parameters, lr=self.learning_rate, eps=self.adam_eps, fused=True)}

    def after_update(self, net: nn.Module, version: int) -> None:
        if version % self.target_update_interval == 0:
            _cast(net).follow(self.tau)


def _cast(net: nn.Module) -> OnlineAndTarget:
    return cast(OnlineAndTarget, net)
