"""Channels: order, capacity, copies, views, shapes, and how they end."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace import Closed, ConfigError, Inline, RoleFailed, ShapeError, Stalled, Struct, Threads, axes, role

pytestmark = pytest.mark.timeout(60)

SAME_BITS = {
    torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16,
}  # fmt: skip


def bits(tensor: Tensor) -> Any:
    """What a tensor holds, exactly: NaN and the sign of zero included."""
    dtype = SAME_BITS.get(tensor.dtype, tensor.dtype)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return str(tensor.dtype), list(tensor.shape), plain.view(dtype).flatten().tolist()


# Order, capacity, back-pressure


@pytest.mark.parametrize("like", [None, (0, 0.0), 0, "struct"], ids=["values", "numbers", "number", "struct"])
@pytest.mark.parametrize("capacity", [1, 3])
def test_items_arrive_in_order_and_none_is_lost(place: Any, count: Any, capacity: int, like: Any) -> None:
    def item(k: int) -> Any:
        return count(k) if like == "struct" else (k, k / 2) if like else k

    def write(channel: Any, item: Any) -> None:
        for k in range(200):
            channel.put(item(k))

    with place.crew() as crew:
        channel = crew.channel(capacity, like=count() if like == "struct" else like)
        crew.start(write, channel, item)
        for k in range(200):
            taken = channel.take(10.0)
            if like == "struct":
                assert taken.equal(count(k))
            else:
                assert taken == item(k)
        assert (channel.delivered, channel.taken) == (200, 200)
        with pytest.raises(Closed):
            channel.take(10.0)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_a_writer_waits_at_exactly_the_capacity(place: Any, until: Any, capacity: int) -> None:
    def write(channel: Any) -> None:
        for k in range(20):
            channel.put((k,))

    with place.crew() as crew:
        channel = crew.channel(capacity, like=(0,))
        crew.start(write, channel)
        for taken in range(4):
            until(lambda taken=taken: channel.delivered == capacity + taken)
            role().sleep(0.05)
            assert channel.delivered == capacity + taken, "one more than the capacity was put"
            assert channel.take(5.0) == (taken,)


def test_put_take_put_at_capacity_one(place: Any) -> None:
    """The room is free as soon as a take has returned, though what it returned is looked at still."""
    with place.crew() as crew:
        channel = crew.channel(1, like=torch.zeros(2))
        channel.put(torch.tensor([1.0, 1.0]), timeout=1.0)
        first = channel.take(1.0)
        channel.put(torch.tensor([2.0, 2.0]), timeout=1.0)
        assert first.tolist() == [1.0, 1.0]
        assert channel.take(1.0).tolist() == [2.0, 2.0]


def test_two_roles_that_answer_each_other_at_capacity_one(everywhere: Any) -> None:
    def add(inward: Any, outward: Any) -> None:
        while True:
            (k,) = inward.take()
            outward.put((2 * k + 1,))

    def program(crew: Any) -> list[int]:
        forth, back = crew.channel(like=(0,)), crew.channel(like=(0,))
        crew.start(add, forth, back)
        numbers = [0]
        for _ in range(50):
            forth.put((numbers[-1],))
            numbers.append(back.take(10.0)[0])
        return numbers

    assert everywhere(program) == [2**k - 1 for k in range(51)]


def test_a_chain_of_roles(everywhere: Any) -> None:
    def step(channels: Any) -> None:
        rank = role().rank
        while True:
            channels[rank + 1].put([*channels[rank].take(), rank])

    def program(crew: Any) -> Any:
        channels = [crew.channel(name=f"link-{k}") for k in range(4)]
        crew.start(step, channels, copies=3)
        taken = []
        for k in range(10):
            channels[0].put([-k])
            taken.append(channels[3].take(10.0))
        return taken

    assert everywhere(program) == [[-k, 0, 1, 2] for k in range(10)]


# put copies


def test_put_copies(place: Any, Count: Any) -> None:
    def write(channel: Any, gate: Any) -> None:
        item = Count(number=torch.full((4,), 1), share=torch.full((4, 3), 1.0))
        channel.put(item)
        item.number.fill_(-1)
        item.share.fill_(-1.0)
        gate.put([item.number[0].item()])

    with place.crew() as crew:
        like = Count(number=torch.zeros(4, dtype=torch.int64), share=torch.zeros(4, 3))
        channel, gate = crew.channel(like=like), crew.channel()
        crew.start(write, channel, gate)
        assert gate.take(10.0) == [-1]
        taken = channel.take(10.0)
        assert taken.number.tolist() == [1] * 4
        assert taken.share.unique().tolist() == [1.0]


def test_put_copies_values(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel()
        numbers = [1, {"a": [2]}]
        channel.put(numbers)
        numbers[1]["a"].append(3)  # type: ignore[index]
        first = channel.take(1.0)
        assert first == [1, {"a": [2]}]
        channel.put(first)
        assert channel.take(1.0) is not first


def test_what_the_reader_does_to_a_view_does_not_reach_the_next_item(place: Any) -> None:
    def write(channel: Any) -> None:
        item = torch.arange(3.0)
        for _ in range(5):
            channel.put(item)

    with place.crew() as crew:
        channel = crew.channel(2, like=torch.zeros(3))
        crew.start(write, channel)
        for _ in range(5):
            taken = channel.take(5.0)
            assert taken.tolist() == [0.0, 1.0, 2.0]
            taken.fill_(9.0)


# Views


@pytest.mark.parametrize("capacity", [1, 3])
def test_a_take_is_valid_until_the_next_take_returns(poisoned: Any, count: Any, until: Any, capacity: int) -> None:
    def write(channel: Any, count: Any) -> None:
        for k in channel.deliveries():
            channel.put(count(k))

    with poisoned.crew() as crew:
        channel = crew.channel(capacity, like=count())
        crew.start(write, channel, count)
        kept = channel.take(5.0)
        for k in range(1, 10):
            until(lambda k=k: channel.delivered == capacity + k)
            role().sleep(0.01)
            assert kept.equal(count(k - 1)), "overwritten while it was still valid"
            kept = channel.take(5.0)


def test_a_view_outlives_a_take_that_fails(poisoned: Any, count: Any) -> None:
    with poisoned.crew() as crew:
        channel = crew.channel(like=count())
        channel.put(count(3))
        kept = channel.take(1.0)
        with pytest.raises(Stalled):
            channel.take(timeout=0.1)
        assert kept.equal(count(3))
        channel.close()
        with pytest.raises(Closed):
            channel.take(1.0)
        assert kept.equal(count(3))


def test_a_view_that_was_kept_too_long_is_poisoned(poisoned: Any, count: Any) -> None:
    with poisoned.crew() as crew:
        channel = crew.channel(2, like=count())
        channel.put(count(3))
        channel.put(count(4))
        kept = channel.take(1.0)
        clone = kept.clone()
        assert kept.equal(count(3))
        assert channel.take(1.0).equal(count(4))
        assert kept.number.tolist() == [-1] * 4
        assert kept.share.isnan().all()
        assert clone.equal(count(3)), "a clone is kept"


def test_poison_never_shows_in_what_is_taken(poisoned: Any, count: Any) -> None:
    def write(channel: Any, count: Any) -> None:
        for k in range(100):
            channel.put(count(k))

    with poisoned.crew() as crew:
        channel = crew.channel(2, like=count())
        crew.start(write, channel, count)
        for k in range(100):
            assert channel.take(5.0).equal(count(k))


def test_a_view_stays_valid_after_the_crew(place: Any, count: Any) -> None:
    """It is no longer anybody's to overwrite; above all it must not be unmapped memory."""
    with place.crew() as crew:
        channel = crew.channel(like=count())
        channel.put(count(3))
        kept = channel.take(1.0)
    assert kept.equal(count(3))


def test_take_to_a_device_is_an_owned_copy(poisoned: Any, count: Any) -> None:
    with poisoned.crew() as crew:
        tree = {
            "a": torch.tensor([True, False]),
            "b": (torch.tensor(2.5, dtype=torch.float64), 3, 0.5, True),
            "z": torch.zeros(0, 2),
        }
        channel, mixed = crew.channel(2, like=count()), crew.channel(like=tree)
        for k in range(2):
            channel.put(count(k))
        owned = channel.take(1.0, device="cpu")
        channel.take(1.0, device=torch.device("cpu"))
        channel.put(count(9))
        channel.take(1.0)
        assert owned.equal(count(0))
        owned.number.fill_(5)
        mixed.put(tree)
        taken = mixed.take(1.0, device="cpu")
        assert taken["a"].tolist() == [True, False]
        assert bits(taken["b"][0]) == bits(tree["b"][0])  # type: ignore[arg-type]
        assert taken["b"][1:] == (3, 0.5, True)
        assert list(taken["z"].shape) == [0, 2]


def test_take_values_to_a_device(place: Any) -> None:
    with place.crew() as crew:
        values, numbers = crew.channel(), crew.channel(like=(0, 0.0))
        values.put({"a": 1})
        numbers.put((1, 2.0))
        assert values.take(1.0, device="cpu") == {"a": 1}
        assert numbers.take(1.0, device="cpu") == (1, 2.0)


# reserve, commit


def test_reserve_fills_in_place(place: Any, count: Any) -> None:
    def write(channel: Any, told: Any) -> None:
        addresses = set()
        for k in range(6):
            slot = channel.reserve()
            addresses.add(slot.number.data_ptr())
            slot.number.fill_(k)
            slot.share.fill_(k)
            channel.commit()
        told.put(len(addresses))

    with place.crew() as crew:
        channel, told = crew.channel(1, like=count()), crew.channel()
        crew.start(write, channel, told)
        for k in range(6):
            assert channel.take(5.0).equal(count(k))
        assert told.take(5.0) == 2, "the slots themselves: capacity + 1 of them"


def test_what_is_reserved_is_not_there_before_the_commit(place: Any, count: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(like=count())
        channel.reserve().copy_(count(5))
        assert channel.delivered == 0
        with pytest.raises(Stalled):
            channel.take(timeout=0.05)
        channel.commit()
        assert channel.delivered == 1
        assert channel.take(1.0).equal(count(5))


def test_reserve_and_commit_out_of_turn(place: Any, count: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(3, like=count())
        with pytest.raises(ConfigError, match="without reserve"):
            channel.commit()
        channel.reserve().copy_(count(1))
        with pytest.raises(ConfigError, match="commit"):
            channel.put(count(2))
        with pytest.raises(ConfigError, match="commit"):
            channel.reserve()
        channel.commit()
        with pytest.raises(ConfigError, match="without reserve"):
            channel.commit()
        channel.put(count(2))
        assert channel.take(1.0).equal(count(1))
        assert channel.take(1.0).equal(count(2))


def test_reserve_waits_for_room(place: Any, count: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(1, like=count())
        channel.put(count(1))
        channel.take(1.0)  # the driver holds both ends
        channel.put(count(1))
        with pytest.raises(Stalled):
            channel.reserve(timeout=0.05)
        channel.take(1.0)
        channel.reserve(timeout=0.05)


@pytest.mark.parametrize("like", [None, (0, 0.0)])
def test_values_have_no_slot_to_fill(place: Any, like: Any) -> None:
    with place.crew() as crew, pytest.raises(ConfigError, match="put"):
        crew.channel(like=like).reserve()


def test_commit_into_a_closed_channel(place: Any, count: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(like=count())
        channel.reserve().copy_(count(1))
        channel.close()
        with pytest.raises(Closed):
            channel.commit()
        assert channel.delivered == 0


# What a slot holds


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype.is_complex:
        return torch.complex(torch.randn(shape), torch.randn(shape)).to(dtype)
    if dtype.is_floating_point:
        tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
        for at, special in enumerate([float("nan"), float("inf"), -0.0]):
            if tensor.numel() > at:
                tensor.view(-1)[at] = special
        return tensor
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)], ids=str)
def test_every_dtype_and_shape(place: Any, shape: tuple[int, ...]) -> None:
    def echo(inward: Any, outward: Any) -> None:
        while True:
            outward.put(inward.take())

    tree = {str(dtype): filled(dtype, shape) for dtype in DTYPES}
    with place.crew() as crew:
        inward, outward = crew.channel(like=tree), crew.channel(like=tree)
        crew.start(echo, inward, outward)
        for _ in range(3):
            inward.put(tree)
            taken = outward.take(10.0)
            assert list(taken) == list(tree)
            for name, tensor in tree.items():
                if tensor.is_complex():
                    assert torch.equal(taken[name], tensor)
                else:
                    assert bits(taken[name]) == bits(tensor)


def test_only_empty_tensors(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(like={"a": torch.zeros(0), "b": torch.zeros(2, 0, dtype=torch.int64)})
        channel.put({"a": torch.zeros(0), "b": torch.zeros(2, 0, dtype=torch.int64)})
        taken = channel.take(1.0)
        assert [list(taken["a"].shape), list(taken["b"].shape)] == [[0], [2, 0]]
        channel.put(taken)
        assert list(channel.take(1.0, device="cpu")["b"].shape) == [2, 0]


SOURCES = {
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "strided": lambda: torch.arange(12.0).view(6, 2)[::2],
    "offset": lambda: torch.arange(10.0)[4:],
    "expanded": lambda: torch.tensor([1.5]).expand(3, 4),
    "requires grad": lambda: torch.arange(3.0).requires_grad_(),
    "in a graph": lambda: torch.arange(3.0).requires_grad_() * 2,
    "graph, transposed": lambda: (torch.arange(6.0).view(2, 3).requires_grad_() * 2).t(),
    "negated": lambda: torch.tensor([1 + 2j, 3 + 4j]).conj().imag,
    "negated, one element": lambda: torch.tensor([1 + 2j]).conj().imag,
    "conjugate": lambda: torch.tensor([1 + 2j, 3 + 4j]).conj(),
    "inference": lambda: _inference(),
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "from numpy": lambda: torch.from_numpy(np.arange(6.0).reshape(2, 3).T),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.arange(3.0) + 1


@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_every_kind(place: Any, source: str) -> None:
    tensor = SOURCES[source]()
    expected = tensor.detach().resolve_conj().resolve_neg().clone()
    with place.crew() as crew:
        channel = crew.channel(like={"x": tensor, "y": torch.zeros(1)})
        channel.put({"x": tensor, "y": torch.ones(1)})
        taken = channel.take(1.0)
        assert torch.equal(taken["x"], expected)
        assert not taken["x"].requires_grad
        assert taken["y"].item() == 1.0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_used_under_inference_mode(place: Any, count: Any, mode: Any) -> None:
    """Slots bound under inference mode can be filled and used outside it, too."""
    with place.crew() as crew:
        channel = crew.channel(like=count())
        with mode():
            channel.put(count(1))
            channel.take(1.0)
        channel.put(count(2).map(lambda leaf: leaf.requires_grad_() if leaf.is_floating_point() else leaf))
        taken = channel.take(1.0)
        assert (taken.share * torch.ones(3, requires_grad=True)).sum().requires_grad
        slot = channel.reserve()
        slot.share.fill_(3.0)
        channel.commit()


class Inner(Struct):
    left: Tensor = axes("N", torch.uint8)
    right: Tensor | None = axes("N ...", default=None)


class Outer(Struct):
    tree: Any = axes("N ...")
    inner: Any = axes("N ...")
    flag: Tensor = axes("N", torch.bool)


class Named(NamedTuple):
    first: Any
    second: Any


def nested(k: int) -> Outer:
    return Outer(
        tree={"b": torch.full((2, 3), float(k)), "a": (torch.full((2,), k), [torch.full((2, 1), -k)])},
        inner=Inner(left=torch.full((2,), k, dtype=torch.uint8)),
        flag=torch.tensor([True, False]),
    )


def test_nested_structs(place: Any) -> None:
    """Structs of a test module: their class is shipped, by value or by reference, with the layout."""

    def echo(inward: Any, outward: Any) -> None:
        while True:
            outward.put(inward.take().clone())

    with place.crew() as crew:
        inward, outward = crew.channel(like=nested(0)), crew.channel(like=nested(0))
        crew.start(echo, inward, outward)
        for k in range(3):
            inward.put(nested(k))
            taken = outward.take(20.0)
            assert type(taken) is Outer
            assert type(taken.inner) is Inner
            assert taken.inner.right is None
            assert taken.equal(nested(k))
            taken.check()


TREES = {
    "a bare tensor": torch.arange(3),
    "a dict": {"b": torch.ones(2), "a": torch.zeros(1)},
    "a list": [torch.ones(2), torch.zeros(3)],
    "a namedtuple": Named(torch.ones(1), {"x": torch.zeros(2)}),
    "numbers and tensors": {"t": torch.ones(2), "n": 3, "f": 0.5, "b": True},
    "a tuple with a tensor": (1, torch.ones(2), 2.5, False),
    "numbers in a list": [1, 2.5, True],
    "a number": 4,
    "a float": 4.5,
    "a bool": True,
    "numbers in a namedtuple": Named(1, 2.0),
    "None inside": {"a": None, "b": torch.ones(1)},
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and bits(left) == bits(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("tree", TREES)
def test_trees_keep_their_form_and_types(place: Any, tree: str) -> None:
    item = TREES[tree]

    def echo(inward: Any, outward: Any) -> None:
        while True:
            outward.put(inward.take())

    with place.crew() as crew:
        inward, outward = crew.channel(like=item), crew.channel(like=item)
        if tree != "a namedtuple" and tree != "numbers in a namedtuple":
            crew.start(echo, inward, outward)
        else:  # a class of this module; shipping is tested elsewhere
            outward = inward
        for _ in range(2):
            inward.put(item)
            assert same(outward.take(10.0), item)


@pytest.mark.parametrize(
    "numbers",
    [(0,), (0, 0.0), (False, 0.0), (True, False), (1.5, True, 3), (-(2**63), 2**63 - 1), (float("inf"), -0.0, 1e-320)],
)
def test_tuples_of_numbers_keep_values_and_types(everywhere: Any, numbers: tuple[Any, ...]) -> None:
    def echo(inward: Any, outward: Any) -> None:
        while True:
            outward.put(inward.take())

    def program(crew: Any) -> Any:
        inward, outward = crew.channel(like=numbers), crew.channel(like=numbers)
        crew.start(echo, inward, outward)
        inward.put(numbers)
        return [(repr(number), type(number).__name__) for number in outward.take(10.0)]

    assert everywhere(program) == [(repr(number), type(number).__name__) for number in numbers]


def test_a_nan_in_a_tuple(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(like=(0.0,))
        channel.put((float("nan"),))
        assert channel.take(1.0)[0] != channel.delivered  # a NaN equals nothing
        channel.put((np.float64(0.5),))
        taken = channel.take(1.0)
        assert (taken, type(taken[0])) == ((0.5,), float)


def test_numpy_scalars_become_plain_numbers(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(like=(0, 0.0, False))
        channel.put((np.int64(3), np.float32(0.5), np.bool_(True)))
        taken = channel.take(1.0)
        assert taken == (3, 0.5, True)
        assert [type(number) for number in taken] == [int, float, bool]


VALUES = [None, True, 7, 2**100, -0.0, "text", "ünïcode", b"bytes", [1, {"a": (2, None)}], {1, 2}, ..., range(3)]


def test_small_values(place: Any) -> None:
    def echo(inward: Any, outward: Any) -> None:
        while True:
            outward.put(inward.take())

    with place.crew() as crew:
        inward, outward = crew.channel(), crew.channel()
        crew.start(echo, inward, outward)
        for value in VALUES:
            inward.put(value)
            taken = outward.take(10.0)
            assert taken == value
            assert type(taken) is type(value)


# What does not fit


def test_a_wrong_shape_is_named_and_the_channel_still_works(place: Any, Count: Any, count: Any) -> None:
    def write(channel: Any, told: Any) -> None:
        fine = count(1)
        for wrong in (
            fine.replace(share=torch.zeros(4, 2)),
            fine.replace(share=torch.zeros(4, 3, dtype=torch.float64)),
            fine.replace(number=torch.zeros(5, dtype=torch.int64)),
            fine.replace(number=torch.zeros(4)),
        ):
            try:
                channel.put(wrong)
            except ShapeError as error:
                told.put(str(error))
        channel.put(fine)

    with place.crew() as crew:
        channel, told = crew.channel(like=count()), crew.channel(8)
        crew.start(write, channel, told)
        messages = [told.take(10.0) for _ in range(4)]
        assert channel.take(10.0).equal(count(1))
        assert channel.delivered == 1
    expected = [("share", "float32 [4, 3]", "float32 [4, 2]"), ("share", "float32 [4, 3]", "float64 [4, 3]")]
    expected += [("number", "int64 [4]", "int64 [5]"), ("number", "int64 [4]", "float32 [4]")]
    for message, words in zip(messages, expected, strict=True):
        for word in words:
            assert word in message


WRONG = {
    "another tensor in a dict": ({"a": torch.zeros(2), "n": 1}, {"a": torch.zeros(3), "n": 1}, "'a'"),
    "a tensor for a number": ({"a": torch.zeros(2), "n": 1}, {"a": torch.zeros(2), "n": torch.zeros(2)}, "'n'"),
    "a number for a tensor": ({"a": torch.zeros(2), "n": 1}, {"a": 0.5, "n": 1}, "'a'"),
    "an array for a tensor": ({"a": torch.zeros(2), "n": 1}, {"a": np.zeros(2, "float32"), "n": 1}, "'a'"),
    "a text for a number": ({"a": torch.zeros(2), "n": 1}, {"a": torch.zeros(2), "n": "x"}, "'n'"),
    "a float for an int": ({"a": torch.zeros(2), "n": 1}, {"a": torch.zeros(2), "n": 1.5}, "'n'"),
    "an int for a bool": ({"a": torch.zeros(2), "b": True}, {"a": torch.zeros(2), "b": 1}, "'b'"),
    "too large an int": ({"a": torch.zeros(2), "n": 1}, {"a": torch.zeros(2), "n": 2**63}, "'n'"),
    "too large a number for a float": ({"a": torch.zeros(2), "n": 1.0}, {"a": torch.zeros(2), "n": 10**400}, "'n'"),
    "another key": ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, ""),
    "a key more": ({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)}, ""),
    "a tensor for a dict": ({"a": torch.zeros(2)}, torch.zeros(2), ""),
    "a dict for a tensor": (torch.zeros(2), {"a": torch.zeros(2)}, ""),
    "None for a tensor": (torch.zeros(2), None, ""),
    "None inside": ({"a": torch.zeros(2)}, {"a": None}, ""),
    "another length": ((1, 2.0), (1,), "(int, float)"),
    "one more": ((1, 2.0), (1, 2.0, 3), "(int, float)"),
    "a float in a tuple of ints": ((1, 2), (1, 2.5), "(int, int)"),
    "a text in a tuple": ((1, 2.0), (1, "x"), "(int, float)"),
    "a text as a tuple": ((1, 2), "ab", "(int, int)"),
    "a tensor in a tuple": ((1, 2.0), (1, torch.zeros(2)), "(int, float)"),
    "an int for a bool in a tuple": ((True, 2.0), (1, 2.0), "(bool, float)"),
    "too large an int in a tuple": ((1,), (2**63,), "(int)"),
    "too large for a float in a tuple": ((1.0,), (10**400,), "(float)"),
    "None for a tuple": ((1, 2.0), None, "(int, float)"),
    "a number for a tuple": ((True, 2.0), 3, "(bool, float)"),
    "a short tuple before a bool": ((1, True), (1,), "(int, bool)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_a_shape_error(place: Any, case: str) -> None:
    like, wrong, named = WRONG[case]
    with place.crew() as crew:
        channel = crew.channel(1, like=like)
        with pytest.raises(ShapeError) as caught:
            channel.put(wrong)
        assert named in str(caught.value)
        assert channel.delivered == 0
        channel.put(like, timeout=1.0)
        assert same(channel.take(1.0), like)


def test_a_value_that_is_too_large_or_does_not_pickle(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel()
        with pytest.raises(ShapeError, match=r"bytes pickled.*like="):
            channel.put(b"x" * 5000)
        with pytest.raises(ConfigError, match="lock"):
            channel.put(threading.Lock())
        channel.put(b"x" * 4000, timeout=1.0)
        assert channel.take(1.0) == b"x" * 4000


# Close


def test_what_was_put_before_a_close_can_be_taken(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(3)
        for k in range(3):
            channel.put(k)
        channel.close()
        channel.close()
        with pytest.raises(Closed, match="closed"):
            channel.put(9)
        assert [channel.take() for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(Closed, match="closed and empty"):
                channel.take()


@pytest.mark.parametrize("who", ["the writer", "the reader", "the driver"])
def test_who_closes_does_not_matter(place: Any, who: str) -> None:
    def write(channel: Any, told: Any, third: Any) -> None:
        put = 0
        try:
            while True:
                channel.put(put)
                put += 1
                if put == 3:
                    third.put(True)
                    if who == "the writer":
                        channel.close()
        except Closed:
            told.put(put)

    def read(channel: Any, told: Any) -> None:
        taken = 0
        try:
            while True:
                assert channel.take() == taken
                taken += 1
                if who == "the reader" and taken == 3:
                    channel.close()
        except Closed:
            told.put(taken)

    with place.crew() as crew:
        channel, wrote, took, third = crew.channel(2), crew.channel(), crew.channel(), crew.channel()
        crew.start(write, channel, wrote, third)
        crew.start(read, channel, took)
        third.take(10.0)
        if who == "the driver":
            channel.close()
        put, taken = wrote.take(10.0), took.take(10.0)
    # A put that overlaps with the close of somebody else may be handed over after the reader has seen the end.
    assert put - taken in ((0,) if who == "the writer" else (0, 1))


def test_close_wakes_a_waiting_reader_and_a_waiting_writer(place: Any) -> None:
    def read(channel: Any, told: Any) -> None:
        try:
            channel.take()
        except Closed:
            told.put(role().clock())

    def write(channel: Any, told: Any) -> None:
        try:
            while True:
                channel.put(1)
        except Closed:
            told.put(role().clock())

    with place.crew() as crew:
        empty, full, told = crew.channel(), crew.channel(), crew.lanes(2)
        crew.start(read, empty, told[0])
        crew.start(write, full, told[1])
        role().sleep(0.2)
        began = role().clock()
        empty.close()
        full.close()
        assert all(at - began < 5.0 for at in told.take_each(10.0))


def test_a_role_that_returns_closes_its_ends(place: Any) -> None:
    def write_three(channel: Any) -> None:
        for k in range(3):
            channel.put(k)

    def read_three(channel: Any) -> None:
        for _ in range(3):
            channel.take()

    with place.crew() as crew:
        outward, inward = crew.channel(5), crew.channel(1)
        crew.start(write_three, outward)
        crew.start(read_three, inward)
        assert [outward.take(10.0) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(Closed):
            outward.take()
        with pytest.raises(Closed):
            for k in range(100):
                inward.put(k)
        assert inward.taken == 3


def test_waiting_for_what_nobody_can_put_any_more_ends(place: Any) -> None:
    """The only role that was given the channel returns without ever having used it."""

    def forget(channel: Any, lane: Any) -> None:
        role().sleep(0.1)

    with place.crew() as crew:
        channel, lanes = crew.channel(), crew.lanes(1)
        crew.start(forget, channel, lanes[0])
        for wait_for in (channel.take, lanes.take_each, lanes.take_any):
            with pytest.raises(Closed):
                wait_for()
        assert lanes[0].delivered == 0


def test_waiting_for_what_nobody_was_given_ends(place: Any) -> None:
    with place.crew() as crew:
        empty, full = crew.channel(), crew.channel()
        with pytest.raises(Closed, match="empty"):
            empty.take()
        full.put(1)
        with pytest.raises(Closed, match="full"):
            full.put(2)


def test_a_peer_that_has_ended_is_named(place: Any) -> None:
    def read(channel: Any, told: Any) -> None:
        try:
            channel.take()
        except Closed as error:
            told.put(str(error))

    def forget(channel: Any) -> None:
        pass

    with place.crew() as crew:
        channel, told = crew.channel(name="numbers"), crew.channel()
        crew.start(forget, channel)
        crew.start(read, channel, told)
        channel.close()
        assert "'numbers'" in told.take(10.0)


def test_roles_get_closed_when_the_crew_stops(place: Any, shared: Any) -> None:
    def count(empty: Any, full: Any, lanes: Any, ready: Any, after: Any) -> None:
        rank = role().rank
        ready[rank].put(True)
        try:
            if rank == 0:
                empty.take()
            elif rank == 1:
                full.put(1)
                full.put(2)
            elif rank == 2:
                role().sleep(1000.0)
            elif rank == 3:
                lanes.take_any()
            else:
                lanes[0].put(1)
                role().wait(lanes[0].to_put)
        except Closed:
            return
        raise AssertionError("it should have been told to stop")

    with place.crew() as crew:
        ready, after = crew.lanes(5), crew.lanes(5)
        crew.start(count, crew.channel(name="empty"), crew.channel(name="full"), crew.lanes(2), ready, after, copies=4)
        ready[0].take(10.0)
        role().sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 2.0


# Starting where an earlier run stood; counting; the control word


def test_deliveries_count_on_from_the_start(everywhere: Any) -> None:
    def write(lanes: Any) -> None:
        lane = lanes[role().rank]
        for k in lane.deliveries():
            lane.put(10 * role().rank + k)

    def program(crew: Any) -> Any:
        lanes = crew.lanes(3, capacity=2, start=[0, 4, 7])
        crew.start(write, lanes, copies=3)
        taken = [lanes.take_each(10.0) for _ in range(5)]
        return taken, [lane.taken for lane in lanes], [lane.delivered >= lane.taken for lane in lanes]

    taken, counts, ahead = everywhere(program)
    assert taken == [[k, 14 + k, 27 + k] for k in range(5)]
    assert counts == [5, 9, 12]
    assert all(ahead)


def test_deliveries_end_when_the_reader_closes(place: Any) -> None:
    def write(channel: Any, told: Any) -> None:
        numbers = []
        for k in channel.deliveries():
            numbers.append(k)
            if k < 5:
                channel.put(k)
        told.put(numbers[:6])

    def write_until_closed(channel: Any, told: Any) -> None:
        last = -1
        try:
            for k in channel.deliveries():
                last = k
                channel.put(k)
        finally:
            told.put(last)

    with place.crew() as crew:
        channel, told = crew.channel(2, start=3), crew.channel()
        crew.start(write_until_closed, channel, told)
        assert channel.take(10.0) == 3
        channel.close()
        assert 3 <= told.take(10.0) <= 7


def test_start_for_all_lanes(place: Any) -> None:
    with place.crew() as crew:
        lanes = crew.lanes(2, start=5)
        assert [(lane.delivered, lane.taken) for lane in lanes] == [(5, 5), (5, 5)]
        lanes[0].put("x")
        assert (lanes[0].delivered, lanes[0].taken) == (6, 5)
        assert next(lanes[0].deliveries()) == 6
        assert lanes[0].take(1.0) == "x"


def test_control_goes_from_reader_to_writer(place: Any) -> None:
    def write(channel: Any) -> None:
        for _ in channel.deliveries():
            channel.put(channel.control)

    with place.crew() as crew:
        channel = crew.channel(1)
        assert channel.control == 0
        crew.start(write, channel)
        assert channel.take(10.0) == 0
        for word in (7, -1, 2**62, -(2**63), 0):
            channel.control = word
            assert channel.control == word
            seen = [channel.take(10.0) for _ in range(4)]
            assert seen[-1] == word, "after what was put before, every item knows the new word"


def test_control_is_the_reader_s_to_set(place: Any) -> None:
    def write(channel: Any) -> None:
        channel.put(1)
        channel.control = 3

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        channel = crew.channel()
        channel.control = 1
        crew.start(write, channel)
        channel.take(10.0)
        crew.join(timeout=10.0)
    assert type(caught.value.__cause__) is ConfigError


# Timeouts


def test_stalled_says_who_waited_for_what_how_long(place: Any) -> None:
    def idle(channels: Any) -> None:
        role().heartbeat("looking away")
        channels[0].put(1)
        channels[1].take()
        role().sleep(100.0)

    def read(channel: Any, told: Any) -> None:
        for timeout in (0.25, 0.0):
            began = role().clock()
            try:
                channel.take(timeout=timeout)
            except Stalled as error:
                told.put((str(error), role().clock() - began))

    with place.crew() as crew:
        channels = [crew.channel(name="empty"), crew.channel(name="full")]
        crew.start(idle, channels)
        channels[0].take(10.0)
        with pytest.raises(Stalled, match=r"driver\[0\] waited 0\.1 s to take from 'empty'.*idle\[0\].*looking away"):
            channels[0].take(timeout=0.1)
        channels[1].put(1)
        channels[1].put(2, timeout=10.0)
        with pytest.raises(Stalled, match=r"driver\[0\] waited 0\.1 s to put into 'full'.*idle\[0\]"):
            channels[1].put(3, timeout=0.1)
        never, told = crew.channel(name="never"), crew.channel(2)
        crew.start(read, never, told)
        for timeout in (0.25, 0.0):
            message, took = told.take(10.0)
            assert f"read[0] waited {timeout:g} s to take from 'never'" in message
            assert timeout - 1e-6 <= took < timeout + 5.0
        assert isinstance(Stalled("x"), TimeoutError)


def test_a_timeout_loses_nothing(place: Any) -> None:
    def write(channel: Any) -> None:
        for k in range(4):
            role().sleep(0.12)
            channel.put(k)
        role().sleep(100.0)

    with place.crew() as crew:
        channel = crew.channel()
        crew.start(write, channel)
        taken: list[int] = []
        stalls = 0
        while len(taken) < 4:
            try:
                taken.append(channel.take(timeout=0.05))
            except Stalled:
                stalls += 1
                assert stalls < 200
        assert taken == [0, 1, 2, 3]
        assert stalls >= 4


def test_a_put_that_timed_out_put_nothing(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(1, start=5)
        channel.control = 0  # the driver holds both ends
        channel.put("first")
        for _ in range(3):
            with pytest.raises(Stalled):
                channel.put("late", timeout=0.01)
        assert channel.delivered == 6
        assert channel.take(1.0) == "first"
        channel.put("second", timeout=0.01)
        assert channel.take(1.0) == "second"


# One writer, one reader


@pytest.mark.parametrize("end", ["writer", "reader"])
@pytest.mark.parametrize("others", ["copies of one role", "two roles", "driver and role"])
def test_a_second_writer_or_reader_is_an_error(place: Any, end: str, others: str) -> None:
    def use(channel: Any, gate: Any) -> None:
        channel.put(role().rank) if end == "writer" else channel.take()
        role().sleep(1000.0)

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        channel, gate = crew.channel(5, name="mine"), crew.channel()
        if end == "reader":
            for k in range(3):
                channel.put(k)
        if others == "copies of one role":
            crew.start(use, channel, gate, copies=2)
        elif others == "two roles":
            crew.start(use, channel, gate, name="first")
            crew.start(use, channel, gate, name="second")
        else:
            channel.put(9) if end == "writer" else channel.take(1.0)
            crew.start(use, channel, gate, name="second")
        crew.join(timeout=10.0)
    assert type(caught.value.__cause__) is ConfigError
    message = str(caught.value)
    assert "'mine'" in message
    assert end in message
    assert ("driver[0]" if others == "driver and role" else "[") in message


def test_the_driver_is_refused_too_and_the_channel_goes_on(place: Any) -> None:
    def write(channel: Any) -> None:
        for k in channel.deliveries():
            channel.put(k)

    with place.crew() as crew:
        channel = crew.channel()
        crew.start(write, channel)
        assert channel.take(10.0) == 0
        with pytest.raises(ConfigError, match=r"write\[0\]"):
            channel.put(9)
        assert [channel.take(10.0) for _ in range(3)] == [1, 2, 3]


def test_one_role_may_hold_both_ends(place: Any, ask: Any) -> None:
    def alone(channel: Any) -> list[int]:
        taken = []
        for k in range(5):
            channel.put(k)
            taken.append(channel.take(1.0))
        return taken

    with place.crew() as crew:
        assert ask(crew, alone, crew.channel()) == [[0, 1, 2, 3, 4]]


# Properties


@pytest.mark.parametrize("placement", [Inline(), Threads()], ids=["inline", "threads"])
@settings(max_examples=15)
@given(
    capacity=st.integers(1, 4),
    start=st.integers(0, 50),
    moves=st.lists(st.sampled_from(["put", "take", "reserve", "wrong"]), max_size=40),
)
def test_a_channel_is_a_bounded_queue(placement: Any, capacity: int, start: int, moves: list[str]) -> None:
    """Against a list: any sequence of puts, takes, reserves and refused puts."""
    with placement.crew() as crew:
        channel = crew.channel(capacity, like=torch.zeros(2, dtype=torch.int64), start=start)
        assert (channel.to_put.ready(), channel.to_take.ready()) == (True, False)
        model: list[int] = []
        number = start
        for move in moves:
            if move == "take":
                if model:
                    assert channel.take(0.0).tolist() == [model.pop(0)] * 2
                else:
                    with pytest.raises(Stalled):
                        channel.take(0.0)
            elif len(model) == capacity:
                with pytest.raises(Stalled):
                    channel.put(torch.full((2,), number), timeout=0.0)
            elif move == "wrong":
                with pytest.raises(ShapeError):
                    channel.put(torch.zeros(3))
            else:
                if move == "put":
                    channel.put(torch.full((2,), number))
                else:
                    channel.reserve().fill_(number)
                    channel.commit()
                model.append(number)
                number += 1
            assert channel.delivered - channel.taken == len(model)
            assert channel.delivered == number
            assert (channel.to_put.ready(), channel.to_take.ready()) == (len(model) < capacity, bool(model))


@pytest.mark.slow
@pytest.mark.timeout(115)
def test_many_items_under_random_pauses(beside: Any, count: Any) -> None:
    def write(channel: Any, count: Any) -> None:
        generator = np.random.default_rng(role().seed)
        for k in range(20_000):
            if generator.random() < 0.01:
                time.sleep(generator.random() * 0.003)
            channel.put(count(k))

    with beside.crew() as crew:
        channel = crew.channel(3, like=count())
        crew.start(write, channel, count)
        generator = np.random.default_rng(1)
        for k in range(20_000):
            if generator.random() < 0.01:
                time.sleep(generator.random() * 0.003)
            taken = channel.take(20.0)
            assert int(taken.number[0]) == int(taken.number[-1]) == int(taken.share[-1, -1]) == k
