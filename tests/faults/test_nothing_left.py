"""Nothing of a crew outlives it, or its driver: no process, no temporary file, nothing in /dev/shm."""

from __future__ import annotations

import functools
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

CROWD = Path(__file__).parent / "drivers" / "crowd.py"
INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
CODES = {INT: (-2, 130), TERM: (-15, 143), HUP: (-1, 129), KILL: (-9,)}


class Fault(NamedTuple):
    """A driver in this mode (drivers/crowd.py) gets the signal, and its group or another process with it."""

    mode: str
    signal: signal.Signals
    times: int = 1  # 0.2 s apart
    group: bool = False
    also: str = ""  # keeper, nursery or roles: killed at the same instant
    longest: float = 0.3  # the fault comes at a random time from the scene's beginning, of up to so many seconds

    def __str__(self) -> str:
        whom = "group" if self.group else "driver"
        return f"{self.signal.name} x{self.times} to the {whom}{self.also and ' and ' + self.also} while {self.mode}"


def faults(mode: str, longest: float) -> list[Fault]:
    kinds = [(INT, 1), (INT, 2), (TERM, 1), (HUP, 1), (KILL, 1)]
    return [Fault(mode, kind, times, group, "", longest) for group in (False, True) for kind, times in kinds]


def complaints_of(drivers: Any, batch: list[Fault], seed: int, fresh: bool = False) -> list[str]:
    """Play these faults, each on a driver of its own; the drivers load at the same time. Return what was wrong.

    fresh: each driver is an interpreter of its own, not a fork.
    """
    print(f"seed {seed}")
    rng = random.Random(seed)
    start = (
        functools.partial(drivers.fresh, sys.executable, CROWD) if fresh else functools.partial(drivers.forked, CROWD)
    )
    files = [drivers.file() for _ in batch]
    played = [(fault, go, start(fault.mode, go)) for fault, go in zip(batch, files, strict=True)]
    with ThreadPoolExecutor(len(batch)) as pool:
        found = [
            pool.submit(play, fault, go, driver, rng.uniform(0, fault.longest), seed) for fault, go, driver in played
        ]
        return [complaint for future in found for complaint in future.result()]


def play(fault: Fault, go: Path, driver: Any, delay: float, seed: int) -> list[str]:
    """Play one of them."""
    driver.says("loading" if fault.mode == "loading" else "running")
    driver.look()
    others = {
        "": list,
        "keeper": driver.keepers,
        "nursery": lambda: [driver.nursery()],
        "roles": driver.roles,
    }[fault.also]()
    go.touch()
    time.sleep(delay)
    driver.look()
    for process in others:
        with suppress(psutil.Error):
            process.kill()
    driver.send(fault.signal, fault.group)
    for _ in range(1, fault.times):
        time.sleep(0.2)
        driver.send(fault.signal, fault.group)
    began = time.monotonic()
    with suppress(pytest.fail.Exception):
        driver.ends()
    left = driver.left(max(1.0, 10.0 - (time.monotonic() - began)))
    what = f"{fault} at {delay:.3f} s (seed {seed})"
    complaints = []
    if driver.code not in CODES[fault.signal]:
        complaints.append(f"{what}: exit code {driver.code}\n{driver.text()}")
    if left:
        complaints.append(f"{what}: left\n    " + "\n    ".join(left))
    driver.close()
    return complaints


def seed() -> int:
    return random.SystemRandom().randrange(10**6)


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_HC_10_signals_leave_nothing(drivers):
    batch = [
        Fault("running", INT, 2, group=True),
        Fault("running", TERM),
        Fault("running", HUP, group=True),
        Fault("running", KILL),
        Fault("running", KILL, group=True),
        Fault("leaving", INT, longest=2.5),
    ]
    complaints = complaints_of(drivers, batch, seed())
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_HC_10_signals_while_loading_leave_nothing(drivers):
    batch = [Fault("loading", INT, group=True, longest=1.0), Fault("loading", KILL, longest=1.0)]
    complaints = complaints_of(drivers, batch, seed())
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_driver_killed_together_with_another_process_leaves_nothing(drivers):
    batch = [Fault("running", KILL, also=also) for also in ("keeper", "nursery", "roles")]
    complaints = complaints_of(drivers, batch, seed())
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mode", "longest"), [("loading", 2.0), ("running", 0.5), ("leaving", 3.3)])
def test_HC_10_every_signal_leaves_nothing(drivers, mode, longest):
    batch = faults(mode, longest)
    complaints = complaints_of(drivers, batch[:5], seed()) + complaints_of(drivers, batch[5:], seed())
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_HC_10_signals_to_an_interpreter_of_its_own_leave_nothing(drivers):
    batch = [
        Fault("running", INT, group=True),
        Fault("handled", TERM),
        Fault("handled", TERM, group=True),
        Fault("running", KILL, group=True),
        Fault("loading", INT),
    ]
    complaints = complaints_of(drivers, batch, seed(), fresh=True)
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["loading", "leaving"])
def test_HC_10_a_driver_that_catches_ctrl_c_can_go_on(drivers, when):
    driver = drivers.forked("interrupted.py", when)
    driver.says("now")
    time.sleep(0.3)
    driver.send(INT)
    driver.says("caught")
    assert driver.says("memory-files") == "0"
    assert driver.says("again") == "ok"
    assert driver.says("children") == "1"  # the nursery
    assert driver.ends() == 0, driver.text()
    assert not driver.left()


@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mode", ["loading", "running", "leaving"])
def test_HC_10_every_signal_at_20_random_times_leaves_nothing(drivers, mode):
    longest = {"loading": 2.0, "running": 0.5, "leaving": 3.3}[mode]
    complaints = []
    for _ in range(20):
        batch = faults(mode, longest)
        complaints += complaints_of(drivers, batch[:5], seed()) + complaints_of(drivers, batch[5:], seed())
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_success_and_failure_leave_nothing_while_the_driver_lives_on(drivers):
    go = drivers.file()
    leaving, failing = drivers.forked(CROWD, "leaving", go), drivers.forked(CROWD, "failing", go)
    for driver in (leaving, failing):
        driver.says("running")
        driver.look()
    go.touch()
    leaving.says("left")
    nursery = leaving.nursery()
    deadline = time.monotonic() + 1
    while (left := leaving.look() - {nursery, psutil.Process(leaving.pid)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert not list(leaving.temporary.iterdir())
    leaving.send(TERM)
    assert leaving.ends() in CODES[TERM]
    assert not leaving.left()

    assert failing.ends() == 1
    assert "ValueError: on purpose" in failing.text()
    assert "headrace.errors.RoleFailed: failing[0]" in failing.text()
    assert not failing.left()


@pytest.mark.timeout(60)
def test_a_killed_keeper_is_reported_and_leaves_nothing(drivers):
    go = drivers.file()
    driver = drivers.forked(CROWD, "running", go)
    driver.says("running")
    driver.look()
    (keeper,) = driver.keepers()
    go.touch()
    keeper.kill()
    assert driver.ends(5) == 1
    assert "keeper process is gone" in driver.text()
    assert "Bad file descriptor" not in driver.text()
    assert not driver.left()


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_a_killed_nursery_harms_no_crew(drivers):
    go = drivers.file()
    driver = drivers.forked("nursery.py", go)
    driver.says("first")
    driver.look()
    driver.nursery().kill()
    go.touch()
    assert driver.says("second") == "ok"
    assert driver.says("third") == "ok"
    assert driver.ends() == 0, driver.text()
    assert not driver.left()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [pytest.param("exit", marks=pytest.mark.slow), "unwind"])
def test_a_forked_child_of_the_driver_harms_nothing(drivers, how):
    driver = drivers.forked("forks.py", how)
    assert driver.says("after") == "ok"
    assert driver.says("left") == "ok"
    child = psutil.Process(int(driver.says("child")))
    driver.look()
    roles = driver.roles()
    assert len(roles) == 1
    driver.send(KILL)  # the child lives on, with everything that it has inherited
    deadline = time.monotonic() + 10
    while any(role.is_running() and role.status() != psutil.STATUS_ZOMBIE for role in roles):
        assert time.monotonic() < deadline, "the roles live as long as the driver's forked child"
        time.sleep(0.01)
    assert child.is_running()
    child.kill()
    assert not driver.left()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("inner", "processes"),  # driver, nursery, keeper, role; below it again a nursery, a keeper and a role
    [pytest.param("Inline", 4, marks=pytest.mark.slow), ("Processes", 7)],
)
def test_a_killed_driver_leaves_nothing_of_nested_crews(drivers, inner, processes):
    driver = drivers.forked("nested.py", inner, "wait")
    assert driver.says("sum") == "3"
    assert len(driver.look()) == processes
    driver.send(KILL)
    driver.ends()
    assert not driver.left()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("inner", ["Inline", "Processes"])
def test_nested_crews_end_and_leave_nothing(drivers, inner):
    driver = drivers.forked("nested.py", inner, "finish")
    assert driver.says("sum") == "3"
    assert driver.ends() == 0, driver.text()
    assert not driver.left()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_views_kept_after_the_crew_do_not_crash(drivers):
    driver = drivers.forked("views.py")
    assert driver.says("sum") == "262144.0"
    assert driver.says("descriptors") == "same"
    assert driver.ends() == 0, driver.text()
    assert not driver.left()
