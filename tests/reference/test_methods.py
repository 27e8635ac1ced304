"""A2C and PPO on data whose right result is known: cases that concern losses, critics and actions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace import A2C, PPO, Actor, Box, Discrete, Gymnasium, Learner, Method, ShapeError, Spec
from headrace.data import Rollout
from headrace.methods.actor_critic import Batch
from headrace.nets import ActorCritic

SPEC = Spec(Box(np.full(3, -np.inf), np.full(3, np.inf)), Discrete(2))


def filled(learner: Learner, num_steps: int, num_envs: int, seed: int = 0) -> Rollout:
    """A rollout of random data in which every row is a step."""
    rng = torch.Generator().manual_seed(seed)
    rollout = learner.example(num_steps, num_envs)
    rollout.observation.normal_(generator=rng)
    rollout.reward.normal_(generator=rng)
    rollout.log_prob.fill_(-0.69)
    rollout.valid.fill_(True)
    rollout.env_steps.fill_(num_steps)
    return rollout


@pytest.mark.parametrize("rewards", ["random", "equal"])
@pytest.mark.parametrize("parts", [1, 5, 65])
def test_LC_48_minibatches_of_any_size_leave_all_numbers_finite(parts: int, rewards: str) -> None:
    """65 samples: whole, in 5 parts, and each one alone, whose deviation is 0."""
    learner = Learner(PPO(num_minibatches=parts, learning_rate=1e-2), SPEC, seed=1)
    rollout = filled(learner, 13, 5)
    if rewards == "equal":
        rollout.reward.zero_()
        rollout.observation.zero_()
    report = learner.update(learner.prepare(rollout))
    assert report.gradient_steps == 4 * parts
    assert all(np.isfinite(value) for value in report.metrics.values()), report.metrics
    assert all(parameter.isfinite().all() for parameter in learner.net.parameters())


def test_LC_48_what_cannot_be_cut_evenly_is_refused_and_named() -> None:
    with pytest.raises(Exception, match=r"65 samples cannot be cut into 4 equal minibatches. Nearest: .* 1 or 5"):
        PPO(num_minibatches=4).check(13, 5)


class Odd(ActorCritic):
    """A critic that answers with one axis more."""

    def values(self, features: Tensor) -> Tensor:
        return super().values(features).unsqueeze(-1)


@dataclass(frozen=True)
class WithOddCritic(A2C):
    def build(self, spec: Spec, rng: torch.Generator) -> nn.Module:
        return Odd(spec, self.hidden, rng=rng)


def test_LC_49_a_critic_of_another_shape_is_refused_with_both_shapes() -> None:
    learner = Learner(WithOddCritic(), SPEC, seed=1)
    with pytest.raises(ShapeError, match=r"\[5, 3, 1\]|\[4, 3\].*\[4, 3, 1\]|\[T\+1, B\]"):
        learner.prepare(filled(learner, 4, 3))
    good = Learner(A2C(), SPEC, seed=1)
    batch = good.prepare(filled(good, 4, 3))
    with pytest.raises(ShapeError, match=r"\[4, 3, 1\].*\[4, 3\]|\[4, 3\].*\[4, 3, 1\]"):
        list(WithOddCritic().losses(learner.net, batch, 0))


class Inner(gymnasium.Env[Any, Any]):
    """Keeps the actions that it is given; allows -1 to 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    given: list[Any]

    def __init__(self, given: list[Any]) -> None:
        self.given = given

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.given.append(np.array(action))
        return np.zeros(3, np.float32), 0.0, False, False, {}


def outer(given: list[Any]) -> Gymnasium:
    """The same, advertised as -2 to 2."""
    return Gymnasium(lambda: gymnasium.wrappers.RescaleAction(Inner(given), np.float32(-2), np.float32(2)))


@pytest.mark.parametrize("squashed", [False, True])
def test_LC_57_actions_are_scaled_once(squashed: bool) -> None:
    given: list[Any] = []
    env = outer(given)
    assert isinstance(env.spec.action, Box)
    assert env.spec.action.high.tolist() == [2, 2]
    learner = Learner(PPO(squashed=squashed), env.spec, seed=1)
    net = learner.net
    assert isinstance(net, ActorCritic)
    with torch.no_grad():
        net.distribution.log_std.fill_(1.0)  # wide: many choices lie beyond the bounds
    with Actor(learner.method, net, env, range(4), 100) as actor:
        chosen = actor.rollout().action.numpy()
    inner = np.array(given).reshape(100, 4, 2)
    assert np.abs(inner).max() <= 1
    np.testing.assert_allclose(inner, np.tanh(chosen) if squashed else chosen.clip(-1, 1), atol=1e-6)


@dataclass(frozen=True)
class InEnvironmentUnits(A2C):
    """A policy that already chooses in the units of the environment, and says so by giving no environment action."""

    def act(self, net: nn.Module, observation: Any, memory: Any, noise: Any) -> Any:
        decision = super().act(net, observation, memory, noise)
        bound = 2 * torch.ones_like(decision.action)
        return decision.replace(action=bound, environment_action=None)


def test_LC_57_a_policy_in_the_environment_s_units_is_not_scaled() -> None:
    given: list[Any] = []
    env = outer(given)
    learner = Learner(InEnvironmentUnits(), env.spec, seed=1)
    with Actor(learner.method, learner.net, env, range(2), 8) as actor:
        actor.rollout()
    assert np.array(given).tolist() == [[1.0, 1.0]] * 16  # the outer bound is the inner one


def test_a_box_with_a_side_open_keeps_its_unit_there() -> None:
    space = Box(np.array([-1.0, -np.inf, 0.0]), np.array([3.0, np.inf, np.inf]))
    net = ActorCritic(Spec(SPEC.observation, space), rng=torch.Generator().manual_seed(0))
    given = net.distribution.environment_action(torch.tensor([[0.5, 7.0, 7.0], [-9.0, -9.0, -9.0]]))
    assert given is not None
    assert given.tolist() == [[2.0, 7.0, 7.0], [-1.0, -9.0, 0.0]]


# -- the methods against slow loops


def slow_ppo(method: PPO, net: Any, batch: Batch) -> float:
    """The mean loss of a minibatch, one sample after the other, in float64."""
    layers = {name: value.double() for name, value in net.state_dict().items()}

    def tower(name: str, x: Tensor) -> Tensor:
        for layer in range(len(method.hidden)):
            x = torch.tanh(layers[f"{name}.hidden.{layer}.weight"] @ x + layers[f"{name}.hidden.{layer}.bias"])
        return layers[f"{name}.out.weight"] @ x + layers[f"{name}.out.bias"]

    total = 0.0
    for row in range(batch.size("T*B")):
        x = batch.observation[row].double()
        probabilities = tower("policy", x).exp() / tower("policy", x).exp().sum()
        value = float(tower("value", x)[0])
        ratio = float(probabilities[batch.action[row]]) / np.exp(float(batch.log_prob[row]))
        advantage, target, old = (float(held[row]) for held in (batch.advantage, batch.target, batch.value))
        clipped = min(max(ratio, 1 - method.clip_range), 1 + method.clip_range)
        policy_loss = -min(ratio * advantage, clipped * advantage)
        value_loss = (value - target) ** 2
        if method.clip_range_vf is not None:
            moved = old + min(max(value - old, -method.clip_range_vf), method.clip_range_vf)
            value_loss = max(value_loss, (moved - target) ** 2)
        entropy = -float((probabilities * probabilities.log()).sum())
        total += float(batch.weight[row]) * (policy_loss + method.vf_coef * value_loss - method.ent_coef * entropy)
    return total / float(batch.weight.sum())


@pytest.mark.parametrize("clip_range_vf", [None, 0.1])
def test_the_loss_of_ppo_is_that_of_a_slow_loop(clip_range_vf: float | None) -> None:
    method = PPO(hidden=(8, 8), ent_coef=0.03, clip_range_vf=clip_range_vf, num_minibatches=1, update_epochs=1)
    learner = Learner(method, SPEC, seed=3)
    rollout = filled(learner, 6, 4)
    rollout.action.copy_(torch.arange(24).reshape(6, 4) % 2)
    rollout.log_prob.uniform_(-1.2, -0.3, generator=torch.Generator().manual_seed(5))
    rollout.valid[2, 1] = rollout.valid[4, 3] = False
    batch = learner.prepare(rollout)
    (minibatch,) = method.minibatches(batch, torch.Generator().manual_seed(0), lambda vector, weight: vector)
    assert isinstance(minibatch, Batch)
    moved = minibatch.replace(value=minibatch.value + 0.3)  # as after some steps
    (loss,) = method.losses(learner.net, moved, 0)
    assert float(loss.total.detach()) / float(loss.weight) == pytest.approx(
        slow_ppo(method, learner.net, moved), rel=1e-5
    )


def test_target_kl_ends_the_update_before_the_step() -> None:
    far = filled(learner := Learner(PPO(target_kl=1e-3), SPEC, seed=1), 16, 4)
    far.log_prob.fill_(-3.0)
    before = [parameter.clone() for parameter in learner.net.parameters()]
    report = learner.update(learner.prepare(far))
    assert report.gradient_steps == 0
    assert all(map(torch.equal, before, learner.net.parameters()))
    free: Method = replace(learner.method, target_kl=None)  # type: ignore[call-arg]
    other = Learner(free, SPEC, seed=1)
    assert other.update(other.prepare(far)).gradient_steps == 16


def test_annealing_moves_the_live_optimizer_and_keeps_its_state() -> None:
    learner = Learner(PPO(learning_rate=1e-3), SPEC, seed=1)
    learner.update(learner.prepare(filled(learner, 8, 4)))
    optimizer = learner._optimizers["net"]
    state = {id(parameter): entry["step"].clone() for parameter, entry in optimizer.state.items()}
    learner.anneal(0.75)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25e-3)
    assert {id(parameter): entry["step"] for parameter, entry in optimizer.state.items()} == state
    learner.anneal(0.5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-3)
