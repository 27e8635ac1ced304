"""What is computed by NumPy where no gradient is asked for, against the same by PyTorch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace import PPO, Box, Discrete, Gymnasium, Learner, MultiDiscrete, Spec
from headrace.distributions import distribution_over
from headrace.nets import FEW, MLP, SMALL


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def box(low: float, high: float, shape: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32) -> Box:
    return Box(np.full(shape, low), np.full(shape, high), dtype)


def expected(net: MLP, x: Tensor) -> Tensor:
    """Its layers in float64, one after the other."""
    activation = {"tanh": torch.tanh, "relu": torch.relu}[net.activation]
    x = x.double()
    layers = [*net.hidden] if net.out is None else [*net.hidden, net.out]
    for number, layer in enumerate(layers):
        x = x @ layer.weight.double().T + layer.bias.double()
        if number < len(net.hidden):
            x = activation(x)
    return x


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("hidden", "out"), [((8,), 3), ((64, 64), 2), ((8, 5), None), ((), 2), ((300, 300), 1)])
@pytest.mark.parametrize("leading", [(64,), (4, 3), (1,), (0,), (5000,)])
def test_an_mlp_of_float32_is_its_layers(
    activation: str, hidden: tuple[int, ...], out: int | None, leading: tuple[int, ...]
) -> None:
    net = MLP(4, hidden, out, activation=activation, rng=rng())
    for parameter in net.parameters():
        parameter.data.mul_(2).add_(0.1)
    x = torch.randn(*leading, 4, generator=rng(1))
    with torch.no_grad():
        y = net(x)
        torch.testing.assert_close(y, expected(net, x).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net(x).detach(), y, rtol=1e-4, atol=1e-4)  # with a gradient


def test_who_computes_follows_from_the_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    within = MLP._by_numpy

    def noted(self: MLP, rows: Tensor, *rest: object) -> Tensor:
        asked.append(len(rows))
        return within(self, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(MLP, "_by_numpy", noted)
    net = MLP(4, (64, 64), 2, rng=rng())
    most = SMALL // 64**2
    with torch.no_grad():
        for rows in (1, most, most + 1):
            net(torch.zeros(rows, 4))
        MLP(4, (SMALL // FEW // 4,), 1, rng=rng())(torch.zeros(1, 4))
        MLP(4, (SMALL // FEW // 4 + 1,), 1, rng=rng())(torch.zeros(1, 4))
        MLP(4, (), 1, rng=rng())(torch.zeros(1, 4))  # of one layer there is nothing to gain
    net(torch.zeros(1, 4))
    net.double()(torch.zeros(1, 4, dtype=torch.float64))
    assert asked == [1, most, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.out.weight.data.zero_(),
        lambda net: net.out.weight.data.copy_(torch.zeros(2, 8)),
        lambda net: setattr(net.out.weight, "data", torch.zeros(2, 8)),
        lambda net: setattr(net.out, "weight", nn.Parameter(torch.zeros(2, 8))),
        lambda net: net.load_state_dict({key: torch.zeros_like(value) for key, value in net.state_dict().items()}),
        lambda net: net.load_state_dict(
            {key: torch.zeros_like(value) for key, value in net.state_dict().items()}, assign=True
        ),
    ],
    ids=["in place", "copied", "data", "replaced", "loaded", "assigned"],
)
def test_changed_weights_are_seen(change: Callable[[MLP], object]) -> None:
    net, x = MLP(4, (8,), 2, rng=rng()), torch.randn(3, 4, generator=rng(1))
    with torch.no_grad():
        assert net(x).abs().min() > 0
        change(net)
        assert not net(x).any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_copy_has_weights_of_its_own(copied: Callable[[MLP], MLP]) -> None:
    net, x = MLP(4, (8,), 2, rng=rng()), torch.randn(3, 4, generator=rng(1))
    with torch.no_grad():
        before = net(x)
        other = copied(net)
        net.out.weight.zero_()  # type: ignore[union-attr]
        assert torch.equal(other(x), before)
        other.out.bias.fill_(7)  # type: ignore[union-attr]
        assert not net(x).any()
    assert len(pickle.dumps(net)) < 10_000


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("leading", [(5,), (4, 5), ()])
@pytest.mark.parametrize(
    ("space", "squashed"),
    [
        (Discrete(4), False),
        (Discrete(3, start=-1), False),
        (MultiDiscrete((3, 2)), False),
        (box(-1, 1), False),
        (box(-1, 1), True),
        (box(-0.1, 2.3, (2, 2), torch.float64), False),
        (box(0, 7, (3,), torch.int16), False),
        (box(-np.inf, 1), False),
        ({"turn": Discrete(2), "push": box(-2, 1)}, False),
    ],
    ids=str,
)
def test_an_action_is_that_of_pytorch(space: object, squashed: bool, leading: tuple[int, ...], greedy: bool) -> None:
    policy = distribution_over(space, squashed)  # type: ignore[arg-type]
    for parameter in policy.parameters():
        parameter.data.normal_(generator=rng(3))
    logits = 2 * torch.randn(*leading, policy.size, generator=rng(1))
    noise = None if greedy else policy.noise(*leading, rng=rng(2))
    action, log_prob = policy.sample(logits, noise)
    given = policy.environment_action(action)
    with torch.no_grad():
        found, of_found = policy.sample(logits, noise)
        found_given = policy.environment_action(found)
    exact = {"rtol": 0, "atol": 0} if not isinstance(space, Box | dict) else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found, action, **exact)
    torch.testing.assert_close(of_found, log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_given, given, **exact)


def test_weights_that_are_not_finite_act_without_a_warning() -> None:
    """As PyTorch does. pytest makes an error of a warning."""
    spec = Spec(box(-1, 1), box(-1, 1))
    for value in (np.inf, -np.inf, np.nan, 3e38):
        learner = Learner(PPO(hidden=(8,)), spec, seed=1)
        with torch.no_grad():
            for parameter in learner.net.parameters():
                parameter.fill_(value)
            noise = learner.method.noise(learner.net, 1, 2, rng())[0]
            decision = learner.method.act(learner.net, torch.ones(2, 3), None, noise)
        assert decision.environment_action.shape == (2, 3)


def test_a_loop_has_no_wrapper_that_only_watches_the_order_of_calls() -> None:
    one = Gymnasium("CartPole-v1")._one()
    layers = []
    while isinstance(one, gymnasium.Wrapper):
        layers.append(type(one).__name__)
        one = one.env
    assert layers == ["TimeLimit"]
