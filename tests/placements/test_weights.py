"""Weights: exact versions never torn and never lost, the newest version under a fast publisher, any tree, notes."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace import Closed, ConfigError, RoleFailed, ShapeError, Stalled, Struct, axes, role

pytestmark = pytest.mark.timeout(60)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def tree(k: int, size: int = 3) -> dict[str, Any]:
    """A tree of every dtype whose every element says k (for a bool: whether k is odd)."""
    return {
        "b": [torch.full((size, 2), k % 2 if dtype is torch.bool else k).to(dtype) for dtype in DTYPES],
        "a": (torch.tensor(float(k)), torch.zeros(0)),
    }


# The protocol of the synchronous plans


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_exact_versions_are_never_torn_and_never_lost(everywhere: Any, max_lag: int) -> None:
    """The k-th item needs version max(0, k - max_lag) exactly; banks = max_lag + 1; readers and publisher pause."""
    rounds, readers = 25, 3

    def read(weights: Any, lanes: Any, first: Any) -> None:
        me = role()
        generator = np.random.default_rng(me.seed)
        own = {"a": torch.zeros(500), "b": torch.zeros(3, dtype=torch.int64)}
        for k in lanes[me.rank].deliveries():
            if generator.random() < 0.4:
                me.sleep(float(generator.random()) * 0.004)
            wanted = max(0, k - max_lag)
            note = weights.pull(own, version=wanted)
            seen = {float(own["a"].min()), float(own["a"].max()), *map(float, own["b"])}
            lanes[me.rank].put((k, note.version, note["twice"], sorted(seen)))

    def program(crew: Any) -> Any:
        generator = np.random.default_rng(5)
        source = {"a": torch.zeros(500), "b": torch.zeros(3, dtype=torch.int64)}
        weights = crew.weights(source, banks=max_lag + 1, twice=0)
        lanes = crew.lanes(readers, capacity=max(1, max_lag))
        crew.start(read, weights, lanes, source, copies=readers)
        taken = []
        for k in range(rounds):
            taken.append(lanes.take_each(10.0))
            if generator.random() < 0.3:
                role().sleep(0.003)
            for tensor in source.values():
                tensor.fill_(k + 1)
            weights.publish(source, k + 1, twice=2 * (k + 1))
        return taken

    for k, row in enumerate(everywhere(program)):
        version = max(0, k - max_lag)
        assert row == [(k, version, 2 * version, [float(version)])] * readers


@pytest.mark.parametrize("how", ["latest", "at_least"])
@pytest.mark.parametrize("banks", [1, 2])
def test_the_newest_is_never_torn_under_a_fast_publisher(beside: Any, banks: int, how: str) -> None:
    size = 1_000_000

    def read(weights: Any, lanes: Any) -> None:
        own = {"a": torch.zeros(size), "b": torch.zeros(7, dtype=torch.int64)}
        last, pulls = -1, 0
        while pulls < 20 or last < 5:
            pulls += 1
            note = weights.pull(own) if how == "latest" else weights.pull(own, at_least=last + 1)
            seen = {float(own["a"].min()), float(own["a"].max()), *map(float, own["b"])}
            assert seen == {float(note.version)}, f"torn: {seen} in version {note.version}"
            assert note["same"] == note.version
            assert note.version >= last + (how == "at_least")
            last = note.version
        lanes[role().rank].put(last)

    with beside.crew() as crew:
        source = {"a": torch.zeros(size), "b": torch.zeros(7, dtype=torch.int64)}
        weights, lanes = crew.weights(source, banks=banks, same=0), crew.lanes(2)
        crew.start(read, weights, lanes, copies=2)
        version, until = 0, time.monotonic() + 20.0
        while sum(lane.delivered for lane in lanes) < 2:
            version += 1
            source["a"].fill_(version)
            source["b"].fill_(version)
            weights.publish(source, version, same=version)
            role().sleep(0.0005)  # a breath, in which one bank can be copied whole
            assert time.monotonic() < until, "the readers never got a whole copy"
        assert min(lanes.take_each(5.0)) > 0


def test_versions_wait_for_their_publisher(place: Any) -> None:
    def publish(weights: Any, gate: Any) -> None:
        for version in range(1, 4):
            gate.take()
            weights.publish({"w": torch.full((2,), float(version))}, version, progress=version / 4)

    with place.crew() as crew:
        weights, gate = crew.weights({"w": torch.zeros(2)}, progress=0.0), crew.channel()
        crew.start(publish, weights, gate)
        own = {"w": torch.ones(2)}
        assert weights.pull(own).version == 0
        assert own["w"].tolist() == [0.0, 0.0]
        assert weights.latest == 0
        for version in range(1, 4):
            with pytest.raises(Stalled, match=rf"driver\[0\] waited 0\.03 s to pull version {version} from 'weights'"):
                weights.pull(own, version=version, timeout=0.03)
            gate.put(True)
            note = weights.pull(own, version=version, timeout=10.0)
            assert (note.version, note["progress"], note.values) == (version, version / 4, {"progress": version / 4})
            assert own["w"].tolist() == [float(version)] * 2
            assert weights.latest == version


def test_at_least_gives_the_newest(place: Any) -> None:
    with place.crew() as crew:
        weights, own = crew.weights({"w": torch.zeros(1)}, banks=2), {"w": torch.zeros(1)}
        for version in (1, 2, 5, 9):
            weights.publish({"w": torch.full((1,), float(version))}, version)
        assert weights.pull(own, at_least=3, timeout=1.0).version == 9
        assert weights.pull(own, timeout=1.0).version == 9
        assert weights.pull(own, version=5, timeout=1.0).version == 5
        assert own["w"].item() == 5.0


def test_an_overwritten_version_is_an_error_that_says_so(place: Any) -> None:
    with place.crew() as crew:
        weights, own = crew.weights({"w": torch.zeros(1)}, banks=2), {"w": torch.zeros(1)}
        for version in (1, 2, 3):
            weights.publish({"w": torch.zeros(1)}, version)
        for version in (0, 1):
            with pytest.raises(ConfigError, match=rf"version {version} .*overwritten.*2 banks"):
                weights.pull(own, version=version, timeout=1.0)
        assert [weights.pull(own, version=version).version for version in (2, 3)] == [2, 3]


def test_versions_grow(place: Any) -> None:
    with place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(1)}, banks=2)
        weights.publish({"w": torch.ones(1)}, 3)
        for version in (3, 2, 0, -1):
            with pytest.raises(ConfigError, match="version"):
                weights.publish({"w": torch.zeros(1)}, version)
        own = {"w": torch.zeros(1)}
        assert weights.pull(own).version == 3
        assert own["w"].item() == 1.0


def test_pull_takes_one_way_of_asking(place: Any) -> None:
    with place.crew() as crew, pytest.raises(ConfigError, match="not both"):
        crew.weights({"w": torch.zeros(1)}).pull({"w": torch.zeros(1)}, version=0, at_least=0)


def test_a_publisher_that_has_returned_closes_but_what_is_held_can_be_pulled(place: Any) -> None:
    def publish(weights: Any) -> None:
        weights.publish({"w": torch.ones(1)}, 1)

    with place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(1)}, banks=2)
        crew.start(publish, weights)
        crew.join(timeout=10.0)
        own = {"w": torch.zeros(1)}
        with pytest.raises(Closed, match="version 2"):
            weights.pull(own, version=2)
        with pytest.raises(Closed):
            weights.pull(own, at_least=2)
        assert [weights.pull(own, version=version).version for version in (0, 1)] == [0, 1]
        assert weights.pull(own).version == 1


def test_a_publisher_that_returned_without_publishing(place: Any) -> None:
    def forget(weights: Any) -> None:
        pass

    with place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(1)})
        crew.start(forget, weights)
        with pytest.raises(Closed):
            weights.pull({"w": torch.zeros(1)}, version=1)


def test_one_publisher(place: Any) -> None:
    def publish(weights: Any) -> None:
        weights.publish({"w": torch.zeros(1)}, 5)

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(1)})
        weights.publish({"w": torch.zeros(1)}, 1)
        crew.start(publish, weights)
        crew.join(timeout=10.0)
    assert type(caught.value.__cause__) is ConfigError
    assert "driver[0]" in str(caught.value)


# What it holds


def test_any_dtype_from_a_role_to_others(everywhere: Any, ask: Any) -> None:
    def publish(weights: Any, tree: Any) -> None:
        for version in range(1, 4):
            weights.publish(tree(version), version)

    def read(weights: Any, tree: Any) -> list[bool]:
        own = tree(77)
        same = []
        for version in range(4):
            weights.pull(own, version=version)
            expected = tree(version)
            pairs = [*zip(own["b"], expected["b"], strict=True), *zip(own["a"], expected["a"], strict=True)]
            same.append(all(torch.equal(left, right) and left.dtype is right.dtype for left, right in pairs))
        return same

    def local(k: int) -> Any:
        dtypes = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]
        tensors = [torch.full((3, 2), k % 2 if dtype is torch.bool else k).to(dtype) for dtype in dtypes]
        return {"b": tensors, "a": (torch.tensor(float(k)), torch.zeros(0))}

    def program(crew: Any) -> Any:
        weights = crew.weights(local(0), banks=4)
        crew.start(publish, weights, local)
        return ask(crew, read, weights, local, copies=2)

    assert everywhere(program) == [[True] * 4] * 2


def test_special_values_keep_their_bits(place: Any) -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    with place.crew() as crew:
        weights, own = crew.weights({"w": torch.zeros(4)}), {"w": torch.zeros(4)}
        weights.publish({"w": special}, 1)
        weights.pull(own)
        assert torch.equal(own["w"].view(torch.int32), special.view(torch.int32))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("steps", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64))

    def fill(self, k: int) -> Net:
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.fill_(k)
        return self

    def holds(self, k: int) -> bool:
        return all(bool((tensor == k).all()) for tensor in [*self.parameters(), *self.buffers()])


def test_a_module_with_buffers(place: Any) -> None:
    with place.crew() as crew:
        net, own = Net().fill(0), Net().fill(9)
        weights = crew.weights(net, banks=2)
        weights.pull(own)
        assert own.holds(0)
        weights.publish(net.fill(3), 1)
        weights.pull(own, version=1)
        assert own.holds(3)
        assert own.first.weight.requires_grad
        own.norm(own.first(torch.zeros(2, 3))).sum().backward()
        assert own.first.weight.grad is not None


def test_a_module_travels_to_a_role(everywhere: Any, ask: Any) -> None:
    def forward(weights: Any, net: Any) -> list[float]:
        weights.pull(net, version=1)
        with torch.no_grad():
            return net(torch.ones(1, 3)).flatten().tolist()

    def program(crew: Any) -> Any:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        weights = crew.weights(net)
        with torch.no_grad():
            for k, parameter in enumerate(net.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) * 0.01 + k)
        weights.publish(net, 1)
        answers = ask(crew, forward, weights, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), copies=2)
        with torch.no_grad():
            assert answers[0] == net(torch.ones(1, 3)).flatten().tolist()
        return answers

    everywhere(program)


def test_a_struct(place: Any, Count: Any, count: Any) -> None:
    with place.crew() as crew:
        weights, own = crew.weights(count(0)), count(7)
        weights.publish(count(5), 1)
        weights.pull(own)
        assert own.equal(count(5))


def test_structs_of_this_module_inside_a_dict(place: Any) -> None:
    class Part(Struct):
        x: Tensor = axes("N", torch.float64)

    with place.crew() as crew:
        source = {"part": Part(x=torch.zeros(3, dtype=torch.float64)), "y": [torch.zeros(2)]}
        weights = crew.weights(source)
        source["part"].x.fill_(2.0)  # type: ignore[attr-defined]
        weights.publish(source, 1)
        own = {"part": Part(x=torch.zeros(3, dtype=torch.float64)), "y": [torch.ones(2)]}
        weights.pull(own)
        assert own["part"].x.tolist() == [2.0] * 3  # type: ignore[attr-defined]
        assert own["y"][0].tolist() == [0.0, 0.0]  # type: ignore[index]


def test_strided_sources_and_targets(place: Any) -> None:
    with place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(3, 2)})
        weights.publish({"w": torch.arange(6.0).view(2, 3).t()}, 1)
        base = torch.full((2, 6), -1.0)
        own = {"w": base.t()[::2]}
        weights.pull(own)
        assert torch.equal(own["w"], torch.arange(6.0).view(2, 3).t())
        assert base[:, 1::2].unique().tolist() == [-1.0], "the gaps are not ours"


def test_publish_copies(place: Any) -> None:
    with place.crew() as crew:
        source = {"w": torch.ones(2)}
        weights, own = crew.weights(source), {"w": torch.zeros(2)}
        source["w"].fill_(5.0)
        weights.pull(own)
        assert own["w"].tolist() == [1.0, 1.0]
        weights.publish(source, 1)
        source["w"].fill_(6.0)
        weights.pull(own)
        assert own["w"].tolist() == [5.0, 5.0]
        own["w"].fill_(7.0)
        again = {"w": torch.zeros(2)}
        weights.pull(again)
        assert again["w"].tolist() == [5.0, 5.0]


def test_only_empty_tensors(place: Any) -> None:
    with place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(0)})
        weights.publish({"w": torch.zeros(0)}, 1)
        assert weights.pull({"w": torch.zeros(0)}).version == 1


@pytest.mark.parametrize("way", ["publish", "pull"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"w": torch.zeros(3), "v": torch.zeros(1)}, ["w", "[2]", "[3]"]),
        ({"w": torch.zeros(2, dtype=torch.float64), "v": torch.zeros(1)}, ["w", "float32", "float64"]),
        ({"w": torch.zeros(2)}, ["2", "1"]),
        ({"w": torch.zeros(2), "v": torch.zeros(1), "x": torch.zeros(1)}, ["2", "3"]),
    ],
)
def test_what_does_not_fit_is_a_shape_error(place: Any, way: str, wrong: Any, words: list[str]) -> None:
    fine = {"w": torch.ones(2), "v": torch.ones(1)}
    with place.crew() as crew:
        weights = crew.weights(fine)
        with pytest.raises(ShapeError) as caught:
            weights.publish(wrong, 1) if way == "publish" else weights.pull(wrong)
        assert all(word in str(caught.value) for word in words)
        weights.publish(fine, 2)
        own = {"w": torch.zeros(2), "v": torch.zeros(1)}
        assert weights.pull(own).version == 2
        assert own["w"].tolist() == [1.0, 1.0]


def test_a_number_in_a_tree_is_an_error(place: Any) -> None:
    with place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(2)})
        with pytest.raises(ConfigError, match="note"):
            weights.publish({"w": 1.0}, 1)


def test_a_module_that_was_converted_or_rebuilt_is_never_stale(place: Any) -> None:
    with place.crew() as crew:
        net = Net().fill(0)
        weights, own = crew.weights(net, banks=2), Net().fill(9)
        net.double()
        with pytest.raises(ShapeError, match="float64"):
            weights.publish(net, 1)
        net.float()
        net.sums = net.sums.double()  # as it was
        weights.publish(net.fill(4), 2)
        weights.pull(own)
        assert own.holds(4)
        net.first = nn.Linear(3, 2)
        net.first.weight = nn.Parameter(torch.zeros(2, 3))
        net.norm.running_mean = torch.zeros(2)
        weights.publish(net.fill(5), 3)
        weights.pull(own)
        assert own.holds(5)
        own.first = nn.Linear(3, 2)
        own.first.bias = nn.Parameter(torch.zeros(2))
        weights.pull(own)
        assert own.holds(5)


# Notes


def test_notes_carry_small_values(place: Any) -> None:
    with place.crew() as crew:
        weights, own = crew.weights({"w": torch.zeros(1)}, began="now"), {"w": torch.zeros(1)}
        assert weights.pull(own)["began"] == "now"
        weights.publish({"w": torch.zeros(1)}, 1, progress=0.5, name="α", pair=(1, [2]), nothing=None)
        note = weights.pull(own)
        assert dict(note.values) == {"progress": 0.5, "name": "α", "pair": (1, [2]), "nothing": None}
        assert note["progress"] == 0.5
        with pytest.raises(KeyError):
            note["began"]


def test_a_note_that_is_too_large_publishes_nothing(place: Any) -> None:
    with place.crew() as crew:
        weights, own = crew.weights({"w": torch.zeros(1)}), {"w": torch.ones(1)}
        with pytest.raises(ShapeError, match="note"):
            weights.publish({"w": torch.ones(1)}, 1, text="x" * 5000)
        assert weights.latest == 0
        assert weights.pull(own).version == 0
        assert own["w"].item() == 0.0


# History


def sources() -> dict[str, Any]:
    return {
        "a dict": {"w": torch.zeros(3), "v": torch.zeros(2, 2)},
        "a module": nn.Linear(3, 2),
        "a module with buffers": Net(),
        "a long list": [torch.zeros(k) for k in range(12)],
    }


@pytest.mark.parametrize("source", sources())
def test_history_goes_on_in_a_new_crew(place: Any, source: str) -> None:
    held = sources()[source]

    def fill(k: int) -> Any:
        with torch.no_grad():
            for tensor in torch.nn.Module.parameters(held) if isinstance(held, nn.Module) else leaves(held):
                tensor.fill_(k)
        return held

    def leaves(tree: Any) -> list[Tensor]:
        return list(tree.values()) if isinstance(tree, dict) else list(tree)

    def content(weights: Any, version: int) -> tuple[int, Any, list[list[float]]]:
        own = sources()[source]
        note = weights.pull(own, version=version, timeout=1.0)
        tensors = [*own.parameters()] if isinstance(own, nn.Module) else leaves(own)
        return note.version, dict(note.values), [tensor.detach().flatten().tolist() for tensor in tensors]

    with place.crew() as crew:
        weights = crew.weights(fill(0), banks=3, k=0)
        assert [note.version for note, _ in weights.history()] == [0]
        for version in (1, 2, 4, 5):
            weights.publish(fill(version), version, k=version)
        history = weights.history()
        before = [content(weights, version) for version in (2, 4, 5)]
        weights.publish(fill(6), 6, k=6)  # history is copies
    assert [(note.version, note["k"]) for note, _ in history] == [(2, 2), (4, 4), (5, 5)]
    with place.crew() as crew:
        weights = crew.weights(fill(99), banks=3, history=history)
        assert weights.latest == 5
        assert [content(weights, version) for version in (2, 4, 5)] == before
        assert [note for note, _ in weights.history()] == [note for note, _ in history]
        with pytest.raises(ConfigError):
            weights.publish(fill(5), 5)
        weights.publish(fill(6), 6)
        with pytest.raises(ConfigError):
            content(weights, 2)
        assert content(weights, 4) == before[1]


def test_history_of_more_versions_than_banks(place: Any) -> None:
    with place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(1)}, banks=3)
        for version in (1, 2):
            weights.publish({"w": torch.full((1,), float(version))}, version)
        history = weights.history()
    with place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(1)}, banks=2, history=history)
        assert [note.version for note, _ in weights.history()] == [1, 2]


def test_history_that_does_not_fit(place: Any) -> None:
    with place.crew() as crew:
        history = crew.weights({"w": torch.zeros(2)}).history()
    with place.crew() as crew, pytest.raises(ShapeError):
        crew.weights({"w": torch.zeros(3)}, history=history)
    with place.crew() as crew, pytest.raises(ShapeError):
        crew.weights({"w": torch.zeros(2), "v": torch.zeros(1)}, history=history)


@pytest.mark.slow
@pytest.mark.timeout(115)
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_the_protocol_for_long(beside: Any, max_lag: int) -> None:
    size = 200_000

    def read(weights: Any, lanes: Any) -> None:
        me = role()
        generator = np.random.default_rng(me.seed)
        own = {"a": torch.zeros(size), "b": torch.zeros(9, dtype=torch.bool)}
        for k in lanes[me.rank].deliveries():
            if generator.random() < 0.3:
                time.sleep(generator.random() * 0.002)
            version = max(0, k - max_lag)
            note = weights.pull(own, version=version)
            assert note.version == version
            assert float(own["a"].min()) == float(own["a"].max()) == version
            assert own["b"].tolist() == [version % 2 == 1] * 9
            lanes[me.rank].put(k)

    with beside.crew() as crew:
        source = {"a": torch.zeros(size), "b": torch.zeros(9, dtype=torch.bool)}
        weights = crew.weights(source, banks=max_lag + 1)
        lanes = crew.lanes(4, capacity=max(1, max_lag))
        crew.start(read, weights, lanes, copies=4)
        for k in range(1_500):
            assert lanes.take_each(20.0) == [k] * 4
            source["a"].fill_(k + 1)
            source["b"].fill_((k + 1) % 2 == 1)
            weights.publish(source, k + 1)
