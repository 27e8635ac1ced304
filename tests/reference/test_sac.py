"""SAC against slow computations in NumPy and float64: its networks, losses and gradients, and what it does apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn

from headrace import Box, ConfigError, Discrete, Learner, MultiDiscrete, Spec
from headrace.critics import Choices, OffPolicyNet, SquashedPolicy, Stack
from headrace.data import Transitions
from headrace.methods.sac import SAC
from headrace.struct import NAMESPACE

Array = np.ndarray[Any, Any]

WIDTH, ROWS = 3, 7
SEEN = Box(np.full(WIDTH, -np.inf), np.full(WIDTH, np.inf))
CONTINUOUS = Spec(SEEN, Box(np.array([-2.0, 0.0]), np.array([2.0, 4.0])))
DISCRETE = Spec(SEEN, Discrete(4, start=-1))
MASKED = Spec({"action_mask": Box(np.zeros(4), np.ones(4), torch.int8), "seen": SEEN}, Discrete(4))
SPECS = {"continuous": CONTINUOUS, "discrete": DISCRETE, "masked": MASKED}


def made(spec: Spec, rows: int = ROWS, seed: int = 0) -> Transitions:
    """Random transitions: the last one ended the task, and the weights differ."""
    rng = torch.Generator().manual_seed(seed)

    def seen() -> Any:
        numbers = torch.randn(rows, WIDTH, generator=rng)
        if not isinstance(spec.observation, dict):
            return numbers
        mask = torch.randint(0, 2, (rows, 4), generator=rng, dtype=torch.int8)
        mask[0] = 0  # as where an environment gives no mask yet
        return {"action_mask": mask, "seen": numbers}

    if isinstance(spec.action, Box):
        action = torch.rand(rows, 2, generator=rng) * 2 - 1
    else:
        action = torch.randint(4, (rows,), generator=rng)
    discount = torch.full((rows,), 0.9)
    discount[-1] = 0
    return Transitions(
        observation=seen(),
        action=action,
        reward=torch.randn(rows, generator=rng),
        discount=discount,
        next_observation=seen(),
        weight=torch.rand(rows, generator=rng) + 0.5,
        row=torch.arange(rows),
        generation=torch.zeros(rows, dtype=torch.int64),
    )


def built(method: SAC, spec: Spec) -> OffPolicyNet:
    net = method.build(spec, torch.Generator().manual_seed(3))
    assert isinstance(net, OffPolicyNet)
    with torch.no_grad():  # targets of their own, and a policy that is far from uniform
        for parameter in net.target_critics.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
        assert isinstance(net.policy.mlp.out, nn.Linear)
        net.policy.mlp.out.weight.mul_(60)
    return net


def weights(module: nn.Module) -> dict[str, Array]:
    return {name: tensor.detach().double().numpy() for name, tensor in module.state_dict().items()}


def mlp(held: Mapping[str, Array], x: Array) -> Array:
    for layer in range(2):
        x = np.maximum(x @ held[f"mlp.hidden.{layer}.weight"].T + held[f"mlp.hidden.{layer}.bias"], 0)
    return x @ held["mlp.out.weight"].T + held["mlp.out.bias"]


def action_values(held: Mapping[str, Array], number: int, x: Array) -> Array:
    """The outputs of one of the critics for one row."""
    for layer in range(3):
        x = x @ held[f"stack.layers.{2 * layer}"][number] + held[f"stack.layers.{2 * layer + 1}"][number, 0]
        x = np.maximum(x, 0) if layer < 2 else x
    return x


def numbers(observation: Any, row: int) -> tuple[Array, Array]:
    """What is seen, and which of four actions are allowed."""
    if not isinstance(observation, dict):
        return observation[row].double().numpy(), np.ones(4, bool)
    allowed = observation["action_mask"][row].numpy().astype(bool)
    return observation["seen"][row].double().numpy(), allowed if allowed.any() else np.ones(4, bool)


def choice(held: Mapping[str, Array], observation: Any, row: int, noise: Tensor | None) -> tuple[Array, Array]:
    """Of a Box, the action and its log-probability; else the probabilities of all actions and their logarithms."""
    seen, allowed = numbers(observation, row)
    out = mlp(held, seen)
    if noise is None:
        p = np.where(allowed, np.exp(out - out[allowed].max()), 0)
        p /= p.sum()
        return p, np.where(p > 0, np.log(np.where(p > 0, p, 1)), 0)
    mean, std = out[:2], np.exp(np.clip(out[2:], -20, 2))
    action = np.tanh(mean + std * noise.double().numpy())
    density = np.exp(-(((np.arctanh(action) - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi)) / (1 - action**2)
    return action, np.log(density).sum()


def reference(method: SAC, net: OffPolicyNet, batch: Transitions, alpha: float) -> dict[str, Array]:
    """The sums of the losses, row after row, and the TD errors [K, B]."""
    policy, critics, targets = map(weights, (net.policy, net.critics, net.target_critics))
    count = range(method.critics)
    errors, actor_loss, entropies, wanted = np.zeros((method.critics, ROWS)), 0.0, [], []
    for row in range(ROWS):
        then, now = (None, None) if batch.noise is None else (batch.noise[row, 1], batch.noise[row, 0])
        reward, discount = float(batch.reward[row]), float(batch.discount[row])
        after, before = numbers(batch.next_observation, row)[0], numbers(batch.observation, row)[0]
        chosen, log_prob = choice(policy, batch.next_observation, row, then)
        own, own_log_prob = choice(policy, batch.observation, row, now)
        if then is not None:
            least = min(action_values(targets, k, np.concatenate([after, chosen]))[0] for k in count)
            value = least - alpha * log_prob
            taken = np.concatenate([before, batch.action[row].double().numpy()])
            q = [action_values(critics, k, taken)[0] for k in count]
            least = min(action_values(critics, k, np.concatenate([before, own]))[0] for k in count)
            actor_loss += alpha * own_log_prob - least
            entropies.append(-own_log_prob)
            wanted.append(-2.0)
        else:
            least = np.min([action_values(targets, k, after) for k in count], 0)
            value = sum(chosen * (least - alpha * log_prob))
            q = [action_values(critics, k, before)[int(batch.action[row])] for k in count]
            least = np.min([action_values(critics, k, before) for k in count], 0)
            actor_loss += sum(own * (alpha * own_log_prob - least))
            entropies.append(-sum(own * own_log_prob))
            wanted.append(0.98 * np.log(numbers(batch.observation, row)[1].sum()))
        errors[:, row] = np.array(q) - (method.reward_scale * reward + discount * value)
    if method.target_entropy != "auto":
        wanted = [method.target_entropy] * ROWS
    return {
        "errors": errors,
        "critics": (errors**2 * batch.weight.double().numpy()).sum(),
        "policy": np.array(actor_loss),
        "entropy": np.sum(entropies),
        "alpha": alpha * (np.sum(entropies) - np.sum(wanted)),
    }


METHODS = {
    "auto": SAC(hidden=(8, 8), prioritized_replay_alpha=0.6),
    "fixed": SAC(hidden=(8, 8), ent_coef=0.3, critics=3, reward_scale=0.5),
    "one": SAC(hidden=(8, 8), critics=1, target_entropy=0.4),
}


@pytest.mark.parametrize("of", SPECS)
@pytest.mark.parametrize("name", METHODS)
def test_losses_are_those_of_a_slow_loop(name: str, of: str) -> None:
    method, spec = METHODS[name], SPECS[of]
    net = built(method, spec)
    (batch,) = method.minibatches(made(spec), torch.Generator().manual_seed(5), lambda value, weight: value)
    assert isinstance(batch, Transitions)
    alpha = 0.3
    if net.log_alpha is not None:
        alpha = 0.7
        with torch.no_grad():
            net.log_alpha.fill_(np.log(0.7))
    expected = reference(method, net, batch, alpha)
    critics, policy = method.losses(net, batch, 0)
    assert (critics.group, policy.group) == ("critics", "policy")
    assert critics.weight == policy.weight == ROWS
    np.testing.assert_allclose(critics.total.item(), expected["critics"], rtol=1e-4)
    np.testing.assert_allclose(policy.metrics["losses/actor_loss"].item(), expected["policy"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(policy.metrics["losses/entropy"].item(), expected["entropy"], rtol=1e-4, atol=1e-4)
    temperature = policy.total.item() - policy.metrics["losses/actor_loss"].item()
    np.testing.assert_allclose(temperature, 0 if name == "fixed" else expected["alpha"], rtol=1e-4, atol=1e-4)
    if method.prioritized_replay_alpha:
        assert critics.priority is not None  # and 1e-6
        np.testing.assert_allclose(critics.priority, np.abs(expected["errors"]).mean(0), rtol=1e-4, atol=1e-5)
    else:
        assert critics.priority is None


def slope(parameter: Tensor, place: tuple[int, ...], loss: Callable[[], float], step: float = 1e-6) -> float:
    """By central differences, in float64."""
    with torch.no_grad():
        kept = parameter[place].item()
        parameter[place] = kept + step
        above = loss()
        parameter[place] = kept - step
        below = loss()
        parameter[place] = kept
    return (above - below) / (2 * step)


@pytest.mark.parametrize("of", SPECS)
def test_gradients_are_those_of_finite_differences(of: str) -> None:
    """Each loss by its own group's parameters; nothing else gets a gradient from it."""
    method, spec = METHODS["auto"], SPECS[of]
    net = built(method, spec).double()
    (single,) = method.minibatches(made(spec), torch.Generator().manual_seed(5), lambda value, weight: value)
    doubled = {
        name: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        for name in ("action", "reward", "discount", "weight", "noise")
        if (leaf := getattr(single, name)) is not None
    }
    batch = single.replace(**doubled)
    for encoder in (net.policy.encoder, net.critics.encoder, net.target_critics.encoder):
        encoder.dtype = torch.float64
    alpha = 1.0  # log_alpha is 0
    for number, group in enumerate(("critics", "policy")):
        loss = list(method.losses(net, batch, 0))[number]
        assert loss.group == group
        optimized = method.optimizers(net)[group].param_groups
        parameters = [parameter for part in optimized for parameter in part["params"]]
        others = [parameter for parameter in net.parameters() if all(parameter is not own for own in parameters)]
        gradients = torch.autograd.grad(loss.total, parameters)
        again = list(method.losses(net, batch, 0))[number].total
        others = [parameter for parameter in others if parameter.requires_grad]
        assert all(found is None for found in torch.autograd.grad(again, others, allow_unused=True))

        def of_loss(number: int = number) -> float:
            """Without the temperature's part, whose slope by the policy is not part of the method."""
            loss = list(method.losses(net, batch, 0))[number]
            return float(loss.metrics.get("losses/actor_loss", loss.total))

        rng = np.random.default_rng(1)
        compared = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter is net.log_alpha:
                expected = reference(method, net, batch, alpha)["alpha"]  # d(α c)/d(log α) = α c
                np.testing.assert_allclose(gradient.item(), expected, rtol=1e-4)
                continue
            for _ in range(3):
                place = tuple(int(rng.integers(size)) for size in parameter.shape)
                np.testing.assert_allclose(gradient[place].item(), slope(parameter, place, of_loss), atol=1e-5)
                compared += 1
        assert compared >= 18


def test_log_probabilities_are_exact_where_tanh_is_1() -> None:
    """|u| up to 20, where 1 − tanh² u is 7e-18: in float32, against the same in extended precision."""
    policy = SquashedPolicy(Spec(SEEN, Box(np.full(1, -1.0), np.full(1, 1.0))), (4,), "relu", torch.Generator())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    u = torch.linspace(-20, 20, 401)
    found = policy.choices(torch.zeros(401, WIDTH), u.unsqueeze(-1))  # mean 0, deviation 1: the noise is u
    wide = u.numpy().astype(np.longdouble)
    slope_of_tanh = 4 / (np.exp(wide) + np.exp(-wide)) ** 2  # 1 / cosh², without a difference
    expected = -(wide**2) / 2 - np.log(2 * np.pi) / 2 - np.log(slope_of_tanh)
    np.testing.assert_allclose(found.log_prob.detach().numpy(), expected.astype(np.float64), rtol=2e-6, atol=2e-6)
    assert float(found.log_prob.detach().max()) < 0
    assert found.action is not None
    assert float(found.action.detach().max()) == 1.0


def test_the_spread_is_clamped_between_exp_minus_20_and_exp_2() -> None:
    policy = SquashedPolicy(CONTINUOUS, (4,), "relu", torch.Generator())
    out = policy.mlp.out
    assert isinstance(out, nn.Linear)
    with torch.no_grad():
        out.weight.zero_()
        out.bias.copy_(torch.tensor([0.1, -0.2, -50.0, 50.0]))
    mean, log_std = policy._normal(torch.zeros(1, WIDTH))
    torch.testing.assert_close(mean, torch.tensor([[0.1, -0.2]]))
    assert log_std.tolist() == [[-20.0, 2.0]]


def test_stacked_networks_are_each_a_network_of_its_own() -> None:
    """Outputs and all gradients of three at once, against autograd through each alone, in float64."""
    rng = torch.Generator().manual_seed(1)
    for activation, apply in (("relu", torch.relu), ("tanh", torch.tanh)):
        stack = Stack(3, 5, (6, 7), 2, activation=activation, rng=rng).double()
        x = torch.randn(9, 5, generator=rng, dtype=torch.float64, requires_grad=True)
        pull = torch.randn(3, 9, 2, generator=rng, dtype=torch.float64)
        parameters = list(stack.layers)
        found = torch.autograd.grad((stack(x) * pull).sum(), [x, *parameters])
        total = torch.zeros((), dtype=torch.float64)
        for k in range(3):
            y = apply(x @ parameters[0][k] + parameters[1][k])
            y = apply(y @ parameters[2][k] + parameters[3][k])
            y = y @ parameters[4][k] + parameters[5][k]
            torch.testing.assert_close(stack(x)[k], y)
            total = total + (y * pull[k]).sum()
        for one, other in zip(found, torch.autograd.grad(total, [x, *parameters]), strict=True):
            torch.testing.assert_close(one, other)
        frozen = stack(x, frozen=True, first=1)
        torch.testing.assert_close(frozen, stack(x)[:1])
        (frozen * pull[:1]).sum().backward()
        assert x.grad is not None
        assert all(parameter.grad is None for parameter in parameters)


def test_targets_follow_by_polyak_averaging() -> None:
    method = SAC(hidden=(8,), tau=0.25)
    net = method.build(CONTINUOUS, torch.Generator().manual_seed(1))
    assert isinstance(net, OffPolicyNet)
    before = [parameter.clone() for parameter in net.target_critics.parameters()]
    with torch.no_grad():
        for parameter in net.critics.parameters():
            parameter.add_(1.0)
        for version in range(1, 4):
            method.after_update(net, version)
    share = 1 - 0.75**3
    for old, target, online in zip(before, net.target_critics.parameters(), net.critics.parameters(), strict=True):
        torch.testing.assert_close(target, (1 - share) * old + share * online)
    assert not any(parameter.requires_grad for parameter in net.target_critics.parameters())


@pytest.mark.parametrize("of", SPECS)
def test_microbatches_are_the_whole(of: str) -> None:
    spec, digests = SPECS[of], []
    for size in (None, 2):
        learner = Learner(SAC(hidden=(8, 8)), spec, seed=1, microbatch_size=size)
        assert isinstance(learner.net, OffPolicyNet)
        for number in range(3):
            report = learner.update(made(spec, seed=number))
        digests.append((torch.cat([p.detach().flatten() for p in learner.net.parameters()]), report.metrics))
    torch.testing.assert_close(digests[0][0], digests[1][0], atol=1e-6, rtol=1e-6)
    assert digests[0][1] == pytest.approx(digests[1][1], rel=1e-4, abs=1e-5)
    assert {"losses/qf1_loss", "losses/qf2_values", "losses/qf_loss", "losses/actor_loss"} <= set(digests[0][1])
    assert digests[0][1]["losses/alpha"] == pytest.approx(1, abs=0.01)


def test_a_learned_temperature_rises_where_the_policy_is_too_sure() -> None:
    for wanted, rises in ((5.0, True), (-5.0, False)):  # of two dimensions, log 4 = 1.39 nats are the most
        learner = Learner(SAC(hidden=(8,), target_entropy=wanted), CONTINUOUS, seed=1)
        assert isinstance(learner.net, OffPolicyNet)
        learner.update(made(CONTINUOUS))
        assert learner.net.log_alpha is not None
        assert (learner.net.log_alpha.item() > 0) is rises


def first_row(noise: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf[0], noise, namespace=NAMESPACE)


@pytest.mark.parametrize("of", SPECS)
def test_random_actions_are_uniform_and_the_mode_is_not(of: str) -> None:
    """Before learning starts: uniform in the Box, or among what is allowed, however sure the policy is."""
    method, spec = SAC(hidden=(8, 8)), SPECS[of]
    net = built(method, spec)
    with torch.no_grad():
        net.policy.mlp.out.bias.fill_(-5.0)  # of a Box, small spreads too
        net.policy.mlp.out.bias[0] = 9.0
    acting, rows = method.acting(net), 20_000
    observation: Any = torch.zeros(rows, WIDTH)
    if of == "masked":
        observation = {
            "action_mask": torch.tensor([[1, 0, 1, 1]], dtype=torch.int8).expand(rows, 4),
            "seen": observation,
        }
    rng = torch.Generator().manual_seed(1)
    assert method.at_random() == replace(method, epsilon=1.0)
    for share in (1.0, 0.25):
        random = replace(method, epsilon=share)
        noise = random.noise(acting, 1, rows, rng)
        decision = random.act(acting, observation, None, first_row(noise))
        chosen = decision.environment_action if of != "masked" else decision.action
        assert isinstance(chosen, Tensor)
        values = chosen.detach().double().numpy()
        if of == "continuous":
            assert (np.abs(values - [0, 2]) <= 2).all()
            away = np.abs(values[:, 0] - 2) > 0.1  # of the bound that the policy prefers
            expected = 3.9 / 4 * share
        else:
            away = values != (-1 if of == "discrete" else 0)
            expected = (3 / 4 if of == "discrete" else 2 / 3) * share
        assert away.mean() == pytest.approx(expected, abs=0.02)
        if of == "masked":
            assert not (values == 1).any()
        if share == 1 and of == "continuous":
            np.testing.assert_allclose(np.histogram(values[:, 1], 8, (0, 4))[0] / rows, 1 / 8, atol=0.01)
    mode = method.act(acting, observation, None, None)
    assert (mode.action == mode.action[0]).all()


def test_actions_of_integers_are_rounded_and_each_is_as_likely() -> None:
    box = Box(np.array([[-1, 0], [5, 7]]), np.array([[1, 0], [9, 8]]), torch.int32)
    method = SAC(hidden=(8,)).at_random()
    net = method.build(Spec(SEEN, box), torch.Generator().manual_seed(1))
    acting, rows = method.acting(net), 30_000
    noise = method.noise(acting, 1, rows, torch.Generator().manual_seed(2))
    decision = method.act(acting, torch.zeros(rows, WIDTH), None, first_row(noise))
    taken = decision.environment_action
    assert isinstance(taken, Tensor)
    assert taken.dtype == torch.int32
    assert taken.shape == (rows, 2, 2)
    assert decision.action.shape == (rows, 4)
    for place, values in (((0, 0), (-1, 0, 1)), ((0, 1), (0,)), ((1, 0), (5, 6, 7, 8, 9)), ((1, 1), (7, 8))):
        column = taken[:, place[0], place[1]]
        shares = [float((column == value).double().mean()) for value in values]
        np.testing.assert_allclose(shares, 1 / len(values), atol=0.015)


def test_actions_of_float64_never_leave_their_bounds() -> None:
    """Bounds that float32 rounds outwards, at every end."""
    low, high = np.array([-0.1, 1e-3]), np.array([0.1, 0.3])
    method = SAC(hidden=(8,))
    net = method.build(Spec(SEEN, Box(low, high, torch.float64)), torch.Generator().manual_seed(1))
    noise = torch.tensor([[1e9, 1e9], [-1e9, -1e9]])
    taken = method.act(method.acting(net), torch.zeros(2, WIDTH), None, noise).environment_action
    assert isinstance(taken, Tensor)
    assert taken.dtype == torch.float64
    values = taken.detach().numpy()
    assert (values <= high).all()
    assert (values >= low).all()
    np.testing.assert_allclose(values, [high, low], rtol=1e-5)


def test_images_have_an_encoder_of_the_policy_and_one_of_the_critics() -> None:
    picture = Box(np.zeros((36, 36, 1)), np.full((36, 36, 1), 255.0), torch.uint8)
    method = SAC(hidden=(8,))
    learner = Learner(method, Spec(picture, CONTINUOUS.action), seed=1)
    assert isinstance(learner.net, OffPolicyNet)
    held = copy.deepcopy(learner.net)
    image = torch.randint(0, 256, (ROWS, 36, 36, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    learner.update(made(CONTINUOUS).replace(observation=image, next_observation=image.flip(0)))
    for name, before in held.state_dict().items():
        moved = not torch.equal(before, learner.net.state_dict()[name])
        assert moved, name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tau": 0.0}, "tau=0.0: give a number above 0"),
        ({"ent_coef": -1.0}, 'ent_coef=-1.0: give a number from 0 on, or "auto"'),
        ({"target_entropy": float("nan")}, "target_entropy=nan"),
        ({"gamma": 1.5}, "gamma=1.5: give a number from 0 to 1"),
        ({"critics": 0}, "critics=0: give at least 1"),
        ({"n_step": 0}, "n_step=0: give at least 1"),
        ({"reward_scale": 0.0}, "reward_scale=0.0: give a number above 0"),
        ({"q_learning_rate": -1.0}, "q_learning_rate=-1.0: give a number from 0 on"),
        ({"epsilon": 2.0}, "epsilon=2.0: give a number from 0 to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        SAC(**settings)


def test_spaces_that_do_not_fit_are_refused() -> None:
    rng = torch.Generator()
    with pytest.raises(ConfigError, match=r"sac needs one Box or one Discrete.*MultiDiscrete.*Try: ppo"):
        SAC().build(Spec(SEEN, MultiDiscrete((2, 3))), rng)
    with pytest.raises(ConfigError, match=r"need bounds on every action"):
        SAC().build(Spec(SEEN, SEEN), rng)
    with pytest.raises(ConfigError, match=r"beyond ±2²⁴"):
        SAC().build(Spec(SEEN, Box(np.zeros(1), np.full(1, 2**30), torch.int64)), rng)
    with pytest.raises(ConfigError, match=r"activation='gelu': choose one of tanh, relu"):
        SAC(activation="gelu").build(CONTINUOUS, rng)
    bad = {"action_mask": Box(np.zeros(3), np.ones(3), torch.int8), "seen": SEEN}
    with pytest.raises(ConfigError, match=r"action_mask.*shape \(4,\)"):
        SAC().build(Spec(bad, Discrete(4)), rng)


def test_importance_weights_are_annealed_where_rows_are_prioritised() -> None:
    assert SAC().anneal(0.5) == SAC()
    method = SAC(prioritized_replay_alpha=0.6, prioritized_replay_beta=0.4, gamma=0.9, n_step=3)
    sampling = method.anneal(0.5).sampling
    assert (sampling.gamma, sampling.n_step, sampling.alpha, sampling.beta) == (0.9, 3, 0.6, 0.7)


def test_the_learning_rates_fall_where_that_is_asked_for() -> None:
    """Of the policy, the temperature and the action-values, linearly; the latter have their own or the policy's."""
    for own, of_critics in ((4e-3, 1e-3), (None, 5e-4)):
        method = SAC(hidden=(8,), learning_rate=2e-3, q_learning_rate=own, anneal_lr=True)
        learner = Learner(method, DISCRETE, seed=1)
        learner.anneal(0.75)
        rates = learner.update(made(DISCRETE)).learning_rates
        assert rates == {"critics": pytest.approx(of_critics), "policy": pytest.approx(5e-4)}
        before = copy.deepcopy(learner.net)
        assert isinstance(before, OffPolicyNet)
        learner.anneal(1.0)
        learner.update(made(DISCRETE))
        assert isinstance(learner.net, OffPolicyNet)
        for part in ("policy", "critics"):
            now = getattr(learner.net, part).state_dict()
            assert all(torch.equal(value, now[name]) for name, value in getattr(before, part).state_dict().items())
        assert torch.equal(before.log_alpha, learner.net.log_alpha)


def test_choices_weigh_values_by_probability() -> None:
    prob = torch.tensor([[0.25, 0.75]])
    values = torch.tensor([[4.0, 8.0]])
    assert Choices(None, prob.log(), prob).mean(values).tolist() == [7.0]
    assert Choices(torch.zeros(1, 2), torch.zeros(1), None).mean(torch.tensor([3.0])).tolist() == [3.0]
