"""Layers and distributions against PyTorch's own, one by one, gradients included."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import TanhTransform, TransformedDistribution

from headrace import Box, ConfigError, Discrete, Spec
from headrace.distributions import Categorical, Normal, SquashedNormal, distribution_over
from headrace.nets import CHUNK, CNN, GRU, MLP, ActorCritic, Encoder, is_image
from headrace.spaces import MASK


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads for tensors this small only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def box(size: int, low: float = -1.0, high: float = 1.0) -> Box:
    return Box(np.full(size, low), np.full(size, high))


# -- layers


def plain(net: MLP, x: Tensor) -> Tensor:
    """The same layers, applied one after the other."""
    activation = {"tanh": torch.tanh, "relu": torch.relu}[net.activation]
    for layer in net.hidden:
        x = activation(layer(x))
    return x if net.out is None else net.out(x)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("hidden", "out"), [((8,), 3), ((8, 5), 1), ((8, 5, 7), None), ((), 2), ((), None)])
@pytest.mark.parametrize("leading", [(6,), (4, 3), (1,), (0,)])
def test_an_mlp_is_its_layers(activation: str, hidden: tuple[int, ...], out: int | None, leading: tuple[int, ...]):
    net = MLP(4, hidden, out, activation=activation, rng=rng()).double()
    for parameter in net.parameters():
        parameter.data.normal_(generator=rng(1))
    x = torch.randn(*leading, 4, dtype=torch.float64, generator=rng(2), requires_grad=True)
    y, expected = net(x), plain(net, x)
    torch.testing.assert_close(y, expected)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
    if not expected.requires_grad or expected is x:
        return
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=rng(3))
    inputs = [x, *net.parameters()]
    ours = torch.autograd.grad((y * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)


def test_an_mlp_s_gradient_reaches_what_lies_below_it() -> None:
    below, above = nn.Linear(4, 6), MLP(6, (5,), 2, rng=rng())
    above(below(torch.randn(3, 4, generator=rng(1)))).sum().backward()
    assert below.weight.grad is not None
    assert below.weight.grad.abs().sum() > 0


def test_weights_are_orthogonal_and_biases_zero_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    net = MLP(16, (16, 16), 4, gain=0.01, rng=rng())
    assert torch.equal(torch.get_rng_state(), before)
    for layer, gain in zip([*net.hidden, net.out], (math.sqrt(2), math.sqrt(2), 0.01), strict=True):
        assert isinstance(layer, nn.Linear)
        rows = layer.weight.detach() @ layer.weight.detach().T / gain**2
        torch.testing.assert_close(rows, torch.eye(len(rows)), atol=1e-5, rtol=0)
        assert not layer.bias.detach().any()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="activation='swish': choose one of tanh, relu"):
        MLP(4, (8,), activation="swish", rng=rng())
    with pytest.raises(ConfigError, match="memory='lstm'"):
        ActorCritic(Spec(box(3), Discrete(2)), memory="lstm", rng=rng())


def test_observations_become_vectors() -> None:
    assert Encoder(Discrete(3, start=-1))(torch.tensor([-1, 1])).tolist() == [[1, 0, 0], [0, 0, 1]]
    picture = Box(np.zeros((2, 3), np.uint8), np.full((2, 3), 255, np.uint8), torch.uint8)
    encoded = Encoder(picture)(torch.full((5, 7, 2, 3), 9, dtype=torch.uint8))
    assert encoded.shape == (5, 7, 6)
    assert encoded.dtype == torch.float32
    assert encoded.unique().tolist() == [9]


def test_a_gru_is_torch_s_and_forgets_where_an_episode_begins() -> None:
    gru = GRU(3, 5, rng())
    whole = nn.GRU(3, 5)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(whole, f"{name}_l0").data.copy_(getattr(gru.cell, name))
    x, memory = torch.randn(6, 2, 3, generator=rng(1)), torch.randn(2, 5, generator=rng(2))
    never = torch.zeros(6, 2, dtype=torch.bool)
    torch.testing.assert_close(gru(x, memory, never), whole(x, memory.unsqueeze(0))[0])
    first = never.clone()
    first[3, 1] = True
    outputs = gru(x, memory, first)
    torch.testing.assert_close(outputs[:, 0], whole(x, memory.unsqueeze(0))[0][:, 0])
    torch.testing.assert_close(outputs[3:, 1], whole(x[3:, 1:])[0][:, 0])


# -- images


def picture(*shape: int, low: float = 0, high: float = 255, dtype: torch.dtype = torch.uint8) -> Box:
    return Box(np.full(shape, low), np.full(shape, high), dtype)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (picture(84, 84, 4), True),
        (picture(4, 84, 84), True),
        (picture(210, 160, 3), True),
        (picture(36, 36, 1), True),
        (picture(36, 36, 36), True),
        (picture(35, 84, 3), False),
        (picture(84, 3, 84), False),
        (picture(3, 40, 35), False),
        (picture(84, 84), False),
        (picture(2, 84, 84, 3), False),
        (picture(84, 84, 3, low=-1, high=1, dtype=torch.float32), True),
        (picture(84, 84, 3, low=0, high=math.inf, dtype=torch.float32), False),
        (Discrete(3), False),
    ],
)
def test_what_an_image_is(space: Box, expected: bool) -> None:
    assert is_image(space) == expected


def nature(net: CNN, image: Tensor) -> Tensor:
    """The network of the paper, in PyTorch's own layers, on images [N, C, H, W] from 0 to 1."""
    first, second, third = net.convolutions
    layers = nn.Sequential(
        *(nn.Conv2d(image.shape[1], 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, 1), nn.ReLU()),
    )
    for ours, theirs in zip((first, second, third), layers[::2], strict=True):
        theirs.weight, theirs.bias = ours.weight, ours.bias
    # Units in the order of height, width and channel; PyTorch's flatten has the channel first.
    return torch.relu(net.out(layers(image).movedim(1, -1).flatten(1)))


@pytest.mark.parametrize("shape", [(4, 84, 84), (36, 44, 1), (3, 50, 36)])
def test_a_cnn_is_that_of_the_paper(shape: tuple[int, ...]) -> None:
    net = CNN(picture(*shape), rng())
    image = torch.randint(0, 256, (3, 2, *shape), dtype=torch.uint8, generator=rng(1))
    scaled = image.flatten(0, 1).float() / 255
    expected = nature(net, scaled if shape[0] < shape[2] else scaled.movedim(-1, 1)).view(3, 2, 512)
    found = net(image)
    assert found.shape == (3, 2, 512)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(net(image), expected, atol=1e-4, rtol=1e-4)
    weights = torch.randn(3, 2, 512, generator=rng(2))
    parameters = list(net.parameters())
    ours = torch.autograd.grad((found * weights).sum(), parameters)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, atol=1e-3, rtol=1e-3)


def test_many_images_are_looked_at_in_parts() -> None:
    net = CNN(picture(36, 36, 1), rng())
    image = torch.randint(0, 256, (CHUNK + 3, 36, 36, 1), dtype=torch.uint8, generator=rng(1))
    with torch.no_grad():
        whole = torch.cat([net(image[:5]), net(image[5:])])
        torch.testing.assert_close(net(image), whole, atol=1e-5, rtol=1e-5)


def test_a_cnn_begins_orthogonal_with_gain_root_two() -> None:
    before = torch.get_rng_state()
    net = CNN(picture(36, 36, 1), rng())
    assert torch.equal(torch.get_rng_state(), before)
    for layer in (*net.convolutions, net.out):
        weight = layer.weight.detach().flatten(1)
        narrow = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(narrow, 2 * torch.eye(len(narrow)), atol=1e-4, rtol=0)
        assert not layer.bias.detach().any()


def test_LC_36_images_are_scaled_once_by_their_declared_bounds() -> None:
    for space, value in (
        (picture(36, 36, 3), 255),
        (picture(36, 36, 3, high=1, dtype=torch.float32), 1.0),
        (picture(36, 36, 3, high=255, dtype=torch.float32), 255.0),
        (picture(36, 36, 3, low=-1, high=1, dtype=torch.float32), 1.0),
    ):
        image = torch.full((2, 36, 36, 3), value, dtype=space.dtype)
        net, held = CNN(space, rng()), image.clone()
        seen = []
        net.convolutions[0].register_forward_pre_hook(lambda layer, inputs, seen=seen: seen.append(inputs[0]))
        net(image)
        assert seen[0].dtype == torch.float32
        assert seen[0].unique().tolist() == [1.0]
        net(torch.full_like(image, float(space.low.min())))
        assert seen[1].unique().tolist() == [0.0]
        assert torch.equal(image, held)  # and what was given is left as it is


def test_images_and_vectors_are_joined_and_masks_are_not() -> None:
    spaces = {
        "camera": picture(36, 36, 3),
        "a": {"speed": box(2), "gear": Discrete(3)},
        MASK: Box(np.zeros(2), np.ones(2), torch.int8),
    }
    encoder = Encoder(spaces, rng())
    shown = {
        "camera": torch.randint(0, 256, (5, 36, 36, 3), dtype=torch.uint8, generator=rng(1)),
        "a": {"speed": torch.rand(5, 2), "gear": torch.tensor([0, 1, 2, 1, 0])},
        MASK: torch.ones(5, 2, dtype=torch.int8),
    }
    vector = torch.cat([torch.eye(3)[shown["a"]["gear"]], shown["a"]["speed"]], 1)  # type: ignore[index]
    expected = torch.cat([encoder.cnns[0](shown["camera"]), vector], 1)
    assert torch.equal(encoder(shown), expected)
    assert encoder.outputs == 512 + 5


def test_above_images_there_are_no_hidden_layers_unless_asked_for() -> None:
    spec = Spec(picture(36, 36, 1), Discrete(2))
    assert [len(ActorCritic(spec, rng=rng()).policy.hidden), ActorCritic(spec, rng=rng()).policy.out.in_features] == [
        0,
        512,
    ]
    assert len(ActorCritic(spec, (16,), rng=rng()).policy.hidden) == 1
    assert len(ActorCritic(Spec(box(2), Discrete(2)), rng=rng()).policy.hidden) == 2
    recurrent = ActorCritic(spec, memory="gru", rng=rng())
    assert recurrent.gru is not None
    assert recurrent.gru.size == 512
    with pytest.raises(ConfigError, match="hidden is empty"):
        ActorCritic(Spec(box(2), Discrete(2)), (), memory="gru", rng=rng())


# -- normalisers


def test_only_boxes_of_floats_that_are_no_images_are_normalised() -> None:
    spaces = {
        "a": box(2),
        "b": Discrete(2),
        "c": picture(36, 36, 1, high=1, dtype=torch.float32),
        "d": Box(np.zeros((1, 2)), np.full((1, 2), 9), torch.uint8),
        "e": Box(np.full(1, -np.inf), np.full(1, np.inf), torch.float64),
    }
    encoder = Encoder(spaces, rng(), normalize=True)
    far = 1e6 + torch.arange(4.0, dtype=torch.float64).unsqueeze(1)
    shown = {
        "a": torch.tensor([[1.0, 5], [3, 5], [1, 5], [3, 5]]),
        "b": torch.tensor([0, 1, 1, 0]),
        "c": torch.rand(4, 36, 36, 1, generator=rng(1)),
        "d": torch.randint(0, 9, (4, 1, 2), dtype=torch.uint8, generator=rng(2)),
        "e": far,
    }
    with torch.no_grad():
        before = encoder(shown)
        encoder.move(shown, torch.ones(4), lambda vector, weight: vector)
        after = encoder(shown)
    assert after.dtype == torch.float32
    assert torch.equal(after[:, :512], before[:, :512])
    assert after[:, 512:514].tolist() == [[-1, 0], [1, 0], [-1, 0], [1, 0]]
    assert torch.equal(after[:, 514:518], before[:, 514:518])
    deviations = (far - far.mean()) / far.std(correction=0)
    torch.testing.assert_close(after[:, 518:], deviations.float())  # not cut off at a float32's 24 bits
    with pytest.raises(ConfigError, match="there is nothing to normalise in Discrete"):
        Encoder(Discrete(3), normalize=True)


# -- distributions


def test_categorical_terms_are_those_of_torch() -> None:
    ours = Categorical(Discrete(5))
    logits = torch.randn(4, 3, 5, dtype=torch.float64, generator=rng(), requires_grad=True)
    action = torch.randint(0, 5, (4, 3), generator=rng(1))
    weights = torch.randn(2, 4, 3, dtype=torch.float64, generator=rng(2))
    theirs = torch.distributions.Categorical(logits=logits)
    expected = theirs.log_prob(action), theirs.entropy()
    for used in [(1, 1), (1, 0), (0, 1)]:
        given = ours.evaluate(logits, action)
        for our, their in zip(given, expected, strict=True):
            torch.testing.assert_close(our, their)
        gradients = [
            torch.autograd.grad(
                sum((use * w * term).sum() for use, w, term in zip(used, weights, terms, strict=True) if use),
                logits,
                retain_graph=True,
            )[0]
            for terms in (given, expected)
        ]
        torch.testing.assert_close(*gradients)


def test_categorical_samples_are_distributed_as_they_should() -> None:
    ours = Categorical(Discrete(3, start=4))
    logits = torch.tensor([0.1, 1.2, -1.0])
    noise = ours.noise(100_000, rng=rng())
    action, log_prob = ours.sample(logits.expand(100_000, 3), noise)
    share = action.bincount(minlength=3) / 100_000
    torch.testing.assert_close(share, logits.softmax(0), atol=5e-3, rtol=0)  # three standard deviations
    torch.testing.assert_close(log_prob, logits.log_softmax(0)[action])
    assert ours.sample(logits, None)[0] == 1
    given = ours.environment_action(action)
    assert given is not None
    assert torch.equal(given, action + 4)


def test_normal_terms_are_those_of_torch() -> None:
    ours = Normal(box(3)).double()
    ours.log_std.data.copy_(torch.tensor([0.3, -1.0, 0.0]))
    mean = torch.randn(7, 3, dtype=torch.float64, generator=rng(), requires_grad=True)
    action, log_prob = ours.sample(mean, torch.randn(7, 3, dtype=torch.float64, generator=rng(1)))
    theirs = torch.distributions.Independent(torch.distributions.Normal(mean, ours.log_std.exp()), 1)
    torch.testing.assert_close(log_prob, theirs.log_prob(action))
    given = ours.evaluate(mean, action.detach())
    expected = theirs.log_prob(action.detach()), theirs.entropy()
    for our, their in zip(given, expected, strict=True):
        torch.testing.assert_close(our, their)
    inputs = [mean, ours.log_std]
    for our, their in zip(
        torch.autograd.grad((given[0] + given[1]).sum(), inputs),
        torch.autograd.grad((expected[0] + expected[1]).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(our, their)


def squashed(mean: Tensor, log_std: Tensor) -> TransformedDistribution:
    return TransformedDistribution(
        torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1),
        [TanhTransform(cache_size=1)],
    )


def test_squashed_normal_terms_are_those_of_torch() -> None:
    ours = SquashedNormal(box(2)).double()
    ours.log_std.data.copy_(torch.tensor([0.2, -0.7]))
    mean = torch.randn(5, 2, dtype=torch.float64, generator=rng())
    action, log_prob = ours.sample(mean, torch.randn(5, 2, dtype=torch.float64, generator=rng(1)))
    theirs = squashed(mean, ours.log_std.detach())
    torch.testing.assert_close(log_prob, theirs.log_prob(action.tanh()), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.evaluate(mean, action)[0], log_prob)
    torch.manual_seed(0)
    monte_carlo = -theirs.log_prob(theirs.sample((200_000,))).mean(0)
    torch.testing.assert_close(ours.evaluate(mean, action)[1], monte_carlo, atol=0.02, rtol=0)


def test_squashed_normal_is_right_at_the_bounds() -> None:
    """float32: tanh(20) is 1; log(1 - tanh² 20) is 2 (log 2 - 20) to many digits."""
    ours = SquashedNormal(box(1))
    for u in (-20.0, 20.0, 80.0):
        action = torch.tensor([[u]])
        log_prob, entropy = ours.evaluate(action, action)
        expected = -0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - abs(u))
        assert float(log_prob.detach()) == pytest.approx(expected, rel=1e-6)
        assert entropy.isfinite().all()
    given = ours.environment_action(torch.tensor([[80.0]]))
    assert given is not None
    assert float(given) == 1.0


@pytest.mark.parametrize("kind", [Normal, SquashedNormal])
def test_actions_are_scaled_to_the_box(kind: type[Normal | SquashedNormal]) -> None:
    space = Box(np.array([[0.0, -4.0]]), np.array([[1.0, 4.0]]))
    ours = kind(space)
    chosen = torch.tensor([[0.0, 0.5], [9.0, -9.0]])
    given = ours.environment_action(chosen)
    assert given is not None
    assert given.shape == (2, 1, 2)
    half = math.tanh(0.5) if kind is SquashedNormal else 0.5
    torch.testing.assert_close(given.flatten(1), torch.tensor([[0.5, 4 * half], [1.0, -4.0]]), atol=1e-5, rtol=0)


def test_what_has_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs bounds on every action"):
        distribution_over(Box(np.array([-np.inf]), np.array([np.inf])), squashed=True)
    with pytest.raises(ConfigError, match="squashed=True is for actions in a Box"):
        distribution_over(Discrete(2), squashed=True)
    with pytest.raises(ConfigError, match="of integers beyond ±2²⁴ it could not choose every one"):
        distribution_over(Box(np.zeros(2, np.int64), np.full(2, 2**24 + 1), torch.int64))
