"""Items that are put again: they are known by their tensors, and whatever is done to those is still seen."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import Inline, ShapeError, Struct, Threads, axes
from headrace.place.layout import FAMILIAR, layout_of

pytestmark = pytest.mark.timeout(60)


@cache
def kinds() -> type:
    class Item(Struct):
        flags: Tensor = axes("T B", torch.bool)  # 15 bytes: a gap follows in the slot
        value: Tensor = axes("T B", torch.float32)
        count: Tensor = axes("B", torch.int64)

    return Item


def item(k: int) -> Any:
    grid = torch.arange(15).view(3, 5)
    return kinds()(flags=(grid + k) % 3 == 0, value=grid.float() * k, count=torch.full((5,), k))


def slot_for(like: Any) -> Any:
    layout = layout_of(like)
    return layout.bind(memoryview(bytearray(layout.nbytes)))


def write_often(slot: Any, item: Any) -> None:
    for _ in range(4):
        slot.write(item)
        assert slot.read().equal(item)


def test_what_is_written_into_an_item_is_seen_each_time(place: Any) -> None:
    def write(channel: Any, held: Any) -> None:
        for k in range(30):
            held.value.fill_(k)
            held.flags[k % 3] = ~held.flags[k % 3]
            held.count.fill_(-k)
            channel.put(held)

    held = item(1)
    flags = held.flags.clone()
    with place.crew() as crew:
        channel = crew.channel(2, like=held)
        crew.start(write, channel, held)
        for k in range(30):
            taken = channel.take(10.0)
            flags[k % 3] = ~flags[k % 3]
            assert (taken.value == k).all()
            assert (taken.count == -k).all()
            assert taken.flags.equal(flags)


def test_many_items_in_turn() -> None:
    held = [item(k) for k in range(3 * FAMILIAR)]
    slot = slot_for(held[0])
    for _ in range(4):
        for each in held:
            slot.write(each)
            assert slot.read().equal(each)


def test_an_item_that_takes_the_place_of_another_in_memory() -> None:
    slot = slot_for(item(0))
    for k in range(200):  # each has, as a rule, the address of the one before it
        each = item(k)
        slot.write(each)
        assert slot.read().equal(each)
        del each
        gc.collect(0)


def test_a_tensor_that_was_moved() -> None:
    held = item(2)
    slot = slot_for(held)
    write_often(slot, held)
    held.value.data = torch.full((3, 5), 7.0)
    slot.write(held)
    assert (slot.read().value == 7).all()
    assert slot.read().flags.equal(held.flags)


@pytest.mark.parametrize("reshape", [lambda x: x.t_(), lambda x: x.resize_(2, 5), lambda x: x.unsqueeze_(0)])
def test_a_tensor_that_was_reshaped_in_place(reshape: Any) -> None:
    held = item(2)
    slot = slot_for(held)
    write_often(slot, held)
    reshape(held.value)
    with pytest.raises(ShapeError, match=r"value: expected float32 \[3, 5\]"):
        slot.write(held)


def test_a_square_that_was_transposed_in_place() -> None:
    class Square(Struct):
        a: Tensor = axes("N N2")
        b: Tensor = axes("N")

    held = Square(a=torch.arange(9.0).view(3, 3), b=torch.zeros(3))
    slot = slot_for(held)
    write_often(slot, held)
    held.a.t_()
    slot.write(held)
    assert slot.read().a.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_views_that_are_not_contiguous_and_lazy_conjugates() -> None:
    class Wave(Struct):
        a: Tensor = axes("N ...")
        b: Tensor = axes("N")

    source = torch.randn(3, 4, dtype=torch.complex64)
    held = Wave(a=source.conj(), b=torch.arange(6.0)[::2])
    slot = slot_for(Wave(a=source.clone(), b=torch.zeros(3)))
    for _ in range(4):
        slot.write(held)
        assert slot.read().a.equal(source.conj())
        assert slot.read().b.tolist() == [0, 2, 4]


@pytest.mark.parametrize("place", [Inline(), Threads()], ids=["inline", "threads"])
def test_an_item_with_a_graph_is_put_again(place: Any) -> None:
    class Pair(Struct):
        a: Tensor = axes("N")
        b: Tensor = axes("N")

    held = Pair(a=torch.ones(3, requires_grad=True), b=torch.zeros(3))
    with place.crew() as crew:
        channel = crew.channel(5, like=Pair(a=torch.zeros(3), b=torch.zeros(3)))

        def write(channel: Any) -> None:
            for _ in range(4):
                channel.put(held)

        crew.start(write, channel)
        for _ in range(4):
            taken = channel.take(10.0)
            assert taken.a.tolist() == [1, 1, 1]
            assert not taken.a.requires_grad
