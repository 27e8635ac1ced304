"""However a driver is written and started: its main module is imported once, and what it defines travels."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import ConfigError, Processes, Struct, axes, role

# Blank lines end blocks at an interactive prompt, so that there is one after each block and none inside.
SCRIPT = """
with open({counter!r}, "a") as counter:
    counter.write("x")

import functools
import psutil
import torch
from torch import Tensor
from headrace import Processes, Struct, axes, role
class Step(Struct):
    x: Tensor = axes("B ...")
    y: Tensor = axes("B")

class Adder:
    def __init__(self, much):
        self.much = much
        self.function = lambda x: x + much
    def __call__(self, lane, step):
        lane.put(Step(x=self.function(step.x), y=step.y))

def closure(much):
    def role_of_mine(lane, step):
        lane.put(Step(x=step.x + much, y=step.y * THREE))
    return role_of_mine

def plain(much, lane, step):
    assert role().name == "partial"
    lane.put(Step(x=step.x + much, y=step.y))

THREE = 3
step = Step(x=torch.zeros(2, 3), y=torch.ones(2))
total = 0
with Processes().crew(seed=1) as crew:
    lanes = crew.lanes(4, like=step)
    crew.start(Adder(1), lanes[0], step, name="object")
    crew.start(closure(10), lanes[1], step)
    crew.start(functools.partial(plain, 100), lanes[2], step, name="partial")
    crew.start(lambda lane: lane.put(Step(x=step.x + 1000, y=step.y)), lanes[3], name="lambda")
    total = sum(int(item.x.sum()) + int(item.y.sum()) for item in lanes.take_each())
    values = crew.channel(name="values")
    crew.start(lambda lane: lane.put(Adder(7).much), values, name="value")
    total += values.take()
    processes = len(psutil.Process().children(recursive=True))

assert processes <= 5 + 2
print("total", total, flush=True)
"""
TOTAL = 6 * 1111 + 2 * 6 + 7


def module_of(script: str) -> str:
    """The script as a test file: its definitions at the top, its crew in a test."""
    head, tail = script.split("step = Step(")
    body = ("step = Step(" + tail).replace("\n", "\n    ")
    return f"{head}\ndef test_it():\n    {body}\n    assert total == {TOTAL}\n"


def commands(folder: Any, counter: str) -> dict[str, tuple[list[object], str]]:
    """The command line and the standard input of each way to start."""
    script = SCRIPT.format(counter=counter)
    file, test = folder / "unguarded.py", folder / "test_of_mine.py"
    file.write_text(script)
    test.write_text(module_of(script))
    (folder / "empty.ini").write_text("[pytest]\n")
    python = sys.executable
    pytest_ = [python, "-m", "pytest", "-q", "-c", folder / "empty.ini", "--rootdir", folder, test]
    return {
        "script": ([python, file], ""),
        "command": ([python, "-c", script], ""),
        "stdin": ([python, "-"], script),
        "prompt": ([python, "-i"], script),
        "importlib": ([*pytest_, "--import-mode=importlib"], ""),
        "prepend": ([*pytest_, "--import-mode=prepend"], ""),
    }


def ways_work(drivers: Any, ways: Sequence[str]) -> None:
    """Start a driver in each of these ways, all at once: each spends its time importing torch. Check each."""
    started = []
    for way in ways:
        folder = drivers.file()
        folder.mkdir()
        command, stdin = commands(folder, str(folder / "counter"))[way]
        # From another folder, so that nobody can import the test file by its name, unless pytest prepends its folder.
        started.append((way, folder, drivers.fresh(*command, stdin=stdin, folder=drivers.folder)))
    for way, folder, driver in started:
        assert driver.ends(60) == 0, f"{way}: {driver.text()}"
        assert "Error" not in driver.text(), f"{way}: {driver.text()}"
        if "import-mode" not in " ".join(map(str, commands(folder, "")[way][0])):
            assert f"total {TOTAL}\n" in driver.text(), f"{way}: {driver.text()}"
        if way != "prepend":
            assert (folder / "counter").read_text() == "x", f"{way}: the main module was imported again"
        assert not driver.left(), way


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_HC_08_unguarded_scripts_work(drivers):
    ways_work(drivers, ["script", "stdin"])


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_HC_08_every_other_way_to_start_a_driver_works(drivers):
    ways_work(drivers, ["command", "prompt", "importlib", "prepend"])


# -- what travels, with this test module loaded by pytest's importlib mode


class Step(Struct):
    x: Tensor = axes("B")


class Holder:
    def __init__(self, thing: Any) -> None:
        self.inner = {"deep": [1, thing]}

    def __call__(self, lane: Any) -> None:
        lane.put(("called", role().name))


class WithLambda:
    def __init__(self) -> None:
        self.function = lambda x: x + 1

    def __call__(self, lane: Any) -> None:
        lane.put(self.function(41))


def captured(number: int) -> Callable[..., None]:
    def function(lane: Any) -> None:
        lane.put(number)

    return function


def add(number: int, lane: Any) -> None:
    lane.put(number)


@pytest.mark.timeout(60)
def test_HC_08_lambdas_closures_partials_and_objects_with_lambdas_travel():
    factories: list[Callable[..., None]] = [
        lambda lane: lane.put(42),
        captured(42),
        functools.partial(add, 42),
        WithLambda(),
    ]
    with Processes().crew(seed=1) as crew:
        lanes = crew.lanes(len(factories))
        for rank, factory in enumerate(factories):
            crew.start(factory, lanes[rank], name=f"role{rank}")
        assert lanes.take_each() == [42] * 4
        steps = crew.channel(like=Step(x=torch.zeros(3)), name="steps")
        crew.start(lambda lane, step: lane.put(Step(x=step.x + 1)), steps, Step(x=torch.ones(3)), name="steps")
        assert steps.take().x.tolist() == [2.0] * 3


def unshippable(tmp_path: Any) -> dict[str, Any]:
    (tmp_path / "file").write_text("text")
    return {
        "lock": threading.Lock(),
        "written": (tmp_path / "written").open("w"),
        "bytes": (tmp_path / "file").open("rb"),
        "text": (tmp_path / "file").open(),
        "generator": (x for x in ()),
    }


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["lock", "written", "bytes", "text", "generator"])
def test_HC_08_what_cannot_travel_is_named_with_its_path(tmp_path, kind, ran):
    things = unshippable(tmp_path)
    thing = things[kind]
    try:
        with Processes().crew(seed=1) as crew:
            lane = crew.channel()
            ways: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
                (Holder(thing), (lane,), r"mine\.inner\['deep'\]\[1\]"),
                (add, (Holder(thing), lane), r"argument 0\.inner\['deep'\]\[1\]"),
                (lambda lane: lane.put(str(thing)), (lane,), r"mine\.<closure thing>"),
                (functools.partial(add, thing), (lane,), r"mine\.args\[0\]"),
            ]
            for function, args, path in ways:
                began = time.monotonic()
                with pytest.raises(ConfigError, match=path) as caught:
                    crew.start(function, *args, name="mine")
                assert time.monotonic() - began < 5
                assert type(thing).__name__ in str(caught.value)
            assert crew.members == ()
            assert not ran()
            crew.start(add, 1, lane, name="mine")  # the name is free, and the crew goes on
            assert lane.take() == 1
    finally:
        for other in things.values():
            if hasattr(other, "close"):
                other.close()
