"""A role that hangs in a beat is named, with what it was doing, and ended where that can be; a slow one is let be."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from headrace import ConfigError, Inline, Processes, RoleFailed, Stalled, Threads, role

pytestmark = pytest.mark.timeout(60)

SOON = 4.0
"""Seconds beyond its limit in which a hang has to surface: some tenths, and many more for a busy machine."""
NEVER = 30.0
"""Seconds that a role hangs if nobody ends it."""


@pytest.fixture
def stuck(shared: Any) -> Iterator[Callable[[], None]]:
    """stuck() does not return: in a process until that is killed, in a thread until the test is over."""
    shared.go, before, never = threading.Event(), set(threading.enumerate()), NEVER

    def stuck() -> None:
        import sys

        here = sys.modules.get("headrace_test_shared")
        (here.go.wait if here else time.sleep)(never)

    yield stuck
    shared.go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
        assert not thread.is_alive(), "what was left behind ends at its next wait, once it gets there"


def test_a_role_that_hangs_is_named_with_what_it_does(place: Any, stuck: Any) -> None:
    def count(stuck: Callable[[], None], lanes: Any) -> None:
        beat = role().watch("adding {} to counter {}", within=0.3, advice="wait longer")
        for k in range(3):
            beat(k, 10 * role().rank)
            if (role().rank, k) == (1, 2):
                stuck()
            lanes[role().rank].put(k)
        beat.idle()
        role().sleep(1.0)

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        lanes = crew.lanes(3, capacity=4)
        began = time.monotonic()
        members = crew.start(count, stuck, lanes, copies=3)
        crew.join()
    assert 0.3 < time.monotonic() - began < 0.3 + SOON
    error = caught.value
    assert (error.role, error.rank, error.incarnation, error.signal) == ("count", 1, 0, None)
    assert "count[1] has been adding 2 to counter 10 for more than 0.3 s" in str(error)
    assert str(error).endswith("; wait longer")
    if isinstance(place, Processes):
        assert f"was killed (process {members[1].pid})" in str(error)
        assert not any(psutil.pid_exists(member.pid) for member in members)
    else:
        assert "is left behind" in str(error)


def test_a_slow_role_is_let_be(place: Any) -> None:
    def count(done: Any) -> None:
        beat = role().watch("counting to {}", within=0.4)
        for k in range(5):
            beat(k)
            time.sleep(0.1)
        done.put(k)

    with place.crew() as crew:
        done = crew.channel()
        crew.start(count, done)
        assert done.take() == 4


@pytest.mark.slow
def test_who_waits_or_is_idle_does_not_hang(place: Any) -> None:
    def wait_long(go: Any, lane: Any, done: Any) -> None:
        beat = role().watch("counting to {}", within=0.15)
        beat(1)
        go.put(True)
        assert lane.take() == 7
        time.sleep(0.3)  # the wait has ended the beat
        beat(2)
        beat.idle()
        time.sleep(0.4)
        done.put(True)

    def work_long(go: Any, lane: Any) -> None:
        go.take()
        role().watch("putting {}", within=0.15)  # and no beat
        time.sleep(0.5)
        lane.put(7)

    with place.crew() as crew:
        go, lane, done = crew.channel(), crew.channel(), crew.channel()
        crew.start(wait_long, go, lane, done)
        crew.start(work_long, go, lane)
        assert done.take()


@pytest.mark.slow
def test_without_a_limit_nobody_is_late(place: Any) -> None:
    def count(done: Any) -> None:
        role().watch("counting to {}", within=0.1)
        role().watch("counting from {}")(1)  # replaces the first
        time.sleep(0.35)
        done.put(True)

    with place.crew() as crew:
        done = crew.channel()
        crew.start(count, done)
        assert done.take()


def test_a_failure_repeats_the_last_beat(place: Any) -> None:
    def count() -> None:
        role().heartbeat("on lap 4")
        beat = role().watch("adding {} to counter {}", within=20.0)
        beat(1, -7)
        beat(2, 2**63 - 1)
        beat.idle()
        raise ArithmeticError("now")

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(count)
        crew.join()
    assert str(caught.value).endswith(f"Last heard: on lap 4; adding 2 to counter {2**63 - 1}")


def test_before_its_first_beat_a_role_has_none(place: Any) -> None:
    def count() -> None:
        role().watch("adding {} to counter {}", within=20.0)(1, 2)
        role().watch("taking {} from counter {}", within=20.0)
        raise ArithmeticError("now")

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(count)
        crew.join()
    assert "Last heard" not in str(caught.value)


def test_the_last_beat_survives_a_kill() -> None:
    def count() -> None:
        role().watch("adding {} to counter {}")(3, 4)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RoleFailed, match=r"SIGKILL.*Last heard: adding 3 to counter 4"), Processes().crew() as crew:
        crew.start(count)
        crew.join()


def test_a_thread_that_hangs_is_not_waited_for_when_the_crew_ends(within: Any, stuck: Any) -> None:
    def count(stuck: Callable[[], None]) -> None:
        role().watch("counting to {}", within=0.2)(9)
        stuck()

    began = time.monotonic()
    with pytest.raises(RoleFailed, match="counting to 9"), within.crew() as crew:
        crew.start(count, stuck)
    assert time.monotonic() - began < 0.2 + SOON


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["sleep", "lock", "ignore"])
def test_processes_end_whatever_hangs(hold: str) -> None:
    def count(hold: str, never: float) -> None:
        import ctypes

        role().watch("counting to {}", within=0.2)(1)
        if hold == "lock":
            ctypes.PyDLL(None).sleep(int(never))  # keeps the interpreter lock
        if hold == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(never)

    with pytest.raises(RoleFailed, match=r"count\[0\] has been counting to 1"), Processes().crew() as crew:
        (member,) = crew.start(count, hold, NEVER)
        began = time.monotonic()
        crew.join()
    assert time.monotonic() - began < 0.2 + SOON
    assert not psutil.pid_exists(member.pid)


@pytest.mark.slow
def test_processes_a_hang_surfaces_while_other_roles_keep_the_driver_busy() -> None:
    def count(lanes: Any) -> None:
        lane, beat = lanes[role().rank], role().watch("counting to {}", within=0.3)
        for k in lane.deliveries():
            beat(k)
            if (role().rank, k) == (1, 2):
                time.sleep(NEVER)
            lane.put(k)

    with pytest.raises(RoleFailed, match=r"count\[1\] has been counting to 2"), Processes().crew() as crew:
        lanes = crew.lanes(2, capacity=4, like=0)
        crew.start(count, lanes, copies=2)
        until = time.monotonic() + 0.3 + SOON
        while time.monotonic() < until:
            lanes.take_any(10.0)
            time.sleep(0.002)


@pytest.mark.slow
def test_processes_a_role_that_hung_can_be_restarted() -> None:
    def count(lane: Any) -> None:
        if role().incarnation == 1:
            time.sleep(0.3)  # the beat of the life before is over
        beat = role().watch("counting to {}", within=0.25)
        for k in lane.deliveries():
            beat(k)
            if (role().incarnation, k) == (0, 2):
                time.sleep(NEVER)
            if k == 4:
                return
            lane.put(k)

    with Processes().crew() as crew:
        lane = crew.channel(like=0)
        (member,) = crew.start(count, lane)
        assert [lane.take(10.0), lane.take(10.0)] == [0, 1]
        with pytest.raises(RoleFailed, match="counting to 2"):
            lane.take(10.0)
        crew.restart(member)
        assert [lane.take(10.0), lane.take(10.0)] == [2, 3]
        crew.join()
    assert not psutil.pid_exists(member.pid)


@pytest.mark.slow
def test_a_thread_that_hangs_cannot_be_restarted(within: Any, stuck: Any) -> None:
    def count(stuck: Callable[[], None]) -> None:
        role().watch("counting to {}", within=0.2)(1)
        stuck()

    def other() -> None:
        role().sleep(1000.0)

    with pytest.raises(RoleFailed, match="counting to 1"), within.crew() as crew:
        crew.start(other)
        (member,) = crew.start(count, stuck)
        with pytest.raises(RoleFailed):
            crew.join(member)
        with pytest.raises(ConfigError, match="still runs"):
            crew.restart(member)
        crew.join(member)


@pytest.mark.slow
def test_a_stopped_role_does_not_hang() -> None:
    """SIGSTOP has a limit of its own, and what a role was stopped for is not in its beat."""

    def count(ready: Any, done: Any) -> None:
        beat = role().watch("counting to {}", within=0.6)
        beat(1)
        ready.put(True)
        time.sleep(0.3)
        done.put(True)

    with Processes().crew() as crew:
        ready, done = crew.channel(), crew.channel()
        (member,) = crew.start(count, ready, done)
        ready.take(10.0)
        os.kill(member.pid, signal.SIGSTOP)
        with pytest.raises(Stalled):
            done.take(0.9)
        os.kill(member.pid, signal.SIGCONT)
        assert done.take(10.0)


@pytest.mark.slow
def test_a_role_that_is_stopped_in_a_beat_counts_as_stopped() -> None:
    def count(ready: Any) -> None:
        beat = role().watch("counting to {}", within=0.4)
        ready.put(True)
        beat(1)
        os.kill(os.getpid(), signal.SIGSTOP)

    with (
        pytest.raises(RoleFailed, match=r"has been stopped .*Last heard: counting to 1") as caught,
        Processes(stall_after=0.7).crew() as crew,
    ):
        ready = crew.channel()
        (member,) = crew.start(count, ready)
        ready.take(10.0)
        try:
            crew.join(timeout=10.0)
        finally:
            os.kill(member.pid, signal.SIGCONT)  # so that the crew's end need not wait for it
    assert caught.value.signal == signal.SIGSTOP


def test_inline_the_clock_of_the_roles_does_not_matter(stuck: Any) -> None:
    def count(stuck: Callable[[], None]) -> None:
        beat = role().watch("counting to {}", within=0.2)
        for k in range(3):
            beat(k)
            role().sleep(1000.0)
        beat(3)
        stuck()

    with pytest.raises(RoleFailed, match="counting to 3"), Inline().crew() as crew:
        crew.start(count, stuck)
        began = time.monotonic()
        crew.join()
    assert time.monotonic() - began < 0.2 + SOON


def test_threads_a_deaf_role_is_named_with_its_last_beat(stuck: Any) -> None:
    def deaf(stuck: Callable[[], None], ready: Any) -> None:
        role().watch("counting to {}")(5)
        ready.put(True)
        stuck()

    with pytest.raises(Stalled, match=r"deaf\[0\].*counting to 5"), Threads(stall_after=0.3).crew() as crew:
        ready = crew.channel()
        crew.start(deaf, stuck, ready)
        ready.take(10.0)


@pytest.mark.parametrize(
    ("doing", "options", "complaint"),
    [
        ("counting to {number}", {}, "number"),
        ("counting to {0}", {}, "marked by"),
        ("counting to {", {}, "mark each number"),
        ("{} " * 7, {}, "at most 6 numbers"),
        ("x" * 2000, {}, "2000 bytes"),
        ("counting", {"advice": "x" * 2000}, "2000 bytes"),
        ("counting", {"within": 0.0}, "above 0"),
        ("counting", {"within": -1.0}, "above 0"),
        ("counting", {"within": float("nan")}, "above 0"),
        ("counting", {"within": float("inf")}, "None for no limit"),
    ],
)
def test_what_watch_refuses(doing: str, options: dict[str, Any], complaint: str) -> None:
    with Inline().crew(), pytest.raises(ConfigError, match=complaint):
        role().watch(doing, **options)


@pytest.mark.parametrize("numbers", [(), (1,), (1, 2, 3), (1, "2"), (1, 2.5), (1, 2**63)])
def test_numbers_that_do_not_fit(numbers: tuple[Any, ...]) -> None:
    with Inline().crew():
        beat = role().watch("adding {} to counter {}")
        with pytest.raises(ConfigError, match=r"adding \{\} to counter \{\}"):
            beat(*numbers)
