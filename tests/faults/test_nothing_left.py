"""Nothing of a crew outlives it, or its driver: no process, no temporary file, nothing in /dev/shm."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
import pytest

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


def complaints_of(drivers: Any, batch: list[Fault], seed: int) -> list[str]:
    """Play these faults, each on a driver of its own; the drivers load at the same time. Return what was wrong."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    actors = [(fault, drivers.file()) for fault in batch]
    played = [(fault, go, drivers.forked("crowd.py", fault.mode, go)) for fault, go in actors]
    complaints = []
    for fault, go, driver in played:
        driver.says("running" if fault.mode != "loading" else "loading")
        driver.look()
        others = {
            "": list,
            "keeper": driver.keepers,
            "nursery": lambda driver=driver: [driver.nursery()],
            "roles": driver.roles,
        }[fault.also]()
        go.touch()
        delay = rng.uniform(0, fault.longest)
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
        if driver.code not in CODES[fault.signal]:
            complaints.append(f"{what}: exit code {driver.code}\n{driver.text()}")
        if left:
            complaints.append(f"{what}: left\n    " + "\n    ".join(left))
        driver.close()
    return complaints


def seed() -> int:
    return random.SystemRandom().randrange(10**6)


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


@pytest.mark.timeout(60)
def test_HC_10_signals_while_loading_leave_nothing(drivers):
    batch = [Fault("loading", INT, group=True, longest=1.0), Fault("loading", KILL, longest=1.0)]
    complaints = complaints_of(drivers, batch, seed())
    assert not complaints, "\n".join(complaints)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("also", ["keeper", "nursery", "roles"])
def test_a_driver_killed_together_with_another_process_leaves_nothing(drivers, also):
    complaints = complaints_of(drivers, [Fault("running", KILL, also=also)], seed())
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mode", "longest"), [("loading", 2.0), ("running", 0.5), ("leaving", 3.3)])
def test_HC_10_every_signal_leaves_nothing(drivers, mode, longest):
    batch = faults(mode, longest)
    complaints = complaints_of(drivers, batch[:5], seed()) + complaints_of(drivers, batch[5:], seed())
    assert not complaints, "\n".join(complaints)


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


@pytest.mark.timeout(60)
def test_success_and_failure_leave_nothing_while_the_driver_lives_on(drivers):
    go = drivers.file()
    leaving, failing = drivers.forked("crowd.py", "leaving", go), drivers.forked("crowd.py", "failing", go)
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
    driver = drivers.forked("crowd.py", "running", go)
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["exit", "unwind"])
def test_a_forked_child_of_the_driver_harms_nothing(drivers, how):
    driver = drivers.forked("forks.py", how)
    assert driver.says("after") == "ok"
    assert driver.says("left") == "ok"
    driver.says("child")
    driver.look()
    roles = driver.roles()
    assert len(roles) == 1
    driver.send(KILL)  # the child lives on, with everything that it has inherited
    deadline = time.monotonic() + 10
    while any(role.is_running() and role.status() != psutil.STATUS_ZOMBIE for role in roles):
        assert time.monotonic() < deadline, "the roles live as long as the driver's forked child"
        time.sleep(0.01)
    (child,) = (p for p in driver.look() if p.pid != driver.pid)
    child.kill()
    assert not driver.left()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("inner", ["Inline", "Processes"])
def test_nested_crews_work_and_leave_nothing(drivers, inner):
    finished, killed = drivers.forked("nested.py", inner, "finish"), drivers.forked("nested.py", inner, "wait")
    assert finished.says("sum") == "3"
    assert finished.ends() == 0, finished.text()
    assert not finished.left()
    assert killed.says("sum") == "3"
    assert len(killed.look()) >= {"Inline": 4, "Processes": 7}[inner]
    killed.send(KILL)
    killed.ends()
    assert not killed.left()


@pytest.mark.timeout(60)
def test_views_kept_after_the_crew_do_not_crash(drivers):
    driver = drivers.forked("views.py")
    assert driver.says("sum") == "262144.0"
    assert driver.says("descriptors") == "same"
    assert driver.ends() == 0, driver.text()
    assert not driver.left()
