"""DQN and what it is made of, against NumPy: losses, targets, networks, exploration, and cases by their ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace import Box, ConfigError, Discrete, Learner, MultiDiscrete, ShapeError, Spec
from headrace.data import Transitions
from headrace.losses import categorical_divergence, huber, quantile_huber
from headrace.methods.dqn import DQN
from headrace.q_nets import NoisyLinear, OnlineAndTarget, QNet, factorised_noise, regresses
from headrace.targets import at_best, categorical_projection, td_target

Array = NDArray[np.float64]

WIDTH, ACTIONS, HIDDEN = 3, 4, (5, 6)
SPEC = Spec(Box(np.full(WIDTH, -np.inf), np.full(WIDTH, np.inf)), Discrete(ACTIONS))
MASKED = Spec(
    {"action_mask": Box(np.zeros(ACTIONS), np.ones(ACTIONS), torch.int8), "seen": SPEC.observation}, SPEC.action
)
SMALL = DQN(hidden=HIDDEN, activation="tanh", num_atoms=6, v_min=-2, v_max=3, num_quantiles=5)
RAINBOW = replace(
    SMALL, double=True, dueling=True, distributional="c51", noisy=True, n_step=3, prioritized_replay_alpha=0.5
)
METHODS = {
    "huber": SMALL,
    "squared": replace(SMALL, loss="squared"),
    "double": replace(SMALL, double=True),
    "dueling": replace(SMALL, dueling=True),
    "scaled": replace(SMALL, reward_clip=0.5, reward_scale=3.0),
    "c51": replace(SMALL, distributional="c51"),
    "quantile": replace(SMALL, distributional="quantile", double=True),
    "noisy": replace(SMALL, noisy=True, loss="squared"),
    "rainbow": RAINBOW,
}


def transitions(rows: int, seed: int = 0, masked: bool = False) -> Transitions:
    """Rows of random numbers; of the first the task ended, the second is cut short, weights are not 1."""
    rng = torch.Generator().manual_seed(seed)

    def observed() -> Any:
        seen = torch.randn(rows, WIDTH, generator=rng)
        mask = torch.rand(rows, ACTIONS, generator=rng) < 0.6
        mask[:, 0] |= ~mask.any(1)
        return {"action_mask": mask.to(torch.int8), "seen": seen} if masked else seen

    discount = torch.full((rows,), 0.97)
    discount[0], discount[1:2] = 0.0, 0.99
    return Transitions(
        observation=observed(),
        action=torch.randint(ACTIONS, (rows,), generator=rng),
        reward=torch.randn(rows, generator=rng),
        discount=discount,
        next_observation=observed(),
        weight=torch.rand(rows, generator=rng) + 0.1,
        row=torch.arange(rows),
        generation=torch.zeros(rows, dtype=torch.int64),
    )


# Losses and targets ---------------------------------------------------------------------------------------------------


def slope(function: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    """The gradient by central differences."""
    found = np.zeros_like(at)
    for index in np.ndindex(*at.shape):
        moved = [at.copy(), at.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        found[index] = (function(moved[0]) - function(moved[1])) / (2 * step)
    return found


def huber_of(u: float, delta: float) -> float:
    return 0.5 * u * u if abs(u) <= delta else delta * (abs(u) - 0.5 * delta)


def divergence_of(logits: Array, probability: Array) -> float:
    log_p = logits - math.log(sum(math.exp(logit) for logit in logits))
    return sum(m * (math.log(m) - log_p[i]) for i, m in enumerate(probability) if m > 0)


def quantile_huber_of(quantile: Array, target: Array, kappa: float = 1.0) -> float:
    total = 0.0
    for i, theta in enumerate(quantile):
        tau = (2 * i + 1) / (2 * len(quantile))
        for goal in target:
            u = goal - theta
            total += abs(tau - (1.0 if u < 0 else 0.0)) * huber_of(u, kappa) / kappa / len(target)
    return total


def project(probability: Array, reward: float, discount: float, v_min: float, v_max: float) -> Array:
    """One row of the projection, atom by atom."""
    count = len(probability)
    width = (v_max - v_min) / (count - 1)
    found = np.zeros(count)
    for j in range(count):
        moved = min(max(reward + discount * (v_min + j * width), v_min), v_max)
        for i in range(count):
            found[i] += probability[j] * max(0.0, 1 - abs(moved - (v_min + i * width)) / width)
    return found


@pytest.mark.parametrize("delta", [0.3, 1.0])
def test_huber(delta: float) -> None:
    rng = np.random.default_rng(1)
    value, target = rng.normal(0, 1, (2, 40))
    given = torch.tensor(value, requires_grad=True)
    loss = huber(given, torch.tensor(target), delta)
    np.testing.assert_allclose(loss.detach(), [huber_of(u, delta) for u in value - target], rtol=1e-12)
    loss.sum().backward()
    np.testing.assert_allclose(given.grad, (value - target).clip(-delta, delta), rtol=1e-12)


def test_categorical_divergence() -> None:
    rng = np.random.default_rng(2)
    logits, probability = rng.normal(0, 2, (7, 5)), rng.dirichlet(np.ones(5), 7)
    probability[0] = [0, 1, 0, 0, 0]
    given = torch.tensor(logits, requires_grad=True)
    loss = categorical_divergence(given, torch.tensor(probability))
    np.testing.assert_allclose(loss.detach(), list(map(divergence_of, logits, probability)), rtol=1e-10)
    loss.sum().backward()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(given.grad, p - probability, atol=1e-12)
    same = categorical_divergence(torch.tensor(np.log(p)), torch.tensor(p))
    np.testing.assert_allclose(same, np.zeros(7), atol=1e-12)


@pytest.mark.parametrize("kappa", [0.5, 1.0])
def test_quantile_huber(kappa: float) -> None:
    rng = np.random.default_rng(3)
    quantile, target = rng.normal(0, 1, (2, 6, 5))
    given = torch.tensor(quantile, requires_grad=True)
    loss = quantile_huber(given, torch.tensor(target), kappa)
    expected = [quantile_huber_of(*row, kappa) for row in zip(quantile, target, strict=True)]
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-12)
    loss.sum().backward()
    for row in range(6):
        expected_slope = slope(lambda q, row=row: quantile_huber_of(q, target[row], kappa), quantile[row])
        np.testing.assert_allclose(given.grad[row], expected_slope, atol=1e-7)


def test_quantile_huber_ends_at_the_quantiles_of_its_target() -> None:
    """Of 0, 0, 0, 10 as equally likely targets, with κ near 0: three quartiles at 0, the last one at 10."""
    quantile = torch.zeros(1, 4, requires_grad=True)
    target = torch.tensor([[0.0, 0.0, 0.0, 10.0]])
    for _ in range(120):
        (found,) = torch.autograd.grad(quantile_huber(quantile, target, kappa=0.01).sum(), quantile)
        quantile = (quantile - found).detach().requires_grad_()
    np.testing.assert_allclose(quantile.detach()[0], [0, 0, 0, 10], atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_projection(dtype: torch.dtype) -> None:
    """Rows that hit atoms exactly, lie beyond either end, have no future, and any others."""
    rng = np.random.default_rng(4)
    reward = np.array([0.0, 1.0, -1.0, 0.5, 50.0, -50.0, 2.0, 0.25, *rng.normal(0, 2, 40)])
    discount = np.array([1.0, 1.0, 1.0, 1.0, 0.9, 0.9, 0.0, 0.0, *rng.choice([0.0, 0.9, 0.99**3], 40)])
    probability = rng.dirichlet(np.ones(6), len(reward))
    arguments = (torch.tensor(numbers, dtype=dtype) for numbers in (probability, reward, discount))
    found = categorical_projection(*arguments, v_min=-2.0, v_max=3.0)
    assert found.dtype is dtype
    expected = [project(*row, -2.0, 3.0) for row in zip(probability, reward, discount, strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-12 if dtype is torch.float64 else 1e-6)
    np.testing.assert_allclose(found.sum(1), np.ones(len(reward)), rtol=1e-6)
    np.testing.assert_allclose(found[0], probability[0], atol=1e-6)  # nothing moved
    np.testing.assert_allclose(found[1, 1:5], probability[1, :4], atol=1e-6)  # by one atom
    np.testing.assert_allclose(found[4:6].max(1).values, [1, 1], rtol=1e-6)  # all at an end
    np.testing.assert_allclose(found[6], [0, 0, 0, 0, 1, 0], atol=1e-6)  # all at the reward, which is an atom


def test_double_selection() -> None:
    """The online network chooses; the target network says what that is worth, higher or lower than its own best."""
    online = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, -math.inf]])
    target = torch.tensor([[10.0, 20.0, 30.0], [7.0, 8.0, 99.0]])
    assert at_best(target, online).tolist() == [20.0, 7.0]
    assert at_best(target, target).tolist() == [30.0, 99.0]
    atoms = torch.arange(12.0).view(2, 3, 2)
    assert at_best(atoms, online).tolist() == [[2.0, 3.0], [6.0, 7.0]]


def test_td_target() -> None:
    reward, discount, after = torch.tensor([[1.0, 2.0, 3.0], [0.9, 0.0, 0.5], [10.0, 10.0, -4.0]])
    np.testing.assert_allclose(td_target(reward, discount, after), [10.0, 2.0, 1.0])


def test_shapes_are_never_broadcast() -> None:
    one, two = torch.zeros(4, 3), torch.zeros(4, 1)
    for loss in (huber, categorical_divergence, quantile_huber):
        with pytest.raises(ShapeError, match=r"\[4, 3\].*\[4, 1\]"):
            loss(one, two)
    with pytest.raises(ShapeError, match=r"value \[B, n\], given \[4, 3\], \[4, 1\]"):
        at_best(one, two)
    with pytest.raises(ShapeError, match="td_target: expected next_value"):
        td_target(torch.zeros(4), torch.zeros(4), torch.zeros(4, 1))
    with pytest.raises(ShapeError, match="categorical_projection: expected reward"):
        categorical_projection(one, two, torch.zeros(4), 0, 1)


# The whole loss -------------------------------------------------------------------------------------------------------


class Reference:
    """The loss of a batch in float64, layer by layer and row by row, from the weights of a network by their names."""

    def __init__(self, method: DQN, net: OnlineAndTarget, batch: Transitions) -> None:
        self.method, self.batch = method, batch
        self.noises: list[Array | None] = [None] * 3
        if batch.noise is not None:
            rng = torch.Generator().manual_seed(int(batch.noise[0]))
            self.noises = list(factorised_noise(3, net.online.noise_size, rng=rng).double().numpy())
        self.weights = {name: weight.detach().double().numpy().copy() for name, weight in net.named_parameters()}

    def layers(self, x: Array, prefix: str, noise: Array | None) -> Array:
        """A stack of layers, with tanh between them; a trunk ends with one."""
        names = [name.removesuffix(".weight") for name in self.weights if name.startswith(prefix)]
        names = [name for name in names if f"{name}.weight" in self.weights]
        used = 0
        for number, name in enumerate(names):
            weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
            if noise is not None:
                inner, outer = np.split(noise[used : used + sum(weight.shape)], [weight.shape[1]])
                used += sum(weight.shape)
                weight = weight + self.weights[f"{name}.weight_sigma"] * np.outer(outer, inner)
                bias = bias + self.weights[f"{name}.bias_sigma"] * outer
            x = weight @ x + bias
            if number < len(names) - 1 or prefix.endswith("trunk."):
                x = np.tanh(x)
        return x

    def told(self, who: str, x: Array, noise: Array | None) -> Array:
        """[n, atoms]"""
        x = self.layers(x, f"{who}.trunk.", None)
        split = None
        if noise is not None:
            split = sum(
                sum(weight.shape)
                for name, weight in self.weights.items()
                if name.startswith(f"{who}.actions.") and name.endswith(".weight")
            )
        q = self.layers(x, f"{who}.actions.", None if noise is None else noise[:split]).reshape(ACTIONS, -1)
        if self.method.dueling:
            value = self.layers(x, f"{who}.state.", None if noise is None else noise[split:])
            q = np.array([[value[k] + q[a, k] - q[:, k].mean() for k in range(q.shape[1])] for a in range(ACTIONS)])
        return q

    def values(self, told: Array) -> Array:
        if self.method.distributional == "c51":
            p = np.exp(told) / np.exp(told).sum(1, keepdims=True)
            return p @ np.linspace(self.method.v_min, self.method.v_max, self.method.num_atoms)
        return told.mean(1)

    def rows(self) -> tuple[Array, Array]:
        """The loss of each row and its priority."""
        method, batch = self.method, self.batch
        found = []
        for row in range(len(batch.reward)):
            seen, after = (
                tree["seen"] if isinstance(tree, dict) else tree for tree in (batch.observation, batch.next_observation)
            )
            after = after[row].double().numpy()
            told = self.told("target", after, self.noises[1])
            chooser = self.told("online", after, self.noises[2]) if method.double else told
            values = self.values(chooser)
            if isinstance(batch.next_observation, dict):
                values = np.where(batch.next_observation["action_mask"][row].numpy() > 0, values, -np.inf)
            best = told[max(range(ACTIONS), key=lambda a: values[a])]
            reward, discount = float(batch.reward[row]), float(batch.discount[row])
            if method.reward_clip is not None:
                reward = min(max(reward, -method.reward_clip), method.reward_clip)
            reward *= method.reward_scale
            mine = self.told("online", seen[row].double().numpy(), self.noises[0])[int(batch.action[row])]
            if method.distributional == "c51":
                goal = project(np.exp(best) / np.exp(best).sum(), reward, discount, method.v_min, method.v_max)
                found.append((divergence_of(mine, goal),) * 2)
            elif method.distributional == "quantile":
                loss = quantile_huber_of(mine, reward + discount * best)
                found.append((loss, loss / method.num_quantiles))
            else:
                u = mine[0] - (reward + discount * best[0])
                found.append((u * u if method.loss == "squared" else huber_of(u, 1.0), abs(u)))
        return tuple(np.array(found).T)  # type: ignore[return-value]

    def total(self) -> float:
        return float(self.batch.weight.double().numpy() @ self.rows()[0])


def built(method: DQN, spec: Spec = SPEC, seed: int = 5) -> OnlineAndTarget:
    """A network whose target differs from it."""
    rng = torch.Generator().manual_seed(seed)
    net, other = method.build(spec, rng), method.build(spec, rng)
    assert isinstance(net, OnlineAndTarget)
    net.target.load_state_dict(other.online.state_dict())
    return net


def prepared(method: DQN, batch: Transitions) -> Transitions:
    (minibatch,) = method.minibatches(batch, torch.Generator().manual_seed(9), lambda vector, weight: vector)
    assert isinstance(minibatch, Transitions)
    return minibatch


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_the_loss_and_its_gradient(name: str, masked: bool) -> None:
    method = METHODS[name]
    net = built(method, MASKED if masked else SPEC)
    batch = prepared(method, transitions(4, masked=masked))
    (loss,) = method.losses(net, batch, 0)
    reference = Reference(method, net, batch)
    losses, priorities = reference.rows()
    assert loss.weight == 4
    np.testing.assert_allclose(loss.total.item(), reference.total(), rtol=2e-5)
    np.testing.assert_allclose(loss.metrics["losses/td_loss"].item(), losses.sum(), rtol=2e-5)
    np.testing.assert_allclose(loss.priority, priorities + method.prioritized_replay_eps, rtol=1e-4, atol=1e-6)
    loss.total.backward()
    assert all(weight.grad is None for weight in net.target.parameters())
    rng = np.random.default_rng(0)
    for key, weight in net.online.named_parameters():
        held = reference.weights[f"online.{key}"]
        for index in rng.choice(held.size, 1):  # one number of each
            at = np.unravel_index(index, held.shape)

            def moved(value: float, held: Array = held, at: Any = at) -> float:
                before, held[at] = held[at], value
                total = reference.total()
                held[at] = before
                return total

            found = (moved(held[at] + 1e-5) - moved(held[at] - 1e-5)) / 2e-5
            assert weight.grad is not None
            np.testing.assert_allclose(weight.grad[at], found, rtol=2e-3, atol=2e-5, err_msg=f"{key}{at}")


def test_a_dueling_network_tells_a_value_and_advantages_whose_mean_is_zero() -> None:
    net = built(METHODS["dueling"]).online
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        q = net(x)
        assert net.trunk is not None
        assert net.state is not None
        below = net.trunk(x)
        np.testing.assert_allclose(q.mean(1), net.state(below)[:, 0], atol=1e-6)
        advantage = net.actions(below)
        np.testing.assert_allclose(q - q[:, :1], advantage - advantage[:, :1], atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_losses_over_parts_of_a_batch_are_those_of_the_whole(name: str) -> None:
    method, net = METHODS[name], built(METHODS[name])
    batch = prepared(method, transitions(16, seed=1))

    def found(size: int) -> tuple[Any, ...]:
        losses = [next(method.losses(net, batch.at(B=slice(start, start + size)), 0)) for start in range(0, 16, size)]
        net.zero_grad()
        for loss in losses:
            loss.total.backward()
        sums = [sum(float(loss.metrics[key]) for loss in losses) for key in losses[0].metrics]
        priorities = torch.cat([loss.priority for loss in losses if loss.priority is not None])
        return gradient_of(net), priorities, sums, sum(loss.weight for loss in losses)

    for whole, parts in zip(found(16), found(5), strict=True):
        np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)
    learners = [Learner(method, SPEC, seed=3, microbatch_size=size) for size in (None, 5)]
    reports = [learner.update(transitions(16, seed=1)) for learner in learners]
    assert reports[0].metrics == pytest.approx(reports[1].metrics, rel=1e-4)
    assert [report.samples_learned for report in reports] == [16, 16]
    assert reports[1].priorities is not None
    np.testing.assert_allclose(reports[1].priorities, reports[0].priorities, rtol=1e-4, atol=1e-6)


def gradient_of(net: OnlineAndTarget) -> torch.Tensor:
    """A copy of the online network's gradient."""
    return torch.cat([weight.grad.flatten() for weight in net.online.parameters() if weight.grad is not None])


def test_a_row_that_cannot_count_has_no_gradient() -> None:
    """Importance weights multiply each row's loss, and are not divided by their sum."""
    batch = transitions(3)
    net = built(SMALL)
    found = []
    for weight in ([1.0, 0.0, 0.0], [2.0, 0.0, 0.0]):
        (loss,) = SMALL.losses(net, batch.replace(weight=torch.tensor(weight)), 0)
        net.zero_grad()
        loss.total.backward()
        found.append(
            torch.cat([weight.grad.flatten() for weight in net.online.parameters() if weight.grad is not None])
        )
    np.testing.assert_allclose(found[1], 2 * found[0], rtol=1e-5)
    (alone,) = SMALL.losses(net, batch.at(B=slice(0, 1)).replace(weight=torch.ones(1)), 0)
    net.zero_grad()
    alone.total.backward()
    np.testing.assert_allclose(found[0], gradient_of(net), atol=1e-6)


# Noisy layers ---------------------------------------------------------------------------------------------------------


def test_noisy_layers_have_the_mean_and_the_variance_of_their_weights() -> None:
    """E f(ε)² = E|ε| = √(2/π), and ε_in, ε_out are independent: Var y_o = 2/π Σ σ²x² + √(2/π) σ_b², plus the cross."""
    rng = torch.Generator().manual_seed(1)
    layer = NoisyLinear(3, 2, 0.5, rng)
    assert layer.weight_sigma.detach().numpy() == pytest.approx(0.5 / math.sqrt(3))
    assert layer.weight.abs().max() <= 1 / math.sqrt(3)
    x, draws = torch.tensor([0.5, -1.0, 2.0]), 40_000
    noise = factorised_noise(draws, 5, rng=rng)
    spread = math.sqrt(2 / math.pi)
    assert noise.mean() == pytest.approx(0, abs=0.01)
    assert noise.square().mean() == pytest.approx(spread, rel=0.01)
    with torch.no_grad():
        y, mean = layer(x.expand(draws, 3), noise), layer(x.unsqueeze(0))[0]
        expected = spread**2 * (layer.weight_sigma * x).square().sum(1) + spread * layer.bias_sigma.square()
        np.testing.assert_allclose(y.mean(0), mean, atol=0.02)
        np.testing.assert_allclose(y.var(0), expected, rtol=0.03)
        inner, outer = noise[0].split([3, 2])
        weight = layer.weight + layer.weight_sigma * torch.outer(outer, inner)
        np.testing.assert_allclose(y[0], weight @ x + layer.bias + layer.bias_sigma * outer, atol=1e-6)


def test_the_noise_of_an_update_is_the_same_in_all_rows_and_another_for_each_network() -> None:
    method, net = METHODS["noisy"], built(METHODS["noisy"])
    net.target.load_state_dict(net.online.state_dict())
    batch = transitions(8)
    same = batch.replace(observation=batch.observation[:1].expand(8, -1), action=batch.action[:1].expand(8))
    first, second = prepared(method, same), prepared(method, same)
    predicting, following, choosing = method._perturbations(net.online, first)
    assert predicting is not None
    assert following is not None
    assert choosing is not None
    assert (predicting == predicting[0]).all()
    assert not torch.equal(predicting, following)
    assert not torch.equal(following, choosing)
    assert torch.equal(predicting, method._perturbations(net.online, second)[0])  # of the generator alone


# Acting ---------------------------------------------------------------------------------------------------------------


def noise_of(method: DQN, net: QNet, steps: int, envs: int, seed: int = 0) -> Any:
    return method.noise(net, steps, envs, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["huber", "noisy", "rainbow", "quantile"])
def test_greedy_is_the_best_of_the_mean_and_numpy_chooses_as_torch_does(name: str) -> None:
    method, net = METHODS[name], built(METHODS[name]).online
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        greedy = method.act(net, x, None, None).action
        assert torch.equal(greedy, net.values(net(x)).argmax(1))
    half = method.anneal(0.5 * method.exploration_fraction)
    keys = noise_of(half, net, 1, 50)
    keys = tuple(leaf[0] for leaf in keys) if isinstance(keys, tuple) else keys[0]
    with torch.no_grad():
        chosen = half.act(net, x, None, keys).action
    assert torch.equal(chosen, half.act(net, x, None, keys).action)  # with gradients: by torch
    assert not torch.equal(chosen, greedy)


def test_at_random_all_actions_are_equally_likely() -> None:
    method = SMALL.at_random().anneal(0.7)
    net = built(SMALL).online
    keys = noise_of(method, net, 100, 80)
    with torch.no_grad():
        chosen = torch.cat([method.act(net, torch.zeros(80, WIDTH), None, row).action for row in keys])
    counts = torch.bincount(chosen, minlength=ACTIONS).double()
    assert float(((counts - 2000).square() / 2000).sum()) < 16.3  # χ² of 3 degrees of freedom: one in a thousand


def test_what_the_mask_forbids_is_never_chosen() -> None:
    method, spec = SMALL, MASKED
    net = built(method, spec).online
    rng = torch.Generator().manual_seed(2)
    batch = transitions(400, seed=7, masked=True)
    mask = batch.observation["action_mask"]
    greedy = method.act(net, batch.observation, None, None).action
    assert mask.gather(1, greedy.unsqueeze(1)).all()
    for numpy in (True, False):
        random = method.at_random()
        keys = random.noise(net, 1, 400, rng)[0]
        with torch.set_grad_enabled(not numpy):
            chosen = random.act(net, batch.observation, None, keys).action
        assert mask.gather(1, chosen.unsqueeze(1)).all()
        for allowed in range(1, ACTIONS + 1):  # of so many, each is as likely
            rows = mask.sum(1) == allowed
            rank = (mask.cumsum(1).gather(1, chosen.unsqueeze(1)).squeeze(1) - 1)[rows]
            share = torch.bincount(rank, minlength=allowed) / rows.sum()
            np.testing.assert_allclose(share, np.full(allowed, 1 / allowed), atol=4 * math.sqrt(0.25 / int(rows.sum())))
    with torch.no_grad():
        values = net.values(net(batch.next_observation))
    forbidden = values.clone()
    forbidden[batch.next_observation["action_mask"] == 0] = -torch.inf
    assert torch.equal(net.allowed(values, batch.next_observation), forbidden)


def test_actions_that_do_not_begin_with_0() -> None:
    method, spec = DQN(hidden=(4,)), Spec(SPEC.observation, Discrete(3, start=-1))
    net = method.acting(method.build(spec, torch.Generator()))
    with torch.no_grad():
        decision = method.act(net, torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(0)), None, None)
    assert isinstance(decision.environment_action, torch.Tensor)
    assert torch.equal(decision.environment_action, decision.action - 1)
    assert decision.action.min() >= 0
    assert decision.log_prob is None


def test_exploration_falls_linearly_and_stays() -> None:
    method = DQN(exploration_initial_eps=0.9, exploration_final_eps=0.1, exploration_fraction=0.4)
    shares = [method.anneal(progress).exploration_initial_eps for progress in (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)]
    np.testing.assert_allclose(shares, [0.9, 0.7, 0.5, 0.1, 0.1, 0.1], atol=1e-12)
    assert replace(method, exploration_fraction=0.0).anneal(0.0).exploration_initial_eps == 0.1
    net = built(SMALL).online
    for progress, share in ((0.1, 0.7), (1.0, 0.1)):
        keys = noise_of(method.anneal(progress), net, 100, 100)
        explored = keys >= 0
        assert torch.equal(explored.all(-1), explored.any(-1))
        assert explored.float().mean() == pytest.approx(share, abs=0.02)


def test_the_learning_rate_falls_where_that_is_asked_for() -> None:
    learner = Learner(replace(SMALL, learning_rate=1e-2, anneal_lr=True), SPEC)
    learner.anneal(0.75)
    assert learner.update(transitions(2)).learning_rates == {"net": pytest.approx(2.5e-3)}
    assert SMALL.anneal(0.75).learning_rate == SMALL.learning_rate


def test_importance_weights_are_made_whole_over_the_run() -> None:
    method = DQN(prioritized_replay_alpha=0.6, prioritized_replay_beta=0.4, n_step=3, gamma=0.9)
    betas = [method.anneal(progress).sampling.beta for progress in (0.0, 0.5, 1.0)]
    np.testing.assert_allclose(betas, [0.4, 0.7, 1.0])
    sampling = method.sampling
    assert (sampling.gamma, sampling.n_step, sampling.alpha) == (0.9, 3, 0.6)


@pytest.mark.parametrize("actors", [1, 2, 4])
def test_the_ladder_is_a_function_of_the_environment(actors: int) -> None:
    """ε_i = ε^(1 + α i/(N − 1)) (Horgan et al. 2018), whoever steps environment i."""
    method = DQN(exploration_initial_eps=0.4, exploration_final_eps=0.4, exploration_ladder=7.0)
    net, share = built(SMALL).online, 8 // actors
    found: list[float] = []
    for rank in range(actors):
        here = method.behaviour(range(rank * share, (rank + 1) * share), 8).anneal(0.5)
        found += (noise_of(here, net, 40_000 // share, share)[..., 0] >= 0).float().mean(0).tolist()
        assert here.at_random().exploration_initial_eps == 1
        assert (noise_of(here.at_random(), net, 10, share) >= 0).all()
    np.testing.assert_allclose(found, [0.4 ** (1 + i) for i in range(8)], atol=0.02)
    assert DQN().behaviour(range(3), 8) == DQN()


# Target networks ------------------------------------------------------------------------------------------------------


def weights_of(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in net.parameters()])


@pytest.mark.parametrize("tau", [1.0, 0.005])
def test_LC_56_the_target_network_moves_at_its_interval_of_gradient_steps(tau: float) -> None:
    method = DQN(hidden=(2,), tau=tau, target_update_interval=100 if tau == 1 else 1)
    net, moved = built(method), []
    held = weights_of(net.target)
    for version in range(1, 601):
        method.after_update(net, version)
        target = weights_of(net.target)
        if not torch.equal(target, held):
            moved.append(version)
            held = target
        if version % 100 == 0:
            with torch.no_grad():
                net.online.actions.out.bias += 1  # type: ignore[union-attr]
    assert moved == ([100, 200, 300, 400, 500, 600] if tau == 1 else list(range(1, 601)))


@pytest.mark.parametrize(("tau", "interval"), [(1.0, 3), (0.005, 1)])
def test_LC_56_every_update_of_a_learner_is_one_gradient_step_and_counts_once(tau: float, interval: int) -> None:
    learner = Learner(replace(SMALL, tau=tau, target_update_interval=interval), SPEC, seed=1)
    net = learner.net
    assert isinstance(net, OnlineAndTarget)
    expected = weights_of(net.target)
    for number in range(1, 8):
        assert learner.update(transitions(2)).gradient_steps == number
        if number % interval == 0:
            expected = expected + tau * (weights_of(net.online) - expected)
        np.testing.assert_allclose(weights_of(net.target), expected, rtol=1e-5, atol=1e-7)


def test_a_fresh_target_network_is_a_copy_that_is_neither_stepped_nor_published() -> None:
    learner = Learner(RAINBOW, SPEC, seed=1)
    net = learner.net
    assert isinstance(net, OnlineAndTarget)
    assert torch.equal(weights_of(net.online), weights_of(net.target))
    assert learner.acting is net.online
    before = weights_of(net.target)
    learner.update(transitions(4))
    assert torch.equal(weights_of(net.target), before)
    assert not torch.equal(weights_of(net.online), before)


# Spaces and settings --------------------------------------------------------------------------------------------------

SPACES = {
    "image": Box(np.zeros((36, 36, 1)), np.full((36, 36, 1), 255), torch.uint8),
    "tree": {"n": Discrete(3), "box": Box(np.zeros((2, 2)), np.ones((2, 2))), "pair": (MultiDiscrete((2, 3)),)},
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("method", [DQN(), replace(RAINBOW, hidden=None)], ids=["plain", "rainbow"])
def test_observations_of_every_kind(method: DQN, space: str) -> None:
    learner = Learner(method, Spec(SPACES[space], Discrete(3)), seed=1)
    rollout = learner.example(2, 1)
    noise = method.noise(learner.acting, 1, 1, torch.Generator().manual_seed(0))
    first = torch.utils._pytree.tree_map(lambda leaf: leaf[0], (rollout.observation, noise))
    with torch.inference_mode():
        assert method.act(learner.acting, first[0], None, first[1]).action.shape == (1,)
    batch = transitions(1).replace(observation=first[0], next_observation=first[0], action=torch.zeros(1).long())
    assert learner.update(batch).version == 1


@pytest.mark.parametrize(
    ("action", "fitting"), [(Box(-np.ones(1), np.ones(1)), "SAC, TD3 or PPO"), (MultiDiscrete((2, 3)), "PPO")]
)
def test_other_actions_are_refused(action: Any, fitting: str) -> None:
    with pytest.raises(ConfigError, match=rf"a Discrete space; given .*\. Use {fitting}\."):
        Learner(DQN(), Spec(SPEC.observation, action))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.1}, r"gamma=1.1: give a number from 0 to 1"),
        ({"exploration_final_eps": -0.1}, r"exploration_final_eps=-0.1: give a number from 0 to 1"),
        ({"n_step": 0}, r"n_step=0: give at least 1"),
        ({"target_update_interval": 0}, r"target_update_interval=0: give at least 1"),
        ({"tau": 0.0}, r"tau=0.0: give a number above 0"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0.0: give a number above 0, or None"),
        ({"loss": "mse"}, r"loss='mse': choose one of huber, squared"),
        ({"distributional": "iqn"}, r"distributional='iqn': choose one of none, c51, quantile"),
        ({"v_min": 1.0, "v_max": 1.0}, r"v_min=1.0, v_max=1.0: .* the lower one first"),
        ({"num_atoms": 1}, r"num_atoms=1: give at least 2"),
        ({"reward_clip": 1.0, "n_step": 3}, r"reward_clip=1.0 with n_step=3: .* in the environment"),
        ({"reward_scale": 0.0}, r"reward_scale=0.0: give a number above 0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DQN(**settings)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation='elu': choose one of tanh, relu"):
        Learner(DQN(activation="elu"), SPEC)


@pytest.mark.parametrize("loss", ["huber", "squared"])
@pytest.mark.parametrize(("activation", "hidden"), [("relu", (16, 8)), ("tanh", (16,)), ("relu", ())])
def test_numpy_finds_the_gradient_that_torch_finds(
    loss: Any, activation: str, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = DQN(loss=loss, activation=activation, hidden=hidden)
    net, batch = built(method), transitions(20)
    found = []
    for rows in (20, 10**9):
        assert regresses(net.online, rows) == (rows == 20)
        monkeypatch.setattr("headrace.methods.dqn.regresses", lambda net, _, rows=rows: regresses(net, rows))
        (told,) = method.losses(net, batch, 0)
        net.zero_grad()
        (0.5 * told.total).backward()
        found.append((told.total.detach(), told.priority, *told.metrics.values(), gradient_of(net)))
    for numpy, expected in zip(*found, strict=True):
        np.testing.assert_allclose(numpy, expected, rtol=1e-4, atol=1e-6)
