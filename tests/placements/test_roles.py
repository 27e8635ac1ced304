"""What a role knows of itself, its clock, and how functions and arguments reach it."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import enum
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import Closed, ConfigError, HeadraceError, Inline, RoleFailed, Struct, Threads, axes, role, wait

pytestmark = pytest.mark.timeout(60)

OFFSET = 100


def of_this_module(number: int) -> int:
    """A role's function at module level, which reads a global."""
    return number + OFFSET + helper()


def helper() -> int:
    return 1000


class Doubling:
    """A callable class of this module, with an attribute that plain pickle refuses."""

    def __init__(self) -> None:
        self.double = lambda number: 2 * number

    def __call__(self, number: int) -> int:
        return self.double(number)

    def method(self, number: int) -> int:
        return self.double(number) + 1


# What role() says


def test_identity(everywhere: Any, ask: Any) -> None:
    def describe() -> tuple[Any, ...]:
        me = role()
        return me.name, me.rank, me.of, me.incarnation, me.device, list(me.share_of(10)), me.stopping

    def program(crew: Any) -> Any:
        return ask(crew, describe, copies=3, device=["cpu", "cuda:0", "cuda:1"])

    assert everywhere(program) == [
        ("describe", 0, 3, 0, "cpu", [0, 1, 2], False),
        ("describe", 1, 3, 0, "cuda:0", [3, 4, 5], False),
        ("describe", 2, 3, 0, "cuda:1", [6, 7, 8, 9], False),
    ]


def test_the_driver_is_a_role_too(place: Any) -> None:
    with place.crew():
        me = role()
        assert (me.name, me.rank, me.of, me.incarnation, me.device) == ("driver", 0, 1, 0, "cpu")
        assert list(me.share_of(3)) == [0, 1, 2]


def test_members(place: Any) -> None:
    def count() -> None:
        role().sleep(0.1)

    with place.crew() as crew:
        assert crew.members == ()
        members = crew.start(count, copies=2)
        (other,) = crew.start(count, name="other")
        assert crew.members == (*members, other)
        assert [(m.name, m.rank, m.of, m.incarnation) for m in crew.members] == [
            ("count", 0, 2, 0), ("count", 1, 2, 0), ("other", 0, 1, 0),
        ]  # fmt: skip
        assert all(m.pid > 0 for m in crew.members)
        crew.join(timeout=10.0)


def test_seeds(everywhere: Any, ask: Any) -> None:
    def draw() -> tuple[Any, ...]:
        return tuple(map(int, role().seed.generate_state(4))), float(np.random.default_rng(role().seed).normal())

    def program(crew: Any) -> Any:
        return [*ask(crew, draw, copies=3), *ask(crew, draw, name="other"), (tuple(role().seed.generate_state(4)), 0.0)]

    first, second = everywhere(program, seed=1), everywhere(program, seed=2)
    states = [state for state, _ in first + second]
    assert len(set(states)) == len(states), "a stream for every role, rank and seed"
    assert first == everywhere(program, seed=1)


def test_a_seed_depends_neither_on_the_other_roles_nor_on_when_it_was_started(place: Any, ask: Any) -> None:
    def draw() -> tuple[int, ...]:
        return tuple(map(int, role().seed.generate_state(4)))

    def rest() -> int:
        return 0

    with place.crew(seed=3) as crew:
        alone = ask(crew, draw)
    with place.crew(seed=3) as crew:
        ask(crew, rest, copies=2)
        assert ask(crew, draw, copies=2)[:1] == alone


@pytest.mark.parametrize("total", [0, 1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("copies", [1, 3])
def test_shares_cover_exactly(within: Any, ask: Any, total: int, copies: int) -> None:
    def share(total: int) -> list[int]:
        return list(role().share_of(total))

    with within.crew() as crew:
        shares = ask(crew, share, total, copies=copies)
    assert [k for share in shares for k in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_threads_of_a_role(place: Any, ask: Any) -> None:
    with place.crew() as crew:
        assert ask(crew, torch.get_num_threads, name="default") == [1]
        assert ask(crew, torch.get_num_threads, name="two", threads=2) == [2]
        assert ask(crew, torch.get_num_threads, name="again") == [1]


def test_stopping_ends_a_role_that_never_waits(beside: Any, ask: Any) -> None:
    def spin(ready: Any, done: Any) -> None:
        ready.put(True)
        while not role().stopping:
            time.sleep(0.001)

    began = time.monotonic()
    with beside.crew() as crew:
        ready = crew.channel()
        crew.start(spin, ready, crew.channel())
        ready.take(10.0)
        assert not role().stopping
        began = time.monotonic()
    assert time.monotonic() - began < 2.0


def test_names(place: Any, ask: Any) -> None:
    def name() -> str:
        return role().name

    with place.crew() as crew:
        channel = crew.channel()
        assert ask(crew, name, name=None) == ["answer"], "the function's own name"
        assert ask(crew, name, name="a role with a name of more than sixty-four characters, which is allowed, too") == [
            "a role with a name of more than sixty-four characters, which is allowed, too"
        ]
        crew.start(functools.partial(lambda channel: None, channel))
        with pytest.raises(ConfigError, match="named 'answer' already"):
            ask(crew, name, name=None)


# Clock, sleep


def test_clock_and_sleep_beside_each_other(beside: Any, ask: Any) -> None:
    def nap() -> tuple[float, float]:
        began, wall = role().clock(), time.monotonic()
        role().sleep(0.2)
        return role().clock() - began, time.monotonic() - wall

    with beside.crew() as crew:
        ((virtual, wall),) = ask(crew, nap)
    assert 0.2 <= virtual < 5.0
    assert 0.2 <= wall < 5.0


def test_a_sleep_is_cut_short_when_the_crew_stops(place: Any, ask: Any) -> None:
    def nap(ready: Any, told: Any) -> None:
        ready.put(True)
        role().sleep(10_000.0)

    with place.crew() as crew:
        ready = crew.channel()
        crew.start(nap, ready, crew.channel())
        ready.take(10.0)
        began = time.monotonic()
    assert time.monotonic() - began < 2.0


def test_sleep_lets_others_run(place: Any) -> None:
    def count(channel: Any) -> None:
        channel.put(1)

    with place.crew() as crew:
        channel = crew.channel()
        crew.start(count, channel)
        until = time.monotonic() + 10.0
        while not channel.delivered and time.monotonic() < until:
            role().sleep(0.01)
        assert channel.delivered == 1


# Outside


def test_role_and_wait_outside_a_crew(place: Any) -> None:
    with pytest.raises(ConfigError, match="outside a crew"):
        role()
    with pytest.raises(ConfigError):
        wait()
    with place.crew():
        role()
    with pytest.raises(ConfigError, match="outside a crew"):
        role()
    with pytest.raises(ConfigError):
        wait()


def test_role_is_of_the_innermost_crew(place: Any) -> None:
    with place.crew(seed=1) as outer:
        first = role()
        with place.crew(seed=2):
            assert role() is not first
        assert role() is first
        assert outer.members == ()


USES = {
    "put": lambda h: h["channel"].put(1),
    "take": lambda h: h["channel"].take(),
    "reserve": lambda h: h["tree"].reserve(),
    "pull": lambda h: h["weights"].pull({"w": torch.zeros(2)}),
    "publish": lambda h: h["weights"].publish({"w": torch.zeros(2)}, 1),
    "take_each": lambda h: h["lanes"].take_each(),
    "take_any": lambda h: h["lanes"].take_any(),
    "mean": lambda h: h["group"].mean(torch.zeros(2)),
    "barrier": lambda h: h["group"].barrier(),
    "wait": lambda h: wait(h["channel"].to_take),
    "control": lambda h: setattr(h["channel"], "control", 3),
}


def handles(crew: Any) -> dict[str, Any]:
    return {
        "channel": crew.channel(), "tree": crew.channel(like=torch.zeros(2)), "lanes": crew.lanes(2),
        "weights": crew.weights({"w": torch.zeros(2)}), "group": crew.group(1, like=torch.zeros(2)),
    }  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_handle_after_its_crew(place: Any, use: str) -> None:
    with place.crew() as crew:
        held = handles(crew)
    with pytest.raises(ConfigError):
        USES[use](held)


@pytest.mark.parametrize("use", ["put", "take", "publish", "mean"])
def test_a_handle_that_was_used_before_after_its_crew(place: Any, use: str) -> None:
    with place.crew() as crew:
        held = handles(crew)
        held["channel"].put(1)
        if use == "take":
            held["channel"].take()
        held["weights"].publish({"w": torch.zeros(2)}, 0 + 1)
        held["group"].barrier()
    with pytest.raises(HeadraceError):
        USES["publish" if use == "publish" else use](held)


@pytest.mark.parametrize("use", ["put", "take", "pull", "take_any", "mean"])
def test_a_handle_in_a_role_of_another_crew(place: Any, use: str) -> None:
    uses = USES[use]

    def count(held: Any) -> None:
        uses(held)

    with place.crew() as outer:
        held = handles(outer)
        with pytest.raises(RoleFailed) as caught, place.crew() as inner:
            inner.start(count, held)
            inner.join(timeout=10.0)
    assert type(caught.value.__cause__) is ConfigError
    assert "outside its crew" in str(caught.value)


def test_crews_can_be_nested(place: Any) -> None:
    def echo(inward: Any, outward: Any) -> None:
        while True:
            outward[0].put(inward.take() + 1)

    with place.crew() as outer, place.crew() as inner:
        ends = []
        for crew in (outer, inner):
            inward, outward = crew.channel(), crew.lanes(1)
            crew.start(echo, inward, outward)
            ends.append((inward, outward))
        for k in range(3):
            for inward, outward in ends:
                inward.put(k)
                assert outward[0].take(5.0) == k + 1
        for inward, outward in ends:
            inward.put(7)
            assert outward.take_any(5.0) == (0, 8), "take_any waits in the crew that the lanes belong to"


@pytest.mark.parametrize("call", ["start", "channel", "lanes", "weights", "group", "join", "again"])
def test_a_crew_is_one_with_block(place: Any, call: str) -> None:
    calls = {
        "start": lambda crew: crew.start(print),
        "channel": lambda crew: crew.channel(),
        "lanes": lambda crew: crew.lanes(1),
        "weights": lambda crew: crew.weights({"w": torch.zeros(1)}),
        "group": lambda crew: crew.group(1),
        "join": lambda crew: crew.join(),
        "again": lambda crew: crew.__enter__(),
    }
    with place.crew() as crew:
        pass
    with pytest.raises(ConfigError):
        calls[call](crew)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda crew: crew.channel(capacity=0),
        lambda crew: crew.channel(start=-1),
        lambda crew: crew.channel(like=()),
        lambda crew: crew.channel(like="text"),
        lambda crew: crew.channel(like={"a": "text"}),
        lambda crew: crew.lanes(0),
        lambda crew: crew.lanes(2, start=[1]),
        lambda crew: crew.weights({}),
        lambda crew: crew.weights({"w": 1.0}),
        lambda crew: crew.weights({"w": torch.zeros(1)}, banks=0),
        lambda crew: crew.group(0),
        lambda crew: crew.group(2, like=torch.zeros(2, 2)),
        lambda crew: crew.group(2, like=torch.zeros(2, dtype=torch.int64)),
        lambda crew: crew.start(print, copies=0),
        lambda crew: crew.start(print, threads=0),
        lambda crew: crew.start(print, copies=2, device=["cpu"]),
        lambda crew: (crew.channel(name="x"), crew.channel(name="x")),
        lambda crew: (crew.lanes(2, name="x"), crew.group(2, name="x")),
        lambda crew: wait(),
    ],
)
def test_what_does_not_fit_is_a_config_error(within: Any, wrong: Any) -> None:
    with within.crew() as crew, pytest.raises(ConfigError):
        wrong(crew)


def test_more_roles_than_a_crew_holds(place: Any) -> None:
    def count() -> None:
        pass

    with place.crew() as crew:
        with pytest.raises(ConfigError, match="256"):
            crew.start(count, copies=300)
        assert crew.members == ()
        crew.start(count, name="fewer")
        crew.join(timeout=5.0)


# Shipping


def test_callables_of_every_kind(everywhere: Any, ask: Any) -> None:
    class Triple:
        def __call__(self, number: int) -> int:
            return 3 * number

    captured = {"a": [1, 2, 3]}

    def program(crew: Any) -> Any:
        def closure(number: int) -> int:
            return number + sum(captured["a"])

        def recursive(number: int) -> int:
            return 1 if number == 0 else number * recursive(number - 1)

        return [
            *ask(crew, lambda number: number + 1, 1, name="lambda"),
            *ask(crew, closure, 1, name="closure"),
            *ask(crew, recursive, 5, name="recursive"),
            *ask(crew, functools.partial(closure, 10), name="partial"),
            *ask(crew, functools.partial(lambda *, number: number, number=11), name="partial of a lambda"),
            *ask(crew, Triple(), 5, name="local class"),
            *ask(crew, Doubling(), 6, name="class with a lambda attribute"),
            *ask(crew, Doubling().method, 6, name="bound method"),
            *ask(crew, of_this_module, 1, name="of a test module"),
            *ask(crew, max, [1, 9, 3], name="builtin"),
        ]

    assert everywhere(program) == [2, 7, 120, 16, 11, 15, 12, 13, 1101, 9]


def test_a_local_struct_class_travels_in_both_directions(place: Any) -> None:
    class Pair(Struct):
        left: Tensor = axes("N")
        right: Tensor = axes("N", torch.int64)

        def total(self) -> float:
            return float(self.left.sum() + self.right.sum())

    def double(inward: Any, outward: Any) -> None:
        pair = inward.take()
        assert isinstance(pair, Pair)
        outward.put(pair.map(lambda leaf: leaf * 2))

    like = Pair(left=torch.ones(3), right=torch.ones(3, dtype=torch.int64))
    with place.crew() as crew:
        inward, outward = crew.channel(like=like), crew.channel(like=like)
        crew.start(double, inward, outward)
        inward.put(like)
        taken = outward.take(10.0)
        assert type(taken) is Pair
        assert taken.total() == 12.0


def test_arguments_are_copied_for_every_copy(place: Any) -> None:
    class Box:
        numbers: list[int]

    def spoil(lanes: Any, numbers: list[int], table: dict[str, Any], tensor: Tensor, box: Any, array: Any) -> None:
        before = (list(numbers), dict(table), tensor.tolist(), box.numbers, array.tolist())
        numbers.append(role().rank)
        table["rank"] = role().rank
        tensor += 1
        box.numbers = [*box.numbers, 9]
        array += 1
        role().sleep(0.05)
        after = (list(numbers), dict(table), tensor.tolist(), box.numbers, array.tolist())
        lanes[role().rank].put((before, after))

    box = Box()
    box.numbers = [1]
    arguments = [1, 2], {"a": 1}, torch.zeros(2), box, np.zeros(2)
    with place.crew() as crew:
        lanes = crew.lanes(3)
        crew.start(spoil, lanes, *arguments, copies=3)
        for rank, (before, after) in enumerate(lanes.take_each(10.0)):
            assert before == ([1, 2], {"a": 1}, [0.0, 0.0], [1], [0.0, 0.0])
            assert after == ([1, 2, rank], {"a": 1, "rank": rank}, [1.0, 1.0], [1, 9], [1.0, 1.0])
    assert (arguments[0], arguments[1], box.numbers) == ([1, 2], {"a": 1}, [1])
    assert torch.equal(arguments[2], torch.zeros(2))
    assert not arguments[4].any()


def test_closures_are_copied_too(place: Any, ask: Any) -> None:
    numbers = [1]

    def spoil() -> list[int]:
        numbers.append(role().rank)
        return list(numbers)

    with place.crew() as crew:
        assert ask(crew, spoil, copies=2) == [[1, 0], [1, 1]]
    assert numbers == [1]


def test_what_was_shipped_is_what_there_was_at_the_start(place: Any, ask: Any) -> None:
    numbers = [1]

    def read(gate: Any, lanes: Any, numbers: list[int]) -> None:
        gate.take()
        lanes[0].put(list(numbers))

    with place.crew() as crew:
        gate, lanes = crew.channel(), crew.lanes(1)
        crew.start(read, gate, lanes, numbers)
        numbers.append(2)
        gate.put(True)
        assert lanes.take_each(10.0) == [[1]]


def test_modules_and_generators_are_arguments(everywhere: Any, ask: Any) -> None:
    def forward(net: Any, generator: torch.Generator) -> list[float]:
        with torch.no_grad():
            return net(torch.randn(1, 3, generator=generator)).flatten().tolist()

    def program(crew: Any) -> Any:
        net = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(net.weight, 0.3)
        torch.nn.init.constant_(net.bias, 0.1)
        return ask(crew, forward, net, torch.Generator().manual_seed(3), copies=2)

    first, second = everywhere(program)
    assert first == second


def lock_in_a_closure() -> Any:
    guard = threading.Lock()

    def count() -> None:
        with guard:
            pass

    return count, (), "guard"


def file_in_an_attribute() -> Any:
    class Log:
        def __init__(self) -> None:
            self.file = open(Path(__file__))  # noqa: SIM115 closed by the test

    return (lambda log: None), (Log(),), "file"


def generator_in_a_list_in_a_dict() -> Any:
    return (lambda table: None), ({"fine": 1, "deep": [0, (k for k in range(3))]},), "['deep'][1]"


def lock_in_a_partial() -> Any:
    return functools.partial(print, [threading.Lock()]), (), ".args[0][0]"


def lock_of_a_bound_method() -> Any:
    class Counter:
        def __init__(self) -> None:
            self.inner = {"lock": threading.Lock()}

        def count(self) -> None:
            pass

    return Counter().count, (), "['lock']"


def file_for_writing_in_an_attribute() -> Any:
    class Log:
        def __init__(self) -> None:
            self.file = open(os.devnull, "w")  # noqa: SIM115 closed by the test

    return (lambda log: None), (Log(),), "file"


def lock_in_a_default() -> Any:
    def count(lock: Any = threading.Lock()) -> None:  # noqa: B008
        pass

    return count, (), "lock"


@pytest.mark.parametrize(
    "make",
    [
        lock_in_a_closure, file_in_an_attribute, generator_in_a_list_in_a_dict, lock_in_a_partial,
        lock_of_a_bound_method, file_for_writing_in_an_attribute, lock_in_a_default,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_what_cannot_be_shipped_is_named_before_anything_starts(place: Any, make: Any, request: Any) -> None:
    function, arguments, path = make()
    if hasattr(arguments[:1] and arguments[0], "file"):
        request.addfinalizer(arguments[0].file.close)
    with place.crew() as crew:
        began = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            crew.start(function, *arguments, name="counter", copies=2)
        assert time.monotonic() - began < 5.0
        assert crew.members == ()
        assert [a.name for a in crew.timeline().activities if a.kind == "role"] == ["driver[0]"]
        crew.join()
    message = str(caught.value)
    assert path in message
    assert ("counter" if not arguments else "argument 0") in message


def test_a_recursive_unpicklable_argument_is_named(within: Any) -> None:
    table: dict[str, Any] = {"lock": threading.Lock()}
    table["self"] = table
    with within.crew() as crew, pytest.raises(ConfigError, match=r"argument 0\['lock'\]"):
        crew.start(print, table)


def test_a_large_argument(place: Any, ask: Any) -> None:
    def total(tensor: Tensor) -> float:
        return float(tensor.sum())

    with place.crew() as crew:
        assert ask(crew, total, torch.ones(4_000_000), copies=2) == [4e6, 4e6]


def test_handles_nested_in_arguments(place: Any) -> None:
    def relay(table: dict[str, Any]) -> None:
        channels, box = table["channels"], table["box"]
        channels[1].put(channels[0].take() + 1)
        box.channel.put("done")

    class Box:
        pass

    with place.crew() as crew:
        box = Box()
        box.channel = crew.channel(name="boxed")  # type: ignore[attr-defined]
        channels = [crew.channel(name="in"), crew.channel(name="out")]
        crew.start(relay, {"channels": channels, "box": box})
        channels[0].put(4)
        assert channels[1].take(10.0) == 5
        assert box.channel.take(10.0) == "done"  # type: ignore[attr-defined]
        with pytest.raises(Closed):
            channels[1].take(10.0)


def test_placements_are_values() -> None:
    assert Inline() == Inline()
    assert Threads(poison=True) != Threads()
    assert {Inline(): 1}[Inline()] == 1
    with pytest.raises(AttributeError):
        Inline().poison = True  # type: ignore[misc]


def test_a_class_of_the_driver_stays_as_it_is(place) -> None:
    """Where roles share the driver's process, a class that travels by value is not written over."""
    heard = []

    class Kind(enum.Enum):
        ONE = 1

    class Told:
        kind = Kind.ONE

        def tell(self) -> None:
            heard.append(self.kind)

    def work(told, out) -> None:
        told.tell()
        out.put((type(told).__name__, told.kind.value))

    function = Told.tell
    with place.crew() as crew:
        out = crew.channel()
        crew.start(work, Told(), out)
        assert out.take() == ("Told", 1)
    assert Told.tell is function
    before = len(heard)
    Told().tell()
    assert heard[before:] == [Kind.ONE]
