"""Many crews in one driver cost no more than one: descriptors, threads, mappings, memory, time."""

from __future__ import annotations

import gc
import statistics
import threading
import time
import warnings
from contextlib import nullcontext
from typing import Any

import psutil
import pytest
import torch

from headrace import ConfigError, Processes, RoleFailed

SLOT = torch.zeros(1 << 18)  # 1 MiB


def fill(lane: Any) -> None:
    lane.put({"x": SLOT + 1})


def forward(lane: Any, numbers: Any) -> None:
    numbers.put((int(lane.take()["x"].sum()),))


def one_crew() -> None:
    with Processes().crew(seed=1) as crew:
        lanes, numbers = crew.lanes(1, like={"x": SLOT}), crew.channel(like=(0,), name="numbers")
        crew.start(fill, lanes[0])
        crew.start(forward, lanes[0], numbers)
        assert numbers.take() == (1 << 18,)


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def grows(crews: int, descriptors: Any) -> int:
    """Open and close so many crews; check what must not grow, and return by how many bytes memory did."""
    for _ in range(3):  # the nursery, and what libraries do once
        one_crew()
    gc.collect()
    me = psutil.Process()
    opened, threads, mapped, resident = descriptors(), threading.active_count(), mappings(), me.memory_info().rss
    tasks = me.num_threads()
    for _ in range(crews):
        one_crew()
    gc.collect()
    assert sorted(descriptors()) == sorted(opened)
    assert threading.active_count() == threads
    assert me.num_threads() == tasks
    assert mappings() - mapped <= 4 + crews // 50  # the allocator's own come and go
    (nursery,) = (child for child in me.children() if "place.keeper" in " ".join(child.cmdline()))
    deadline = time.monotonic() + 5
    while nursery.children() and time.monotonic() < deadline:  # keepers
        time.sleep(0.01)
    assert nursery.children() == []
    assert nursery.num_fds() < 20
    return me.memory_info().rss - resident


@pytest.mark.timeout(60)
def test_10_crews_leave_the_driver_as_it_was(descriptors):
    assert grows(10, descriptors) < 30e6


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_200_crews_leave_the_driver_as_it_was(descriptors):
    assert grows(200, descriptors) < 30e6


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["exception", "failure", "refusal", "unentered"])
def test_crews_that_go_wrong_leave_the_driver_as_it_was(descriptors, how):
    def refusal() -> None:
        with Processes().crew() as crew:
            crew.start(fill, threading.Lock())

    def exception() -> None:
        with Processes().crew() as crew:
            crew.start(lambda lane: lane.take(), crew.channel(), name="role")
            raise KeyError("on purpose")

    def failure() -> None:
        with Processes().crew() as crew:
            crew.start(lambda: 1 / 0, name="role")
            crew.join()

    def unentered() -> None:
        with warnings.catch_warnings(action="ignore"):
            Processes().crew()

    wrongs = {
        "refusal": (refusal, ConfigError),
        "exception": (exception, KeyError),
        "failure": (failure, RoleFailed),
        "unentered": (unentered, None),
    }

    def wrong() -> None:
        function, error = wrongs[how]
        with pytest.raises(error) if error else nullcontext():
            function()

    for _ in range(2):
        wrong()
    gc.collect()
    opened, mapped = descriptors(), mappings()
    for _ in range(5):
        wrong()
    gc.collect()
    assert sorted(descriptors()) == sorted(opened)
    assert mappings() - mapped <= 4


@pytest.mark.timeout(60)
def test_roles_start_in_tens_of_milliseconds_once_torch_is_loaded():
    one_crew()
    seconds = []
    for _ in range(5):
        with Processes().crew(seed=1) as crew:
            lane = crew.channel(like=(0,))
            began = time.monotonic()
            crew.start(lambda lane: lane.put((1,)), lane, name="quick")
            lane.take()
            seconds.append(time.monotonic() - began)
    print(f"start to first item: {[f'{s * 1e3:.0f} ms' for s in seconds]}")
    assert statistics.median(seconds) < 0.5
