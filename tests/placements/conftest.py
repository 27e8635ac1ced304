"""What the conformance suite shares: the placements, a Struct of counters, and roles that answer.

Roles are written inside the tests: a nested function travels by value on every placement, so that a role's process need
not import the test module (and pytest with it) first.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import Inline, Processes, Struct, Threads, axes, role

PLACES = {"inline": Inline(), "threads": Threads(), "processes": Processes()}
_numbers = itertools.count()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Any:
    """Every placement in turn: what holds with this fixture is a law."""
    return PLACES[request.param]


@pytest.fixture(params=["threads", "processes"])
def beside(request: pytest.FixtureRequest) -> Any:
    """The placements on which roles run beside each other and clocks are real."""
    return PLACES[request.param]


@pytest.fixture(params=["inline", "threads"])
def within(request: pytest.FixtureRequest) -> Any:
    """The placements on which roles share the driver's process."""
    return PLACES[request.param]


@pytest.fixture(params=PLACES)
def poisoned(request: pytest.FixtureRequest) -> Any:
    """Every placement, with what a take has given back overwritten."""
    return dataclasses.replace(PLACES[request.param], poison=True)


@pytest.fixture(scope="session")
def everywhere() -> Callable[[Callable[[Any], Any]], Any]:
    """Run program(crew) on all placements, insist that all give the same (no tolerance), and return it."""

    def run(program: Callable[[Any], Any], seed: int = 7) -> Any:
        given = {}
        for name, placement in PLACES.items():
            with placement.crew(seed=seed) as crew:
                given[name] = program(crew)
        assert given["threads"] == given["inline"]
        assert given["processes"] == given["inline"]
        return given["inline"]

    return run


@pytest.fixture(scope="session")
def ask() -> Callable[..., list[Any]]:
    """ask(crew, function, *args, copies=1): start it as a role; what each copy returned, in rank order."""

    def start(
        crew: Any, function: Callable[..., Any], *args: Any, copies: int = 1, timeout: float = 20.0, **options: Any
    ) -> list[Any]:
        lanes = crew.lanes(copies, name=f"answers-{next(_numbers)}")

        def answer(lanes: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
            lanes[role().rank].put(function(*args))

        options.setdefault("name", getattr(function, "__name__", "asked"))
        crew.start(answer, lanes, function, args, copies=copies, **options)
        return [lane.take(timeout) for lane in lanes]

    return start


@pytest.fixture(scope="session")
def Count() -> Any:
    """A Struct of counters. Its class is local to a function, so it travels by value."""

    class Count(Struct):
        number: Tensor = axes("N", torch.int64)
        share: Tensor = axes("N 3", torch.float32)

    return Count


@pytest.fixture(scope="session")
def count(Count: Any) -> Callable[..., Any]:
    """count(k): a Count whose every element says k."""

    def make(k: int = 0, rows: int = 4) -> Any:
        return Count(number=torch.full((rows,), k), share=torch.full((rows, 3), float(k)))

    return make


@pytest.fixture
def shared() -> Iterator[types.ModuleType]:
    """A module that roles find in sys.modules under the name "headrace_test_shared".

    What is shipped is copied, so on placements within one process this is how a test and its roles share an object.
    """
    module = types.ModuleType("headrace_test_shared")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """until(condition, seconds): look again and again, and fail after that many seconds of the wall clock."""

    def look(condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            role().sleep(0.01)  # lets other roles run, on Inline too

    return look
