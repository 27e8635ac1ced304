"""Laws of Struct: every operation against plain torch on each field, and every error with its message.

`plain` is the reference: it walks a Struct by hand, with the axes written down a second time in AXES.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import optree
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import headrace.struct
from headrace.errors import ConfigError, ShapeError
from headrace.struct import NAMESPACE, Struct, Tree, axes

T = TypeVar("T")


class Pair(NamedTuple):
    left: Tree
    right: Tree


class Rollout(Struct):
    observation: Tree = axes("T+1 B ...")
    action: Tensor = axes("T B …")
    reward: Tensor = axes("T B", torch.float32)
    memory: Tree | None = axes("B ...", default=None)


class Batch(Struct):
    observation: Tree = axes("T B ...")
    action: Tensor = axes("T B")
    colour: Tensor = axes("T B 3")
    extra: Tree | None = axes("T B ...", default=None)


class Inner(Struct):
    x: Tensor = axes("T B")
    y: Tensor = axes("T B ...")


AXES: dict[type, dict[str, str]] = {
    Rollout: {"observation": "T+1 B", "action": "T B", "reward": "T B", "memory": "B"},
    Batch: {"observation": "T B", "action": "T B", "colour": "T B 3", "extra": "T B"},
    Inner: {"x": "T B", "y": "T B"},
}

DTYPES = [torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**31)
sizes = st.integers(0, 4)


def plain(value: Tree, names: str = "", path: str = "") -> dict[str, tuple[Tensor, list[str]]]:
    """Path → (tensor, its leading axes), in order."""
    if value is None:
        return {}
    if isinstance(value, Tensor):
        return {path: (value, names.split())}
    if isinstance(value, Struct):
        parts = [(f"{path}.{name}".lstrip("."), getattr(value, name), a) for name, a in AXES[type(value)].items()]
    elif isinstance(value, dict):
        parts = [(f"{path}[{key!r}]", value[key], names) for key in sorted(value)]
    elif isinstance(value, Pair):
        parts = [(f"{path}.left", value.left, names), (f"{path}.right", value.right, names)]
    else:
        parts = [(f"{path}[{k}]", part, names) for k, part in enumerate(value)]
    return {p: leaf for part in parts for p, leaf in plain(part[1], part[2], part[0]).items()}


def tensors(struct: Struct) -> dict[str, Tensor]:
    return {path: tensor for path, (tensor, _) in plain(struct).items()}


def same(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same paths in the same order; same dtype, shape and values; a NaN is a NaN."""
    assert list(given) == list(expected)
    for path, tensor in given.items():
        torch.testing.assert_close(
            tensor, expected[path], rtol=0, atol=0, equal_nan=True, msg=lambda text, path=path: f"{path}: {text}"
        )


def snapshot(struct: Struct) -> dict[str, Tensor]:
    return {path: tensor.clone() for path, tensor in tensors(struct).items()}


def share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def cut(tensor: Tensor, names: list[str], axis: str, index: Any, longer: Any = None) -> Tensor:
    """Plain torch: that index on the axis called so (`longer` on the axis called so +1), the rest as it is."""
    for name, this in ((axis, index), (f"{axis}+1", longer)):
        if name in names:
            return tensor[(slice(None),) * names.index(name) + (this,)]
    return tensor


class Maker:
    """Structs of random values: trees of every kind, all dtypes, a NaN here and there."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def integer(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.rng))

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = DTYPES[self.integer(len(DTYPES))] if dtype is None else dtype
        values = torch.randint(0, 200, shape, generator=self.rng).to(dtype)
        if dtype.is_floating_point and values.numel() and self.integer(4) == 0:
            values.view(-1)[0] = torch.nan
        return values

    def tree(self, *shape: int, inner: bool = False) -> Tree:
        kind = self.integer(6 if inner else 5)
        more = (2,) * self.integer(3)
        if kind == 0:
            return self.tensor(*shape, *more)
        if kind == 1:
            return {"speed": self.tensor(*shape), "camera": self.tensor(*shape, *more), "nothing": None}
        if kind == 2:
            return (self.tensor(*shape), [self.tensor(*shape, *more)])
        if kind == 3:
            return Pair(self.tensor(*shape, *more), {"deep": (self.tensor(*shape),)})
        if kind == 4:
            return [{7: self.tensor(*shape)}, ()]
        return {"struct": Inner(x=self.tensor(*shape), y=self.tensor(*shape, *more)), "beside": self.tensor(*shape)}

    def rollout(self, t: int, b: int) -> Rollout:
        return Rollout(
            observation=self.tree(t + 1, b),
            action=self.tensor(t, b, *(2,) * self.integer(2)),
            reward=self.tensor(t, b, dtype=torch.float32),
            memory=self.tree(b) if self.integer(2) else None,
        )

    def batch(self, t: int, b: int) -> Batch:
        return Batch(
            observation=self.tree(t, b, inner=True),
            action=self.tensor(t, b),
            colour=self.tensor(t, b, 3),
            extra=self.tree(t, b, inner=True) if self.integer(2) else None,
        )


def another(struct: Any, seed: int) -> Any:
    """The same structure with other values."""
    rng = torch.Generator().manual_seed(seed)
    return struct.map(lambda leaf: torch.randint(0, 200, leaf.shape, generator=rng).to(leaf.dtype))


rollouts = st.builds(lambda seed, t, b: Maker(seed).rollout(t, b), seeds, sizes, sizes)
batches = st.builds(lambda seed, t, b: Maker(seed).batch(t, b), seeds, sizes, sizes)


@contextmanager
def fails(error: type[Exception], message: str) -> Iterator[None]:
    """The error comes, and its message is exactly this one."""
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        yield


def small(t: int = 5, b: int = 4) -> Rollout:
    return Rollout(
        observation={"camera": torch.zeros(t + 1, b, 3, dtype=torch.uint8), "speed": torch.zeros(t + 1, b)},
        action=torch.zeros(t, b, dtype=torch.int64),
        reward=torch.zeros(t, b),
    )


def flat_batch(t: int = 2, b: int = 3) -> Batch:
    return Maker(0).batch(t, b).replace(observation=torch.arange(t * b).view(t, b)).flatten("T", "B")


# What is in it


@few
@given(rollouts | batches)
def test_leaves_and_paths_are_those_of_a_walk_by_hand(struct: Struct) -> None:
    expected = tensors(struct)
    assert [path for path, _ in struct.named_leaves()] == list(expected)
    assert [id(leaf) for leaf in struct.leaves()] == [id(leaf) for leaf in expected.values()]
    assert [id(leaf) for _, leaf in struct.named_leaves()] == [id(leaf) for leaf in expected.values()]
    assert struct.nbytes == sum(leaf.element_size() * leaf.numel() for leaf in expected.values())


@few
@given(seeds, sizes, sizes)
def test_sizes_are_those_it_was_made_of(seed: int, t: int, b: int) -> None:
    for struct in (Maker(seed).rollout(t, b), Maker(seed).batch(t, b)):
        assert (struct.size("T"), struct.size("B")) == (t, b)
        assert struct.check() is struct


def test_size_of_an_axis_that_is_not_there() -> None:
    with fails(ConfigError, "Rollout has no axis 'X'; it has T, B"):
        small().size("X")
    for axis in ("T+1", "...", "3"):
        with fails(ConfigError, f"Batch has no axis {axis!r}; it has T, B"):
            Maker(0).batch(2, 3).size(axis)
    with fails(ConfigError, "Empty has no axis 'B'; it has none"):
        type("Empty", (Struct,), {})().size("B")


def test_repr_names_class_fields_dtypes_and_shapes() -> None:
    assert repr(flat_batch().replace(extra=None)) == (
        "Batch(observation=int64[6], action=int32[6], colour=int32[6, 3], extra=None)"
    )
    assert repr(small()) == (
        "Rollout(\n    observation={'camera': uint8[6, 4, 3], 'speed': float32[6, 4]},\n    action=int64[5, 4],\n"
        "    reward=float32[5, 4],\n    memory=None,\n)"
    )
    nested = Maker(0).batch(1, 2).replace(observation=Inner(x=torch.zeros(1, 2), y=Pair(3, None)))
    assert "observation=Inner(x=float32[1, 2], y=Pair(left=3, right=None))" in repr(nested)


# check


def test_check_blames_the_field_that_differs_and_tells_where_the_size_comes_from() -> None:
    rollout = small()
    with fails(
        ShapeError,
        "Rollout.reward: expected [T=5, B=4] float32, given [5, 3] float32 "
        "(B=4 comes from Rollout.observation['camera'])",
    ):
        rollout.replace(reward=torch.zeros(5, 3)).check()
    with fails(
        ShapeError,
        "Rollout.reward: expected [T=5, B=4] float32, given [2, 3] float32 "
        "(T=5 comes from Rollout.observation['camera'], B=4 comes from Rollout.observation['camera'])",
    ):
        rollout.replace(reward=torch.zeros(2, 3)).check()


def test_check_goes_by_the_majority_of_fields_then_by_the_first() -> None:
    """A forgotten last observation, the commonest mistake, is blamed on the observation however many sensors it has."""
    sensors = {name: torch.zeros(5, 4) for name in "abcdef"}
    with fails(
        ShapeError,
        "Rollout.observation['a']: expected [T+1=6, B=4, ...], given [5, 4] float32 (T=5 comes from Rollout.action)",
    ):
        small().replace(observation=sensors).check()
    with fails(ShapeError, "Inner.y: expected [T=2, B=2, ...], given [3, 2] float32 (T=2 comes from Inner.x)"):
        Inner(x=torch.zeros(2, 2), y=torch.zeros(3, 2)).check()


def test_check_looks_at_every_tensor_of_a_tree() -> None:
    bad = {"camera": torch.zeros(6, 4, 3), "speed": [torch.zeros(6, 4), torch.zeros(6, 5)]}
    with fails(
        ShapeError,
        "Rollout.observation['speed'][1]: expected [T+1=6, B=4, ...], given [6, 5] float32 "
        "(B=4 comes from Rollout.observation['camera'])",
    ):
        small().replace(observation=bad).check()


def test_check_of_dtypes() -> None:
    with fails(ShapeError, "Rollout.reward: expected [T=5, B=4] float32, given [5, 4] float64"):
        small().replace(reward=torch.zeros(5, 4, dtype=torch.float64)).check()

    class Holder(Struct):
        inner: Tree = axes("T B ...", torch.float32)

    good = Inner(x=torch.zeros(1, 2), y=torch.zeros(1, 2, 3))
    Holder(inner=[good]).check()
    with fails(ShapeError, "Holder.inner[0].y: expected [T=1, B=2, ...] float32, given [1, 2] int64"):
        Holder(inner=[good.replace(y=torch.zeros(1, 2, dtype=torch.int64))]).check()
    with fails(ShapeError, "Holder.inner.extra.y: expected [T=1, B=2, ...] float32, given [1, 2] int64"):
        batch = Batch(observation=good.x, action=good.x, colour=torch.zeros(1, 2, 3))
        Holder(inner=batch.replace(extra=good.replace(y=torch.zeros(1, 2, dtype=torch.int64)))).check()


def test_check_of_the_number_of_axes() -> None:
    with fails(ShapeError, "Rollout.reward: expected [T=5, B=4] float32, given [5, 4, 1] float32"):
        small().replace(reward=torch.zeros(5, 4, 1)).check()
    with fails(ShapeError, "Rollout.reward: expected [T=5, B=4] float32, given [5] float32"):
        small().replace(reward=torch.zeros(5)).check()
    with fails(ShapeError, "Rollout.action: expected [T=5, B=4, ...], given [5] int64"):
        small().replace(action=torch.zeros(5, dtype=torch.int64)).check()
    with fails(ShapeError, "Inner.x: expected [T, B], given [] float32"):
        Inner(x=torch.zeros(()), y=torch.zeros(())).check()


def test_check_of_counts() -> None:
    batch = Maker(0).batch(2, 4)
    with fails(ShapeError, "Batch.colour: expected [T=2, B=4, 3], given [2, 4, 4] float32"):
        batch.replace(colour=torch.zeros(2, 4, 4)).check()


def test_check_of_an_axis_that_cannot_have_one_row_more() -> None:
    class Seen(Struct):
        observation: Tensor = axes("T+1")

    assert Seen(observation=torch.zeros(1)).check().size("T") == 0
    with fails(ShapeError, "Seen.observation: expected [T+1], given [0] float32"):
        Seen(observation=torch.zeros(0)).check()


def test_check_of_what_is_no_tensor() -> None:
    with fails(ShapeError, "Rollout.reward: expected a tensor [T=5, B=4] float32, given float"):
        small().replace(reward=1.0).check()
    with fails(ShapeError, "Rollout.observation['a']: expected a tensor [T+1=6, B=4, ...], given str"):
        small().replace(observation={"a": "left"}).check()
    with fails(ShapeError, "Rollout.reward: expected [T, B] float32, given None"):
        small().replace(reward=None).check()
    assert small().replace(memory=None).check().memory is None


def test_a_struct_in_a_tree_has_the_axes_of_the_field_that_holds_it() -> None:
    class Other(Struct):
        z: Tensor = axes("T N ...")

    bad = Maker(0).batch(1, 2).replace(extra=[Other(z=torch.zeros(1, 2))])
    message = "Batch.extra[0]: expected a Struct with axes [T, B, ...], but Other.z has [T, N, ...]"
    for operation in (bad.check, lambda: bad.at(B=0), lambda: bad.at(N=0), lambda: bad.split(1, "T")):
        with fails(ShapeError, message):
            operation()

    class Exact(Struct):
        inner: Tree = axes("T B")

    with fails(ShapeError, "Exact.inner: expected a Struct with axes [T, B], but Inner.y has [T, B, ...]"):
        Exact(inner=Inner(x=torch.zeros(1, 2), y=torch.zeros(1, 2))).check()


# map, clone, to, replace, equal


@few
@given(rollouts | batches)
def test_map_and_clone(struct: Struct) -> None:
    assert struct.map(lambda leaf: leaf).equal(struct)
    same(tensors(struct.map(lambda leaf: leaf.double() + 1)), {k: v.double() + 1 for k, v in tensors(struct).items()})
    other = another(struct, 1)
    summed = struct.map(lambda a, b, c: a.double() + 2 * b.double() + 3 * c.double(), other, struct)
    same(
        tensors(summed),
        {k: v.double() + 2 * tensors(other)[k].double() + 3 * v.double() for k, v in tensors(struct).items()},
    )
    clone = struct.clone()
    assert type(clone) is type(struct)
    same(tensors(clone), tensors(struct))
    for mine, theirs in zip(struct.leaves(), clone.leaves(), strict=True):
        assert mine.numel() == 0 or not share_memory(mine, theirs)


def test_to_moves_every_tensor() -> None:
    rollout = Maker(3).rollout(2, 3)
    there = rollout.to("meta", non_blocking=True)
    assert {leaf.device.type for leaf in there.leaves()} == {"meta"}
    assert [leaf.shape for leaf in there.leaves()] == [leaf.shape for leaf in rollout.leaves()]
    assert all(a is b for a, b in zip(rollout.to(torch.device("cpu")).leaves(), rollout.leaves(), strict=True))


def test_replace_keeps_the_other_fields_and_the_axes() -> None:
    flat = flat_batch()
    new = flat.replace(action=torch.arange(6))
    assert new.action.tolist() == [0, 1, 2, 3, 4, 5]
    assert new.colour is flat.colour
    assert new.check().size("T*B") == 6
    assert flat.action is not new.action
    with fails(ConfigError, "Batch has no field sky, zoo; it has observation, action, colour, extra"):
        flat.replace(zoo=1, action=2, sky=3)


@few
@given(rollouts | batches, seeds)
def test_equal_compares_every_bit_of_every_tensor(struct: Struct, seed: int) -> None:
    assert struct.equal(struct.clone())
    full = [k for k, leaf in enumerate(struct.leaves()) if leaf.numel()]
    if not full:
        return
    other = struct.clone()
    leaf = other.leaves()[full[seed % len(full)]]
    element = leaf.view(-1)[seed % leaf.numel()]
    element.copy_(~element if leaf.dtype == torch.bool else torch.nan_to_num(element) + 1)
    assert not struct.equal(other)


def test_equal_goes_by_bits_dtypes_shapes_and_structure() -> None:
    x = torch.zeros(2, 3)
    zero = Inner(x=x, y=x)
    assert Inner(x=x * torch.nan, y=x).equal(Inner(x=x * torch.nan, y=x))
    assert not zero.equal(Inner(x=-x, y=x))
    assert not zero.equal(Inner(x=x, y=x.int()))
    assert not zero.equal(Inner(x=x, y=torch.zeros(2, 3, 1)))
    assert not zero.equal(Inner(x=x, y=[x]))
    assert Inner(x=x.T, y=x).equal(Inner(x=x.T.contiguous(), y=x))
    assert Inner(x=torch.zeros(1).expand(2, 3), y=x).equal(zero)
    assert Inner(x=torch.tensor(1.0), y=x).equal(Inner(x=torch.tensor(1.0), y=x))
    assert not zero.flatten("T", "B").equal(Inner(x=x.flatten(), y=x.flatten()))
    assert zero != zero.clone()
    assert len({zero, zero, zero.clone()}) == 2


# at, [...]


@few
@given(rollouts | batches, seeds, st.integers(-5, 5), st.integers(-5, 5), st.sampled_from([None, 1, 2, 3]))
def test_at_an_axis_without_one_row_more(struct: Struct, seed: int, start: int, stop: int, step: int | None) -> None:
    maker, b = Maker(seed), struct.size("B")
    indices: list[Any] = [slice(start, stop, step), slice(None), torch.randint(0, 2, (b,), generator=maker.rng).bool()]
    if b:
        indices += [0, b - 1, -1, -b, torch.randint(-b, b, (7,), generator=maker.rng)]
        indices.append(indices[-1].int())
    for index in indices:
        part = struct.at(B=index)
        same(tensors(part), {k: cut(leaf, names, "B", index) for k, (leaf, names) in plain(struct).items()})
        assert type(part) is type(struct)
        for mine, theirs in zip(struct.leaves(), part.leaves(), strict=True):
            if not isinstance(index, Tensor) and theirs.numel():
                assert share_memory(mine, theirs)
        if not isinstance(index, int):
            part.check()


@few
@given(rollouts, st.integers(-6, 6), st.integers(-6, 6))
def test_at_a_slice_of_an_axis_with_one_row_more_is_a_whole_rollout(rollout: Rollout, start: int, stop: int) -> None:
    steps = range(rollout.size("T"))[start:stop]
    part = rollout.at(T=slice(start, stop)).check()
    assert part.size("T") == len(steps)
    first = steps.start
    same(
        tensors(part),
        {
            k: cut(leaf, names, "T", slice(first, first + len(steps)), slice(first, first + len(steps) + 1))
            for k, (leaf, names) in plain(rollout).items()
        },
    )


@few
@given(rollouts, st.integers(-4, 3))
def test_at_one_step_takes_the_observation_that_the_action_followed(rollout: Rollout, t: int) -> None:
    size = rollout.size("T")
    if -size <= t < size:
        part = rollout.at(T=t)
        row = range(size)[t]
        same(tensors(part), {k: cut(leaf, names, "T", row, row) for k, (leaf, names) in plain(rollout).items()})
        assert part.check().size("B") == rollout.size("B")
        with pytest.raises(ConfigError, match="no axis 'T'"):
            part.size("T")
    else:
        with pytest.raises(IndexError, match=re.escape(f"Rollout.at(T=...): {t} is out of range for size {size}")):
            rollout.at(T=t)


def test_the_row_more_cannot_be_indexed_even_if_only_it_is_there() -> None:
    class Seen(Struct):
        observation: Tensor = axes("T+1")

    seen = Seen(observation=torch.arange(4))
    assert seen.at(T=-1).observation == 2
    with fails(IndexError, "Seen.at(T=...): 3 is out of range for size 3"):
        seen.at(T=3)


@pytest.mark.parametrize("index", [slice(None, None, 2), torch.tensor([0]), torch.ones(5, dtype=torch.bool)])
def test_at_needs_an_unambiguous_index_where_there_is_one_row_more(index: Any) -> None:
    with fails(
        ShapeError,
        "Rollout.at(T=...): observation has one row more than T, so only an int or a slice without a step says which "
        "rows to take",
    ):
        small().at(T=index)


def test_at_several_axes_goes_one_after_the_other() -> None:
    batch = Maker(1).batch(4, 3)
    t, b = torch.tensor([3, 0]), torch.tensor([2, 2, 1])
    same(tensors(batch.at(T=t, B=b)), {k: leaf[t][:, b] for k, leaf in tensors(batch).items()})
    same(tensors(batch.at(B=1, T=slice(1, 3))), {k: leaf[1:3, 1] for k, leaf in tensors(batch).items()})
    assert batch.at() is batch


def test_at_of_what_is_no_index() -> None:
    batch = Maker(1).batch(4, 3)
    for index in (True, None, ..., (0, 1), [0, 1], 1.5):
        with fails(
            ConfigError, f"Batch.at(T=...): an index is an int, a slice or a tensor of one axis, given {index!r}"
        ):
            batch.at(T=index)
    for tensor, given_ in (
        (torch.tensor(1), "int64[]"),
        (torch.zeros(2, 2, dtype=torch.int64), "int64[2, 2]"),
        (torch.zeros(4, dtype=torch.uint8), "uint8[4]"),
        (torch.zeros(4), "float32[4]"),
    ):
        with fails(ConfigError, f"Batch.at(T=...): an index tensor is int64[n], int32[n] or bool[4], given {given_}"):
            batch.at(T=tensor)
    for row in (4, -5):
        with pytest.raises(IndexError):
            batch.at(T=torch.tensor([0, row]))
    with fails(ShapeError, "Batch.at(T=...): expected a mask bool[4], given bool[3]"):
        batch.at(T=torch.ones(3, dtype=torch.bool))
    with fails(ConfigError, "Batch.at(T=...): the step of a slice is at least 1, given -1"):
        batch.at(T=slice(None, None, -1))
    with fails(ConfigError, "Batch has no axis 'X'; it has T, B"):
        batch.at(X=0)


@few
@given(batches, seeds)
def test_brackets_index_the_axis_that_all_fields_begin_with(batch: Batch, seed: int) -> None:
    t = batch.size("T")
    rng = torch.Generator().manual_seed(seed)
    indices: list[Any] = [slice(1, 3), slice(None, None, 2), torch.randint(0, 2, (t,), generator=rng).bool()]
    if t:
        indices += [-1, torch.randint(t, (5,), generator=rng)]
    for index in indices:
        same(tensors(batch[index]), {k: leaf[index] for k, leaf in tensors(batch).items()})
    rows = list(batch)
    assert len(rows) == t
    for k, row in enumerate(rows):
        same(tensors(row), {path: leaf[k] for path, leaf in tensors(batch).items()})
        assert row.size("B") == batch.size("B")


def test_brackets_need_a_common_axis() -> None:
    message = (
        "Rollout: its fields do not begin with one and the same axis (observation [T+1], action [T], reward [T]); name "
        "an axis, as in at(B=...) or split(2, axis='B')"
    )
    operations: list[Callable[[], Any]] = [
        lambda: small()[0],
        lambda: small().__setitem__(0, 0),
        lambda: small().__setitem__(torch.tensor([0]), 0),
        lambda: small().split(1),
        lambda: small().shuffle(torch.Generator()),
    ]
    for operation in operations:
        with fails(ShapeError, message):
            operation()
    inner = Inner(x=torch.zeros(1, 2), y=torch.zeros(1, 2))
    with pytest.raises(ShapeError, match=re.escape("(x [], y [...])")):
        inner[0][0][0]

    class Count(Struct):
        x: Tensor = axes("3 B")

    class Seen(Struct):
        x: Tensor = axes("T+1 B")

    class Anything(Struct):
        x: Tensor = axes("...")

    for struct in (Count(x=torch.zeros(3, 2)), Seen(x=torch.zeros(3, 2)), Anything(x=torch.zeros(3, 2))):
        with pytest.raises(ShapeError, match="do not begin with one and the same axis"):
            struct[0]
    assert Count(x=torch.zeros(3, 2)).at(B=0).check().x.shape == (3,)


def test_an_absent_field_has_no_say_in_the_leading_axis() -> None:
    class Carried(Struct):
        x: Tensor = axes("T B")
        memory: Tensor | None = axes("B", default=None)

    assert Carried(x=torch.arange(6).view(2, 3))[1].x.tolist() == [3, 4, 5]
    with pytest.raises(ShapeError, match=r"x \[T\], memory \[B\]"):
        Carried(x=torch.zeros(2, 3), memory=torch.zeros(3))[1]


# Writing


@few
@given(rollouts | batches, seeds)
def test_copy_writes_every_tensor_in_place(struct: Struct, seed: int) -> None:
    other = another(struct, seed)
    before = struct.leaves()
    assert struct.copy_(other) is struct
    same(tensors(struct), tensors(other))
    assert all(a is b for a, b in zip(struct.leaves(), before, strict=True))


@few
@given(rollouts | batches, seeds, st.integers(0, 4), st.integers(0, 4))
def test_copy_into_a_part_changes_that_part_only(struct: Struct, seed: int, start: int, stop: int) -> None:
    b, columns = struct.size("B"), slice(start, stop)
    expected, other = snapshot(struct), another(struct.at(B=columns), seed)
    for path, (_, names) in plain(struct).items():
        cut(expected[path], names, "B", columns).copy_(tensors(other)[path])
    struct.at(B=columns).copy_(other)
    same(tensors(struct), expected)
    for t in range(struct.size("T")):
        row = another(struct.at(T=t), seed + 1)
        struct.at(T=t).copy_(row)
        assert struct.at(T=t).equal(row)
    assert struct.size("B") == b


@few
@given(batches, seeds)
def test_assignment_to_rows_of_the_leading_axis(batch: Batch, seed: int) -> None:
    t = batch.size("T")
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(t, generator=rng)[: t // 2 + 1]
    mask = torch.randint(0, 2, (t,), generator=rng).bool()
    indices: list[Any] = [slice(1, 3), slice(0, None, 2), slice(2, 2), rows, rows.int(), mask]
    for index in [*indices, -1] if t else indices:
        expected, new = snapshot(batch), another(batch[index], seed)
        for path, leaf in expected.items():
            leaf[index] = tensors(new)[path]
        batch[index] = new
        same(tensors(batch), expected)
        batch[index] = 1
        for leaf in expected.values():
            leaf[index] = 1
        same(tensors(batch), expected)


def test_writing_takes_the_same_structure_shapes_and_dtypes_only() -> None:
    rollout = small()
    before = snapshot(rollout)
    wrong: list[tuple[Any, str]] = [
        (rollout.replace(reward=torch.ones(5, 1)), "Rollout.reward: expected float32[5, 4], given float32[5, 1]"),
        (rollout.replace(reward=torch.ones(())), "Rollout.reward: expected float32[5, 4], given float32[]"),
        (rollout.replace(action=torch.ones(5, 4)), "Rollout.action: expected int64[5, 4], given float32[5, 4]"),
        (rollout.replace(reward=1.0), "Rollout.reward: expected float32[5, 4], given 1.0"),
        (rollout.replace(memory=torch.ones(4)), "Rollout.memory: expected None, given float32[4]"),
        (rollout.replace(reward=None), "Rollout.reward: expected float32[5, 4], given None"),
        (rollout.replace(action=[torch.ones(5, 4)]), "Rollout.action: expected int64[5, 4], given [float32[5, 4]]"),
        (
            rollout.replace(observation={"camera": torch.ones(1), "speed": (torch.ones(2),)}),
            "Rollout.observation['speed']: expected float32[6, 4], given (float32[2],)",
        ),
        (
            rollout.replace(observation={"camera": torch.ones(1), "sound": torch.ones(2)}),
            "Rollout.observation: expected {'camera': uint8[6, 4, 3], 'speed': float32[6, 4]}, given "
            "{'camera': float32[1], 'sound': float32[2]}",
        ),
        (rollout.at(T=0), "Rollout.observation: expected axes [T+1, B, ...], given [B, ...]"),
        (torch.ones(3), f"Rollout: expected {rollout!r}, given float32[3]"),
    ]
    for other, message in wrong:
        if isinstance(other, Struct):
            other = other.map(lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf)
        with fails(ShapeError, message):
            rollout.copy_(other)
    same(tensors(rollout), before)
    with fails(ShapeError, "Rollout.reward: expected float32[5, 4], given None"):
        rollout.map(torch.add, rollout, rollout.replace(reward=None))
    inner = Inner(x=torch.zeros(3, 2), y=torch.zeros(3, 2))
    for index in (slice(0, 2), torch.tensor([0, 1]), torch.tensor([True, False, True])):
        with fails(ShapeError, "Inner.x: expected float32[2, 2], given float32[3, 2]"):
            inner[index] = inner


@pytest.mark.parametrize(
    ("dtype", "holds", "refuses"),
    [
        (torch.bool, [0, 1, True, False], [2, -1, 0.0, 0.5]),
        (torch.uint8, [0, 255, True], [256, -1, 1.0]),
        (torch.int64, [2**63 - 1, -(2**63), False], [2**63, 1.0, float("nan")]),
        (torch.float16, [0, 0.1, -3, True, float("nan"), float("inf")], []),
        (torch.float64, [0.1, 2**53, float("-inf")], []),
        (torch.complex64, [0.5, 1], []),
    ],
)
def test_a_number_is_written_only_where_the_dtype_can_hold_it(
    dtype: torch.dtype, holds: list[Any], refuses: list[Any]
) -> None:
    for number in holds:
        inner = Inner(x=torch.ones(2, 3), y=torch.ones(2, 3, 1, dtype=dtype))
        assert inner.copy_(number) is inner
        same(
            tensors(inner),
            {"x": torch.full((2, 3), number, dtype=torch.float32), "y": torch.full((2, 3, 1), number, dtype=dtype)},
        )
    for number in refuses:
        inner = Inner(x=torch.ones(2, 3), y=torch.ones(2, 3, 1, dtype=dtype))
        name = str(dtype).removeprefix("torch.")
        for write in (lambda: inner.copy_(number), lambda: inner.__setitem__(slice(0, 1), number)):  # noqa: B023
            with pytest.raises(ShapeError, match=re.escape(f", 3, 1] cannot hold {number!r}")):
                write()
        with fails(ShapeError, f"Inner.y: {name}[1, 3, 1] cannot hold {number!r}"):
            inner[torch.tensor([0])] = number
        assert inner.x.eq(1).all()


# split and cat


@few
@given(rollouts | batches, st.integers(1, 5), st.data())
def test_cat_is_the_inverse_of_split(struct: Struct, size: int, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(["B"] if isinstance(struct, Rollout) else ["B", "T"]))
    total = struct.size(axis)
    marks = sorted(data.draw(st.lists(st.integers(0, total), max_size=3)))
    listed = [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]
    for given_, lengths in ((size, None), (listed, listed), (tuple(listed), listed)):
        parts = struct.split(given_, axis=axis)
        columns = {k: torch.split(leaf, given_, names.index(axis)) for k, (leaf, names) in plain(struct).items()}
        for number, part in enumerate(parts):
            same(tensors(part), {k: pieces[number] for k, pieces in columns.items()})
            for mine, theirs in zip(struct.leaves(), part.leaves(), strict=True):
                assert theirs.numel() == 0 or share_memory(mine, theirs)
        if lengths is not None:
            assert [part.size(axis) for part in parts] == lengths
        joined = type(struct).cat(parts, axis=axis)
        assert type(joined) is type(struct)
        same(tensors(joined), tensors(struct))
        assert joined.check().equal(struct)


@few
@given(rollouts, st.integers(0, 3), seeds)
def test_cat_joins_each_field_along_its_own_axis(rollout: Rollout, b: int, seed: int) -> None:
    others = [another(rollout, seed), another(rollout.at(B=slice(0, b)), seed), rollout]
    joined = Rollout.cat(iter(others))
    same(
        tensors(joined),
        {k: torch.cat([tensors(o)[k] for o in others], names.index("B")) for k, (_, names) in plain(rollout).items()},
    )


def test_cat_copies_even_one_item() -> None:
    class Shared(Struct):
        x: Tensor = axes("B")
        table: Tensor = axes("K")

    one = Shared(x=torch.arange(3), table=torch.arange(2))
    joined = Shared.cat([one])
    same({"x": joined.x, "table": joined.table}, {"x": one.x, "table": one.table})
    assert not share_memory(joined.x, one.x)
    assert not share_memory(joined.table, one.table)


def test_a_field_without_the_axis_is_the_same_in_all_items() -> None:
    class Shared(Struct):
        x: Tensor = axes("B")
        table: Tensor = axes("K")

    table = torch.tensor([1.0, torch.nan])
    one = Shared(x=torch.arange(3), table=table)
    joined = Shared.cat([one, one.replace(x=torch.arange(1)), one.replace(table=table.clone())])
    assert joined.x.tolist() == [0, 1, 2, 0, 0, 1, 2]
    same({"table": joined.table}, {"table": table})
    alike = "Shared.table: items joined along B must be the same but for that axis; item 0 has float32[2], item 1 has "
    with fails(ShapeError, alike + "other values"):
        Shared.cat([one, one.replace(table=torch.tensor([1.0, 2.0]))])
    with fails(ShapeError, alike + "float32[3]"):
        Shared.cat([one, one.replace(table=torch.zeros(3))])
    with fails(ShapeError, alike + "float64[2]"):
        Shared.cat([one, one.replace(table=table.double())])


def test_cat_converts_and_drops_nothing() -> None:
    rollout = small()
    alike = "items joined along B must be the same but for that axis; item 0 has"
    with fails(ShapeError, f"Rollout.reward: {alike} float32[5, 4], item 2 has float64[5, 4]"):
        Rollout.cat([rollout, rollout, rollout.replace(reward=rollout.reward.double())])
    with fails(ShapeError, f"Rollout.observation['camera']: {alike} uint8[6, 4, 3], item 1 has uint8[5, 4, 3]"):
        Rollout.cat([rollout, rollout.at(T=slice(0, 4))])
    with fails(ShapeError, f"Rollout.reward: {alike} float32[5, 4], item 1 has float32[0]"):
        Rollout.cat([rollout, rollout.replace(reward=torch.zeros(0))])
    with fails(ShapeError, "Rollout.memory: expected None, given float32[4]"):
        Rollout.cat([rollout, rollout.replace(memory=torch.zeros(4))])
    with fails(ConfigError, "Rollout.cat: there is nothing to join"):
        Rollout.cat([])
    with fails(ConfigError, "Rollout has no axis 'T*B'; it has T, B"):
        Rollout.cat([rollout], axis="T*B")


def test_an_axis_with_one_row_more_is_not_cut_joined_or_shuffled() -> None:
    rollout = small()
    operations: dict[str, Callable[[], Any]] = {
        "cat": lambda: Rollout.cat([rollout, rollout], axis="T"),
        "split": lambda: rollout.split(2, axis="T"),
        "shuffle": lambda: rollout.shuffle(torch.Generator(), axis="T"),
    }
    for verb, operation in operations.items():
        with fails(
            ShapeError,
            f"Rollout.{verb}: impossible along T, of which observation has one row more: neighbours share it; "
            "at(T=slice(a, b)) takes a part",
        ):
            operation()


def test_split_into_sizes_that_do_not_fit() -> None:
    rollout = small()
    for wrong in ([1, 2], [4, 1], [5, -1], []):
        with fails(ShapeError, f"Rollout.split: the sizes {wrong} do not sum up to B=4"):
            rollout.split(wrong, axis="B")
    for size in (0, -1):
        with fails(ConfigError, f"Rollout.split: parts of {size} rows; give at least 1"):
            rollout.split(size, axis="B")
    assert [part.size("B") for part in rollout.split(3, axis="B")] == [3, 1]


def test_split_of_nothing_is_one_empty_part() -> None:
    (part,) = small(5, 0).split(3, axis="B")
    assert Rollout.cat([part]).equal(small(5, 0))


# shuffle


@few
@given(rollouts | batches, seeds)
def test_shuffle_is_one_permutation_for_all_fields(struct: Struct, seed: int) -> None:
    b = struct.size("B")
    order = torch.randperm(b, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    shuffled = struct.shuffle(generator, axis="B")
    same(tensors(shuffled), {k: cut(leaf, names, "B", order) for k, (leaf, names) in plain(struct).items()})
    shuffled.check()
    for mine, theirs in zip(struct.leaves(), shuffled.leaves(), strict=True):
        assert mine.numel() == 0 or not share_memory(mine, theirs)


def test_shuffle_draws_from_the_generator_alone() -> None:
    flat = flat_batch(4, 5)
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(1)
    first, second = flat.shuffle(generator), flat.shuffle(generator)
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(first.observation.tolist()) == list(range(20))
    assert first.observation.tolist() != second.observation.tolist() != list(range(20))
    assert flat.shuffle(torch.Generator().manual_seed(1)).equal(first)


# flatten


@few
@given(batches, seeds, st.integers(1, 7))
def test_flatten_is_a_reshape_and_everything_works_after_it(batch: Batch, seed: int, size: int) -> None:
    t, b = batch.size("T"), batch.size("B")
    flat = batch.flatten("T", "B").check()
    expected = {k: leaf.reshape(t * b, *leaf.shape[2:]) for k, leaf in tensors(batch).items()}
    same(tensors(flat), expected)
    assert flat.size("T*B") == t * b
    assert all(share_memory(x, y) for x, y in zip(batch.leaves(), flat.leaves(), strict=True) if x.numel())
    with pytest.raises(ConfigError, match=re.escape("Batch has no axis 'T'; it has T*B")):
        flat.size("T")

    order = torch.randperm(t * b, generator=torch.Generator().manual_seed(seed))
    shuffled = flat.shuffle(torch.Generator().manual_seed(seed)).check()
    same(tensors(shuffled), {k: leaf[order] for k, leaf in expected.items()})
    parts = shuffled.split(size)
    for k, part in enumerate(parts):
        rows = order[k * size : (k + 1) * size]
        same(tensors(part.check()), {path: leaf[rows] for path, leaf in expected.items()})
    assert Batch.cat(parts, axis="T*B").equal(shuffled)
    same(tensors(flat.at(**{"T*B": order})), tensors(shuffled))
    if t * b:
        same(tensors(flat[-1]), {k: leaf[-1] for k, leaf in expected.items()})
        flat[order] = shuffled
        same(tensors(flat), expected)


def test_flatten_copies_what_cannot_be_viewed_and_other_pairs_of_axes() -> None:
    inner = Inner(x=torch.arange(6).view(3, 2).T, y=torch.arange(24).view(2, 3, 4))
    flat = inner.flatten("T", "B")
    assert flat.x.tolist() == [0, 2, 4, 1, 3, 5]
    assert share_memory(flat.y, inner.y)

    class Deep(Struct):
        x: Tensor = axes("T A B ...")

    deep = Deep(x=torch.arange(24).view(2, 3, 4))
    assert deep.flatten("A", "B").check().x.tolist() == deep.x.reshape(2, 12).tolist()
    assert deep.flatten("A", "B").flatten("T", "A*B").check().size("T*A*B") == 24
    assert deep.flatten("T", "A").flatten("T*A", "B").check().x.tolist() == list(range(24))


def test_flatten_names_the_fields_that_have_not_both_axes() -> None:
    rollout = small().replace(memory=torch.zeros(4))
    start = "Rollout.flatten: every field must have {} and {} side by side, without +1, unlike "
    with fails(ShapeError, start.format("T", "B") + "observation [T+1, B, ...], memory [B, ...]"):
        rollout.flatten("T", "B")
    with fails(
        ShapeError,
        start.format("B", "T") + "observation [T+1, B, ...], action [T, B, ...], reward [T, B], memory [B, ...]",
    ):
        rollout.flatten("B", "T")
    assert rollout.replace(observation=None, memory=None).flatten("T", "B").reward.shape == (20,)


# Axes belong to the object


@pytest.mark.parametrize(
    "carry",
    [
        lambda s: s.map(lambda leaf: leaf + 0),
        lambda s: s.clone(),
        lambda s: s.to("cpu"),
        lambda s: s.replace(extra=None).replace(extra=s.extra),
        lambda s: optree.tree_map(lambda leaf: leaf.clone(), s, namespace=NAMESPACE),
        lambda s: optree.tree_unflatten(*reversed(optree.tree_flatten(s, namespace=NAMESPACE))),
        lambda s: pickle.loads(pickle.dumps(s)),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_the_axes_go_with_the_object(carry: Callable[[Batch], Batch]) -> None:
    batch = Maker(5).batch(2, 3).replace(observation={"a": Inner(x=torch.zeros(2, 3), y=torch.ones(2, 3))})
    for struct, axis, size in ((batch, "T", 2), (batch[0], "B", 3), (batch.flatten("T", "B"), "T*B", 6)):
        carried = carry(struct)
        assert carried.equal(struct)
        assert carried.check().size(axis) == size
    assert batch.flatten("T", "B").observation["a"].size("T*B") == 6
    assert batch[1].observation["a"].size("B") == 3


def test_the_axes_are_part_of_the_structure_for_optree() -> None:
    batch = Maker(5).batch(2, 3)
    structure = optree.tree_structure(batch, namespace=NAMESPACE)
    assert structure == optree.tree_structure(batch.clone(), namespace=NAMESPACE)
    assert structure != optree.tree_structure(batch[0], namespace=NAMESPACE)
    shapes = optree.tree_map(
        lambda leaf: leaf.shape, Inner(x=torch.zeros(2, 3), y=torch.zeros(2, 3, 1)), namespace=NAMESPACE
    )
    assert (shapes.x, shapes.y) == ((2, 3), (2, 3, 1))


# Classes


def test_a_struct_is_a_frozen_dataclass_with_keywords() -> None:
    rollout = small()
    assert [field.name for field in dataclasses.fields(rollout)] == ["observation", "action", "reward", "memory"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout.reward = torch.zeros(5, 4)
    with pytest.raises(TypeError, match="positional"):
        Rollout(torch.zeros(6, 4), torch.zeros(5, 4), torch.zeros(5, 4))
    with pytest.raises(TypeError, match=r"missing .* 'reward'"):
        Rollout(observation=torch.zeros(6, 4), action=torch.zeros(5, 4))


def test_every_field_declares_its_axes() -> None:
    with fails(ConfigError, "Wrong.size_: write `size_: Tensor = axes('T B')`, with its axes"):

        class Wrong(Struct):
            good: Tensor = axes("T")
            size_: Tensor

    with fails(ConfigError, "Child.more: write `more: Tensor = axes('T B')`, with its axes"):

        class Child(Rollout):
            more: Tensor | None = None

    with pytest.raises(ConfigError, match=r"^Bare: 'x' is a field but has no .* write every field as `name: Tensor"):

        class Bare(Struct):
            x = axes("T")

    with pytest.raises(ConfigError, match=r"^Mutable: mutable default .* write every field as `name: Tensor"):

        class Mutable(Struct):
            x: dict[str, Tensor] = {}  # noqa: RUF012

    for name in ("map", "_axes", "size"):
        with fails(ConfigError, f"Taken: a field cannot be named {name!r}, which every Struct has"):
            type("Taken", (Struct,), {"__annotations__": {name: "Tensor"}, name: axes("T")})


@pytest.mark.parametrize(
    "names", ["T T", "T T+1", "T+2", "... T", "T ... B", "T,B", "+1", "T*", "-1", "1+1", "T B+1 B"]
)
def test_axes_that_are_not_understood(names: str) -> None:
    with fails(
        ConfigError,
        f"axes({names!r}): write distinct words (T B), a word and one (T+1), counts (3), and ... only at the end",
    ):
        axes(names)


def test_the_only_default_is_none() -> None:
    with fails(ConfigError, "axes('T', default=0): the only default is None, which means absent"):
        axes("T", default=0)


def test_axes_that_are_understood() -> None:
    class Odd(Struct):
        scalar: Tensor = axes("")
        anything: Tensor = axes("...")
        square: Tensor = axes("3 3 Zeit_2")
        flat: Tensor = axes("T*B+1 …")

    Odd(scalar=torch.zeros(()), anything=torch.zeros(5), square=torch.zeros(3, 3, 2), flat=torch.zeros(8)).check()
    with fails(ShapeError, "Odd.scalar: expected [], given [1] float32"):
        Odd(scalar=torch.zeros(1), anything=torch.zeros(()), square=torch.zeros(3, 3, 2), flat=torch.zeros(8)).check()


def test_a_class_inside_a_function_that_another_one_extends() -> None:
    class Base(Struct):
        x: Tensor = axes("B")
        note: Tensor | None = axes("B", default=None)

        def doubled(self) -> Base:
            return self.replace(x=self.x * 2)

    class More(Base):
        y: Tree = axes("B ...")  # required, after one that is not
        x: Tensor = axes("B", torch.int64)  # declared anew, in its old place

    more = More(x=torch.arange(3), y=(torch.zeros(3, 1),))
    assert [path for path, _ in more.check().doubled().named_leaves()] == ["x", "y[0]"]
    assert More.cat([more, more]).doubled().x.tolist() == [0, 2, 4, 0, 2, 4]
    with pytest.raises(ShapeError, match=r"More\.x: expected \[B=3\] int64"):
        more.replace(x=torch.zeros(3)).check()
    Base(x=torch.zeros(3)).check()

    class Again(Base):
        pass

    assert Again(x=torch.arange(3))[1:].x.tolist() == [1, 2]


def test_a_generic_class() -> None:
    class Box(Struct, Generic[T]):
        content: T = axes("B ...")

    box: Box[dict[str, Tensor]] = Box[dict[str, Tensor]](content={"a": torch.arange(3)})
    assert box.check()[2].content["a"] == 2


MODULE = """{future}
from typing import TYPE_CHECKING
import torch
from headrace.struct import Struct, Tree, axes
if TYPE_CHECKING:
    from nowhere import Missing
class Module(Struct):
    x: {annotation} = axes("T+1 B ...")
    y: Tree | None = axes("T B", torch.int32, default=None)
"""


@pytest.mark.parametrize(
    ("future", "annotation"), [("from __future__ import annotations", "Missing[int"), ("", "torch.Tensor")]
)
def test_a_class_in_a_module_with_and_without_postponed_annotations(
    tmp_path: Path, future: str, annotation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    annotation = f"{annotation}]" if "[" in annotation else annotation
    file = tmp_path / "module_of_structs.py"
    file.write_text(MODULE.format(future=future, annotation=annotation))
    spec = importlib.util.spec_from_file_location("module_of_structs", file)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module: ModuleType = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "module_of_structs", module)
    spec.loader.exec_module(module)
    struct = module.Module(x={"a": torch.arange(6).view(3, 2)}, y=torch.zeros(2, 2, dtype=torch.int32)).check()
    assert struct.at(T=1).x["a"].tolist() == [2, 3]
    assert pickle.loads(pickle.dumps(struct)).equal(struct)


SCRIPT = """
import sys, cloudpickle, torch
from headrace.struct import Struct, Tree, axes

class Base(Struct):
    x: Tree | None = axes("T+1 B ...", default=None)
    y: torch.Tensor | None = axes("T B", torch.int64, default=None)

class Sent(Base):
    z: torch.Tensor = axes("T B")
    def doubled(self):
        return self.replace(z=self.z * 2)

z = torch.arange(6).view(2, 3)
sent = Sent(x={"a": [torch.arange(9).view(3, 3)]}, z=z)
for item in (Sent, sent, sent.at(T=1), sent.replace(x=None).flatten("T", "B")):
    data = cloudpickle.dumps(item)
    sys.stdout.buffer.write(len(data).to_bytes(8, "little") + data)
"""


@pytest.mark.slow
def test_a_class_of_main_goes_by_value_to_another_process() -> None:
    """The script pickles its own classes; here, in another process, nobody has heard of them."""
    path = os.pathsep.join([str(Path(headrace.struct.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    items, data = [], done.stdout
    while data:
        size = int.from_bytes(data[:8], "little")
        items.append((data[8 : 8 + size], pickle.loads(data[8 : 8 + size])))
        data = data[8 + size :]
    (again, sent_class), (_, sent), (_, step), (_, flat) = items
    assert pickle.loads(again) is sent_class is type(sent) is type(step) is type(flat)
    assert [path for path, _ in sent.check().named_leaves()] == ["x['a'][0]", "z"]
    assert sent.doubled().z.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert sent.at(T=slice(1, 2)).check().x["a"][0].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert step.check().at(B=2).z.tolist() == 5
    assert flat.check().size("T*B") == 6
    assert flat[4].z == 4
    made = sent_class(x=torch.zeros(2, 1), z=torch.zeros(1, 1))
    assert made.check().y is None
    with pytest.raises(ShapeError, match=re.escape("Sent.y: expected [T=1, B=1] int64, given [1, 1] float32")):
        made.replace(y=torch.zeros(1, 1)).check()

    class Extended(sent_class):  # type: ignore[misc, valid-type]
        w: Tensor = axes("B")

    assert Extended(x=torch.zeros(2, 1), y=None, z=torch.zeros(1, 1), w=torch.zeros(1)).check().size("B") == 1
