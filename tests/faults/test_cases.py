"""Faults that others have reported of their libraries, by their id in tests/cases.jsonl in the names of tests."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from headrace import Closed, Processes, role

FOLDER = Path(__file__).parent
TOY = FOLDER.parents[1] / "examples" / "01_take_put.py"


# -- HC-17: few cores

BOUND = 5


@pytest.fixture
def stress() -> Iterator[Any]:
    """A function that starts processes which do nothing but compute, on these cores, until the test ends."""
    started = []

    def begin(count: int, cpus: set[int]) -> None:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            os.sched_setaffinity(process.pid, cpus)
            started.append(process)

    yield begin
    for process in started:
        process.kill()
        process.wait()


def times(drivers: Any, repetitions: int, cpu: int = -1) -> list[float]:
    driver = drivers.forked("toy.py", TOY, repetitions, cpu)
    found = [float(driver.says(f"seconds-{repetition}")) for repetition in range(repetitions)]
    assert driver.ends(60) == 0, driver.text()
    assert not driver.left()
    policies = {line for line in driver.text().splitlines() if line.startswith("policy")}
    assert len({line.split()[1] for line in policies}) == 1
    return found


def pinned_within_5_times(drivers: Any, repetitions: int) -> None:
    cpu = min(os.sched_getaffinity(0))
    normal, pinned = times(drivers, repetitions), times(drivers, repetitions, cpu)
    print(f"normal {normal}, pinned {pinned}")
    assert max(pinned) < BOUND * statistics.median(normal)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_HC_17_four_actors_on_one_core_20_times(drivers):
    pinned_within_5_times(drivers, 20)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_HC_17_four_actors_under_stress(drivers, stress):
    cpus = os.sched_getaffinity(0)
    normal = statistics.median(times(drivers, 5))
    stress(len(cpus), cpus)  # each core has to do something else, too
    stressed = times(drivers, 5)
    print(f"normal {normal}, stressed {stressed}")
    # Beside others, whose turn it is is the scheduler's choice: such a bound has threefold slack.
    assert max(stressed) < 3 * BOUND * normal
    pinned = times(drivers, 5, min(cpus))
    print(f"pinned {pinned}")
    assert max(pinned) < 3 * BOUND * normal  # half of that core is the stress's


# -- HC-18: threads before the start


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_HC_18_threads_that_hold_a_lock_before_the_start(drivers):
    driver = drivers.forked("threaded.py")
    for rank, threads in enumerate([1, 2, 2, 4]):
        assert driver.says(f"role{rank}") == f"{500.0**3} {threads} False 1"
    driver.says("done")
    assert driver.ends() == 0, driver.text()
    assert not driver.left()


def test_HC_18_there_is_no_start_method_to_get_wrong():
    with pytest.raises(TypeError, match="start_method"):
        Processes(start_method="fork")


# -- MG-06: a slow reader

MIB = 1 << 18  # floats
LIKE = (0, torch.zeros(MIB))


def write(lanes: Any, items: int) -> None:
    rank = role().rank
    data = torch.empty(MIB)
    for number in range(items):
        lanes[rank].put((number, data.fill_(number)))


def read(lanes: Any, out: Any, seconds: float) -> None:
    expected = [0] * len(lanes)
    try:
        while True:
            rank, (number, data) = lanes.take_any()
            assert number == expected[rank], f"lane {rank}: item {number} came where {expected[rank]} was due"
            assert data[0] == data[-1] == number
            expected[rank] += 1
            role().sleep(seconds)
    except Closed:
        out.put(expected)


def memory_of(pids: list[int]) -> tuple[int, int]:
    """Bytes of the crew's memory file that these processes hold together, and of memory of their own.

    Of their own is what they have allocated (RssAnon): it does not move when a page that was shared since a fork is
    copied, or when somebody else lets go of a library.
    """
    shared = own = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if "-" in line.split(" ")[0]:
                of_crew = "/memfd:headrace" in line
            elif line.startswith("Pss:") and of_crew:
                shared += int(line.split()[1]) * 1024
        (anonymous,) = re.findall(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        own += int(anonymous) * 1024
    return shared, own


def slow_reader(items: int, seconds: float, stopped: float) -> None:
    capacity, copies = 1, 8
    with Processes().crew(seed=1) as crew:
        before = os.fstat(crew.memory.descriptor).st_blocks * 512
        lanes, out = crew.lanes(copies, capacity=capacity, like=LIKE, name="lanes"), crew.channel(name="out")
        bound = copies * (capacity + 1) * MIB * 4
        (reader,) = crew.start(read, lanes, out, seconds)
        writers = crew.start(write, lanes, items, copies=copies)
        pids = [os.getpid(), reader.pid, *(writer.pid for writer in writers)]

        def watch(seconds: float) -> float:
            """Look at the lanes for so long; return how many items a second were taken."""
            began, first = time.monotonic(), sum(lane.taken for lane in lanes)
            while time.monotonic() - began < seconds:
                flying = [lane.delivered - lane.taken for lane in lanes]  # what is taken in between lowers it
                assert max(flying) <= capacity
                time.sleep(0.002)
            return (sum(lane.taken for lane in lanes) - first) / (time.monotonic() - began)

        while min(lane.taken for lane in lanes) < 3:  # every writer is up and warm: what it grows by now is data
            time.sleep(0.01)
        _, own = memory_of(pids)
        rate = watch(0.5)
        os.kill(reader.pid, signal.SIGSTOP)
        try:
            time.sleep(0.2)
            assert watch(stopped) == 0
            assert [lane.delivered - lane.taken for lane in lanes] == [capacity] * copies  # full, and no further
            shared, own_later = memory_of(pids)
            assert os.fstat(crew.memory.descriptor).st_blocks * 512 - before <= 1.1 * bound
            assert shared <= 1.1 * bound + before
            print(f"own memory: {own:,} bytes, then {own_later - own:,} more")
            assert own_later - own < 0.1 * bound
            busy = psutil.Process(writers[0].pid).cpu_times()
            time.sleep(0.5)
            later = psutil.Process(writers[0].pid).cpu_times()
            assert later.user + later.system - busy.user - busy.system < 0.1  # it waits, it does not spin
        finally:
            os.kill(reader.pid, signal.SIGCONT)
        deadline = time.monotonic() + 10
        while (again := watch(0.3)) < 0.5 * rate:
            assert time.monotonic() < deadline, f"{rate:.0f} items/s before, {again:.0f} after"
        assert out.take() == [items] * copies
        activities = {activity.name: activity for activity in crew.timeline().activities}
        assert sum(activities[f"lanes[{rank}]"].items for rank in range(copies)) == copies * items
        assert all(activities[f"write[{rank}]"].blocked > stopped for rank in range(copies))
        assert os.fstat(crew.memory.descriptor).st_blocks * 512 - before <= 1.1 * bound


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_MG_06_a_very_slow_reader_blocks_its_writers():
    slow_reader(items=10, seconds=0.1, stopped=5.0)
