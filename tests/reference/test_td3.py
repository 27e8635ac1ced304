"""TD3, and DDPG as its settings, against slow computations in NumPy and float64; cases by their id."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace import Box, ConfigError, Discrete, Learner, Spec
from headrace.critics import DeterministicPolicy, OffPolicyNet
from headrace.data import Transitions
from headrace.methods.td3 import TD3

Array = np.ndarray[Any, Any]

WIDTH, ROWS = 3, 7
SEEN = Box(np.full(WIDTH, -np.inf), np.full(WIDTH, np.inf))
SPEC = Spec(SEEN, Box(np.array([-2.0, 0.0]), np.array([2.0, 4.0])))
DDPG = {"critics": 1, "policy_delay": 1, "target_noise": 0.0}


def made(rows: int = ROWS, seed: int = 0, size: int = 2) -> Transitions:
    """Random transitions: the last one ended the task, and the weights differ."""
    rng = torch.Generator().manual_seed(seed)
    discount = torch.full((rows,), 0.9)
    discount[-1] = 0
    return Transitions(
        observation=torch.randn(rows, WIDTH, generator=rng),
        action=torch.rand(rows, size, generator=rng) * 2 - 1,
        reward=torch.randn(rows, generator=rng),
        discount=discount,
        next_observation=torch.randn(rows, WIDTH, generator=rng),
        weight=torch.rand(rows, generator=rng) + 0.5,
        row=torch.arange(rows),
        generation=torch.zeros(rows, dtype=torch.int64),
    )


def net_of(learner: Learner) -> OffPolicyNet:
    assert isinstance(learner.net, OffPolicyNet)
    return learner.net


def built(method: TD3, spec: Spec = SPEC) -> OffPolicyNet:
    """With targets of their own, and a policy that is far from the middle of the Box."""
    net = method.build(spec, torch.Generator().manual_seed(3))
    assert isinstance(net, OffPolicyNet)
    assert net.target_policy is not None
    with torch.no_grad():
        for policy in (net.policy, net.target_policy):
            policy.mlp.out.weight.mul_(60)
        for target in (net.target_critics, net.target_policy):
            for parameter in target.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    return net


def noisy(method: TD3, batch: Transitions, seed: int = 5) -> Transitions:
    (minibatch,) = method.minibatches(batch, torch.Generator().manual_seed(seed), lambda value, weight: value)
    assert isinstance(minibatch, Transitions)
    return minibatch


def weights(module: nn.Module) -> dict[str, Array]:
    return {name: tensor.detach().double().numpy() for name, tensor in module.state_dict().items()}


def policy_of(held: Mapping[str, Array], x: Array) -> Array:
    for layer in range(2):
        x = np.maximum(x @ held[f"mlp.hidden.{layer}.weight"].T + held[f"mlp.hidden.{layer}.bias"], 0)
    return np.tanh(x @ held["mlp.out.weight"].T + held["mlp.out.bias"])


def action_value(held: Mapping[str, Array], number: int, x: Array) -> float:
    for layer in range(3):
        x = x @ held[f"stack.layers.{2 * layer}"][number] + held[f"stack.layers.{2 * layer + 1}"][number, 0]
        x = np.maximum(x, 0) if layer < 2 else x
    return float(x[0])


METHODS = {
    "td3": TD3(hidden=(8, 8), prioritized_replay_alpha=0.6),
    "scaled": TD3(hidden=(8, 8), critics=3, reward_scale=0.5, target_noise=1.0),
    "ddpg": TD3(hidden=(8, 8), **DDPG),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", METHODS)
def test_losses_are_those_of_a_slow_loop(name: str) -> None:
    method = METHODS[name]
    net, batch = built(method), noisy(method, made())
    assert (batch.noise is None) is (name == "ddpg")
    assert net.target_policy is not None
    policy, critics = weights(net.policy), weights(net.critics)
    target_policy, targets = weights(net.target_policy), weights(net.target_critics)
    errors, actor_loss, clipped = np.zeros((method.critics, ROWS)), 0.0, 0
    for row in range(ROWS):
        before, after = batch.observation[row].double().numpy(), batch.next_observation[row].double().numpy()
        action = policy_of(target_policy, after)
        if batch.noise is not None:
            action = action + batch.noise[row].double().numpy()
            clipped += int((np.abs(action) > 1).sum())
        x = np.concatenate([after, np.clip(action, -1, 1)])
        least = min(action_value(targets, k, x) for k in range(method.critics))
        y = method.reward_scale * float(batch.reward[row]) + float(batch.discount[row]) * least
        taken = np.concatenate([before, batch.action[row].double().numpy()])
        errors[:, row] = [action_value(critics, k, taken) - y for k in range(method.critics)]
        actor_loss -= action_value(critics, 0, np.concatenate([before, policy_of(policy, before)]))
    assert clipped or name != "scaled"
    critic, actor = method.losses(net, batch, method.policy_delay - 1)
    assert (critic.group, actor.group) == ("critics", "policy")
    assert critic.weight == actor.weight == ROWS
    np.testing.assert_allclose(critic.total.item(), (errors**2 * batch.weight.double().numpy()).sum(), rtol=1e-4)
    np.testing.assert_allclose(actor.total.item(), actor_loss, rtol=1e-4)
    np.testing.assert_allclose(critic.metrics["losses/qf1_loss"], (errors[0] ** 2 * batch.weight.numpy()).sum(), 1e-4)
    if method.prioritized_replay_alpha:
        assert critic.priority is not None
        np.testing.assert_allclose(critic.priority, np.abs(errors).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """In float64. Each loss has a gradient for its own group alone, that of the policy nothing for the critics."""
    method = METHODS[name]
    net, single = built(method).double(), noisy(method, made())
    assert net.target_policy is not None
    for encoder in (net.policy, net.critics, net.target_critics, net.target_policy):
        encoder.encoder.dtype = torch.float64
    fields = ("observation", "next_observation", "action", "reward", "discount", "weight", "noise")
    batch = single.replace(**{f: held.double() for f in fields if (held := getattr(single, f)) is not None})
    rng = np.random.default_rng(1)
    for number, module in enumerate((net.critics, net.policy)):
        parameters = list(module.parameters())
        others = list((net.policy if number == 0 else net.critics).parameters())
        loss = list(method.losses(net, batch, method.policy_delay - 1))[number].total
        found = torch.autograd.grad(loss, [*parameters, *others], allow_unused=True)
        assert all(gradient is None for gradient in found[len(parameters) :])
        for parameter, gradient in zip(parameters, found, strict=False):
            place = tuple(int(rng.integers(size)) for size in parameter.shape)
            sides = []
            for step in (1e-6, -2e-6, 1e-6):
                with torch.no_grad():
                    parameter[place] += step
                sides.append(float(list(method.losses(net, batch, method.policy_delay - 1))[number].total.detach()))
            np.testing.assert_allclose(gradient[place].item(), (sides[0] - sides[1]) / 2e-6, atol=1e-5)


def test_a_delayed_policy_is_really_skipped() -> None:
    """In between nothing of it moves: no weight, no moment, no count of Adam's; and no target."""
    learner = Learner(TD3(hidden=(8, 8), policy_delay=3), SPEC, seed=1)
    net = net_of(learner)
    assert net.target_policy is not None
    steps, changed = [], []
    for number in range(1, 10):
        before, state = copy.deepcopy(net.state_dict()), learner.state()["optimizers"]
        report = learner.update(made(seed=number))
        after, now = net.state_dict(), learner.state()["optimizers"]
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert {name for name in before if name.startswith("critics.")} <= moved
        rest = moved - {name for name in before if name.startswith("critics.")}
        assert ("losses/actor_loss" in report.metrics) is (number % 3 == 0)
        if number % 3:
            assert not rest
            assert repr(state["policy"]) == repr(now["policy"])
        else:
            assert {name.split(".")[0] for name in rest} == {"policy", "target_critics", "target_policy"}
        steps.append((float(now["critics"][0]["step"]), float(now["policy"][0]["step"]) if now["policy"] else 0.0))
        changed.append(bool(rest))
    assert steps == [(float(n), float(n // 3)) for n in range(1, 10)]
    assert changed == [n % 3 == 0 for n in range(1, 10)]


def test_LC_56_with_polyak_averaging_every_gradient_step_moves_the_targets_once() -> None:
    """600 gradient steps: 600 moves of DDPG's targets, 300 evenly spaced ones of TD3's."""
    for method, moves in ((TD3(hidden=(2,), **DDPG), 600), (TD3(hidden=(2,)), 300)):  # type: ignore[arg-type]
        net = built_small(method)
        counted = []
        for version in range(1, 601):
            with torch.no_grad():
                before = net.target_critics.stack.layers[0].clone()
                method.after_update(net, version)
                if not torch.equal(before, net.target_critics.stack.layers[0]):
                    counted.append(version)
        assert len(counted) == moves
        assert set(np.diff(counted)) == {600 // moves}


def built_small(method: TD3) -> OffPolicyNet:
    """Targets far from what they follow, so that every move is seen."""
    net = method.build(SPEC, torch.Generator().manual_seed(1))
    assert isinstance(net, OffPolicyNet)
    with torch.no_grad():
        for parameter in net.target_critics.parameters():
            parameter.add_(100.0)
    return net


def zero(policy: nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()


def test_LC_27_exploration_noise_is_scaled_and_centred() -> None:
    """Box(0, 4) and an actor whose output is tanh(0): mean 2, and 0.1 of a half of the width is 0.2."""
    method = TD3(hidden=(4,), exploration_noise=0.1)
    net = method.build(Spec(SEEN, Box(np.zeros(1), np.full(1, 4.0))), torch.Generator().manual_seed(1))
    acting = method.acting(net)
    zero(acting)
    noise = method.noise(acting, 1, 10_000, torch.Generator().manual_seed(2))
    assert isinstance(noise, Tensor)
    with torch.no_grad():
        decision = method.act(acting, torch.zeros(10_000, WIDTH), None, noise[0])
        mode = method.act(acting, torch.zeros(1, WIDTH), None, None)
    assert isinstance(decision.environment_action, Tensor)
    taken = decision.environment_action.numpy()
    assert taken.shape == (10_000, 1)
    assert taken.mean() == pytest.approx(2.0, abs=0.02)
    assert taken.std() == pytest.approx(0.2, abs=0.01)
    assert isinstance(mode.environment_action, Tensor)
    assert mode.environment_action.tolist() == [[2.0]]


def test_LC_28_target_noise_is_of_every_row_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Box(-2, 2), policy noise 0.2, clip 0.5: 4,096 distinct noises of 0.40, none above 1.0, actions within bounds."""
    spec = Spec(SEEN, Box(np.full(1, -2.0), np.full(1, 2.0)))
    method = TD3(hidden=(4,), target_noise=0.2, target_noise_clip=0.5)
    net = method.build(spec, torch.Generator().manual_seed(1))
    assert isinstance(net, OffPolicyNet)
    assert isinstance(net.target_policy, DeterministicPolicy)
    zero(net.target_policy)
    seen: list[Tensor] = []

    def record(observation: Tensor, action: Tensor) -> Tensor:
        seen.append(action.clone())
        return torch.zeros(2, 4096)

    monkeypatch.setattr(net.target_critics, "forward", record)
    unclipped = replace(method, target_noise_clip=100.0)
    wide = replace(method, target_noise=5.0, target_noise_clip=100.0)
    for each in (unclipped, method, wide):
        batch = noisy(each, made(4096, size=1), seed=6)
        next(each.losses(net, batch, 0))
        assert isinstance(batch.noise, Tensor)
        assert len(batch.noise[batch.noise.abs() < each.target_noise_clip].unique()) > (
            4000 if each is method else 4095
        )
    scaled = [2 * action.numpy() for action in seen]  # 2: a half of the Box's width
    assert scaled[0].std() == pytest.approx(0.40, abs=0.01)
    assert scaled[1].max() == pytest.approx(1.0)
    assert scaled[1].min() == pytest.approx(-1.0)
    assert scaled[2].max() == 2.0
    assert scaled[2].min() == -2.0
    acting = method.acting(net)
    with torch.no_grad():
        loud = replace(method, exploration_noise=5.0)
        noise = loud.noise(acting, 1, 4096, torch.Generator().manual_seed(2))
        stored = loud.act(acting, torch.zeros(4096, WIDTH), None, noise[0])
    assert float(stored.action.abs().max()) == 1.0
    assert isinstance(stored.environment_action, Tensor)
    assert float(stored.environment_action.abs().max()) == 2.0


def test_microbatches_are_the_whole() -> None:
    flats = []
    for size in (None, 2):
        learner = Learner(TD3(hidden=(8, 8)), SPEC, seed=1, microbatch_size=size)
        for number in range(4):
            learner.update(made(seed=number))
        flats.append(torch.cat([parameter.detach().flatten() for parameter in learner.net.parameters()]))
    torch.testing.assert_close(flats[0], flats[1], atol=1e-6, rtol=1e-6)


def test_ddpg_has_one_critic_and_no_noise_on_its_targets() -> None:
    method = TD3(hidden=(8, 8), **DDPG)  # type: ignore[arg-type]
    learner = Learner(method, SPEC, seed=1)
    report = learner.update(made())
    assert net_of(learner).critics.stack.layers[0].shape[0] == 1
    assert "losses/qf1_loss" in report.metrics
    assert "losses/qf2_loss" not in report.metrics
    assert "losses/actor_loss" in report.metrics


def test_random_actions_are_uniform_in_the_box() -> None:
    method = TD3(hidden=(8,)).at_random()
    acting = method.acting(built(replace(method, hidden=(8, 8))))
    noise: Any = method.noise(acting, 1, 20_000, torch.Generator().manual_seed(1))
    with torch.no_grad():
        taken = method.act(acting, torch.zeros(20_000, WIDTH), None, type(noise)(*(leaf[0] for leaf in noise)))
    assert isinstance(taken.environment_action, Tensor)
    for column, low in enumerate((-2, 0)):
        values = taken.environment_action[:, column].numpy()
        np.testing.assert_allclose(np.histogram(values, 8, (low, low + 4))[0] / 20_000, 1 / 8, atol=0.01)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"td3 needs one Box of actions; this is Discrete\(3\). Try: dqn, sac, ppo"):
        TD3().build(Spec(SEEN, Discrete(3)), torch.Generator())
    with pytest.raises(ConfigError, match=r"bounds on every action"):
        TD3().build(Spec(SEEN, SEEN), torch.Generator())
    for name, value in (("policy_delay", 0), ("target_noise", -1.0), ("exploration_noise", float("nan"))):
        with pytest.raises(ConfigError, match=name):
            TD3(**{name: value})  # type: ignore[arg-type]
