"""A role's failure reaches the driver: the first one, soon, whatever the driver does, with all that is known of it."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from headrace import Closed, ConfigError, Inline, Processes, RoleFailed, ShapeError, Stalled, Threads, role, wait

pytestmark = pytest.mark.timeout(60)

SOON = 6.0
"""Seconds in which a failure has to surface: the law says 2, tripled for a busy machine."""


class Overflow(Exception):
    """An exception of this module, which role processes cannot import under pytest's importlib mode."""


def fail_in_module(number: int) -> None:
    raise Overflow(f"counted to {number}")


def test_the_failure_says_who_what_and_where(place: Any) -> None:
    class TooMany(Exception):
        pass

    def count_too_far() -> None:
        raise TooMany("eleven")

    def count() -> None:
        if role().rank == 1:
            count_too_far()
        role().sleep(30.0)

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(count, copies=2)
        crew.join()
    error = caught.value
    assert (error.role, error.rank, error.incarnation, error.signal) == ("count", 1, 0, None)
    assert "count[1]" in str(error)
    assert "TooMany: eleven" in str(error)
    assert "count_too_far" in error.traceback
    assert "TooMany: eleven" in error.traceback
    assert 'raise TooMany("eleven")' in error.traceback, "the line of source"
    assert type(error.__cause__) is TooMany, "the original type, not a copy of its class"
    assert error.__cause__.args == ("eleven",)


def test_the_type_is_kept_for_a_class_of_a_test_module(place: Any) -> None:
    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(fail_in_module, 3)
        crew.join()
    assert type(caught.value.__cause__) is Overflow
    assert "fail_in_module" in caught.value.traceback


def test_the_chain_of_causes_is_in_the_traceback(place: Any) -> None:
    def count() -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("outer") from error

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(count)
        crew.join()
    assert "KeyError: 'missing'" in caught.value.traceback
    assert type(caught.value.__cause__) is ValueError


def test_an_exception_that_does_not_pickle(place: Any) -> None:
    def count() -> None:
        class Holder(Exception):
            def __init__(self) -> None:
                super().__init__("holds a lock")
                self.lock = __import__("threading").Lock()

        raise Holder

    with pytest.raises(RoleFailed, match="holds a lock") as caught, place.crew() as crew:
        crew.start(count)
        crew.join()
    assert "Holder" in caught.value.traceback
    assert caught.value.__cause__ is not None


def test_an_exception_that_pickles_but_does_not_unpickle(place: Any) -> None:
    def count() -> None:
        class Picky(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__("picky")

        raise Picky(1, 2)

    with pytest.raises(RoleFailed, match="picky"), place.crew() as crew:
        crew.start(count)
        crew.join()


def test_a_very_long_message(place: Any) -> None:
    def count() -> None:
        raise ValueError("x" * 300_000)

    with pytest.raises(RoleFailed, match="ValueError: xxxx"), place.crew() as crew:
        crew.start(count)
        crew.join()


@pytest.mark.parametrize("code", [0, 3])
def test_system_exit(place: Any, code: int) -> None:
    def count(code: int) -> None:
        raise SystemExit(code)

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(count, code)
        crew.join()
    assert type(caught.value.__cause__) is SystemExit
    assert caught.value.__cause__.code == code
    if isinstance(place, Processes):
        assert caught.value.exit_code == code


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, BaseException])
def test_exceptions_that_are_no_Exception(place: Any, kind: type[BaseException]) -> None:
    def count(kind: type[BaseException]) -> None:
        raise kind("odd")

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(count, kind)
        crew.join()
    assert type(caught.value.__cause__) is kind


def in_take(crew: Any, tools: dict[str, Any]) -> None:
    tools["channel"].take()


def in_take_with_timeout(crew: Any, tools: dict[str, Any]) -> None:
    tools["channel"].take(timeout=20.0)


def in_put(crew: Any, tools: dict[str, Any]) -> None:
    tools["inward"].put(1)
    tools["inward"].put(2)


def in_pull(crew: Any, tools: dict[str, Any]) -> None:
    import torch

    tools["weights"].pull({"w": torch.zeros(2)}, version=5)


def in_wait(crew: Any, tools: dict[str, Any]) -> None:
    wait(tools["channel"].to_take, *tools["lanes"].to_take)


def in_take_any(crew: Any, tools: dict[str, Any]) -> None:
    tools["lanes"].take_any()


def in_take_each(crew: Any, tools: dict[str, Any]) -> None:
    tools["lanes"].take_each()


def in_join(crew: Any, tools: dict[str, Any]) -> None:
    crew.join()


def in_join_of_another(crew: Any, tools: dict[str, Any]) -> None:
    crew.join(tools["other"])


def in_sleep(crew: Any, tools: dict[str, Any]) -> None:
    role().sleep(20.0)


WHERE = [
    in_take, in_take_with_timeout, in_put, in_pull, in_wait, in_take_any, in_take_each, in_join, in_join_of_another,
    in_sleep,
]  # fmt: skip


@pytest.mark.parametrize("where", WHERE, ids=lambda f: f.__name__)
def test_it_is_raised_wherever_the_driver_is(place: Any, where: Callable[..., None]) -> None:
    import torch

    def count(channel: Any, inward: Any, lanes: Any, weights: Any) -> None:
        role().sleep(0.1)
        raise ArithmeticError("now")

    def other(channel: Any, inward: Any, lanes: Any, weights: Any) -> None:
        role().sleep(1000.0)

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        tools = {
            "channel": crew.channel(name="channel"), "inward": crew.channel(name="inward"), "lanes": crew.lanes(2),
            "weights": crew.weights({"w": torch.zeros(2)}),
        }  # fmt: skip
        ends = [tools[name] for name in ("channel", "inward", "lanes", "weights")]
        (tools["other"],) = crew.start(other, *ends)
        crew.start(count, *ends)
        began = time.monotonic()
        where(crew, tools)
    assert time.monotonic() - began < SOON
    assert type(caught.value.__cause__) is ArithmeticError
    assert caught.value.role == "count"


def test_a_driver_that_does_not_wait_hears_of_it_at_the_end(beside: Any, until: Any) -> None:
    def count() -> None:
        raise ArithmeticError("now")

    reached = False
    with pytest.raises(RoleFailed) as caught, beside.crew() as crew:
        crew.start(count)
        time.sleep(0.5)
        reached = True
    assert reached
    assert type(caught.value.__cause__) is ArithmeticError


def test_the_first_failure_is_the_one_that_is_raised(beside: Any) -> None:
    def count() -> None:
        role().sleep(0.05 + 0.2 * (2 - role().rank))
        raise ArithmeticError(f"rank {role().rank}")

    with pytest.raises(RoleFailed, match="rank 2"), beside.crew() as crew:
        crew.start(count, copies=3)
        time.sleep(0.8)
        crew.join()


def test_a_failure_that_comes_while_the_crew_stops_is_raised(place: Any) -> None:
    def count(channel: Any) -> None:
        try:
            channel.take()
        except Closed:
            raise ArithmeticError("in cleanup") from None

    with pytest.raises(RoleFailed, match="in cleanup"), place.crew() as crew:
        channel = crew.channel()
        crew.start(count, channel)
        role().sleep(0.2)


def test_closed_ends_a_role_as_it_should(place: Any) -> None:
    def count(channel: Any) -> None:
        raise Closed("enough")

    with place.crew() as crew:
        crew.start(count, crew.channel())
        crew.join(timeout=10.0)


def test_a_failed_role_does_not_close_its_ends_but_the_driver_hears_of_it(place: Any) -> None:
    """A peer of a failed role goes on waiting (the driver may restart it); when the driver gives up, it gets Closed."""

    def write(channel: Any) -> None:
        channel.put(1)
        raise ArithmeticError("after one")

    def read(channel: Any, told: Any) -> None:
        channel.take()
        try:
            channel.take()
        except Closed as error:
            told.put("Closed")
            raise ValueError("the crew stopped") from error

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        channel, told = crew.channel(), crew.channel()
        crew.start(read, channel, told)
        crew.start(write, channel)
        crew.join()
    assert caught.value.role == "write"


def test_the_driver_s_own_exception_keeps_its_type_and_notes_the_failure(beside: Any) -> None:
    def count() -> None:
        raise ArithmeticError("the role's")

    with pytest.raises(ZeroDivisionError, match="the driver's") as caught, beside.crew() as crew:
        crew.start(count)
        time.sleep(0.5)
        raise ZeroDivisionError("the driver's")
    assert "count[0]" in "".join(caught.value.__notes__)
    assert "the role's" in "".join(caught.value.__notes__)


def test_the_driver_s_own_exception_ends_a_healthy_crew(place: Any) -> None:
    def count(channel: Any) -> None:
        for k in channel.deliveries():
            channel.put(k)

    with pytest.raises(ZeroDivisionError) as caught, place.crew() as crew:
        channel = crew.channel()
        crew.start(count, channel)
        assert channel.take(10.0) == 0
        raise ZeroDivisionError
    assert not hasattr(caught.value, "__notes__")


def test_break_and_return_end_the_crew(place: Any) -> None:
    def count(channel: Any) -> None:
        for k in channel.deliveries():
            channel.put(k)

    def first() -> int:
        with place.crew() as crew:
            channel = crew.channel()
            crew.start(count, channel)
            while True:
                return channel.take(10.0)

    assert first() == 0
    for _ in range(2):
        with place.crew() as crew:
            channel = crew.channel()
            crew.start(count, channel)
            channel.take(10.0)
            break


def test_a_generator_that_holds_a_crew_can_be_closed(place: Any) -> None:
    def count(channel: Any) -> None:
        for k in channel.deliveries():
            channel.put(k)

    def counts() -> Any:
        with place.crew() as crew:
            channel = crew.channel()
            crew.start(count, channel)
            while True:
                yield channel.take(10.0)

    generator = counts()
    assert [next(generator) for _ in range(3)] == [0, 1, 2]
    generator.close()
    with pytest.raises(ConfigError):
        role()


def test_errors_of_the_library_inside_a_role_are_failures_of_their_type(place: Any) -> None:
    import torch

    def wrong_shape(channel: Any) -> None:
        channel.put(torch.zeros(3))

    def stalled(channel: Any) -> None:
        channel.take(timeout=0.05)

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(wrong_shape, crew.channel(like=torch.zeros(2)))
        crew.join()
    assert type(caught.value.__cause__) is ShapeError
    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(stalled, crew.channel(like=torch.zeros(2)))
        role().sleep(5.0)
    assert type(caught.value.__cause__) is Stalled


def test_a_failure_while_arguments_are_unpacked(place: Any) -> None:
    class Bomb:
        def __init__(self) -> None:
            self.armed = True

        def __setstate__(self, state: dict[str, Any]) -> None:
            raise ArithmeticError("unpacking")

    def count(bomb: Any) -> None:
        pass

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(count, Bomb())
        crew.join()
    assert type(caught.value.__cause__) is ArithmeticError


def test_heartbeat_is_in_the_failure(place: Any) -> None:
    def count() -> None:
        role().heartbeat("counting")
        role().heartbeat("on step 3 of 7 — ½")
        raise ArithmeticError("now")

    with pytest.raises(RoleFailed, match="on step 3 of 7 — ½"), place.crew() as crew:
        crew.start(count)
        crew.join()


def test_a_long_heartbeat_is_cut_not_fatal(place: Any) -> None:
    def count() -> None:
        role().heartbeat("é" * 5000)
        raise ArithmeticError("now")

    with pytest.raises(RoleFailed, match="éééé"), place.crew() as crew:
        crew.start(count)
        crew.join()


def test_a_member_can_be_joined_after_others_failed_to_end(place: Any) -> None:
    def quick() -> None:
        pass

    def endless(channel: Any) -> None:
        channel.take()

    with place.crew() as crew:
        (done,) = crew.start(quick)
        crew.start(endless, crew.channel())
        crew.join(done, timeout=10.0)
        with pytest.raises(Stalled, match=r"driver\[0\] waited 0\.2 s to see the end of endless\[0\]"):
            crew.join(timeout=0.2)


# On Processes: roles that are killed, that leave, that are stopped, and that are slow.


def test_heartbeat_survives_a_kill() -> None:
    def count() -> None:
        role().heartbeat("in the middle of it")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RoleFailed, match="in the middle of it"), Processes().crew() as crew:
        crew.start(count)
        crew.join()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1])
@pytest.mark.parametrize("where", [in_take, in_join, in_sleep])
def test_killed_by_a_signal(number: signal.Signals, where: Callable[..., None]) -> None:
    def count(ready: Any, channel: Any) -> None:
        ready.put(role().rank)
        role().sleep(60.0)

    with pytest.raises(RoleFailed) as caught, Processes().crew() as crew:
        ready, channel = crew.lanes(2), crew.channel()

        def start(ready: Any, channel: Any) -> None:
            count(ready[role().rank], channel)

        members = crew.start(start, ready, channel, copies=2, name="count")
        ready.take_each(10.0)
        os.kill(members[1].pid, number)
        began = time.monotonic()
        where(crew, {"channel": channel})
    assert time.monotonic() - began < SOON
    error = caught.value
    assert (error.role, error.rank, error.signal, error.exit_code) == ("count", 1, number, -number)
    assert "count[1]" in str(error)
    assert number.name in str(error)
    assert error.traceback == ""


@pytest.mark.parametrize("code", [0, 3])
def test_left_without_returning(code: int) -> None:
    def count(code: int) -> None:
        os._exit(code)

    left = rf"count\[0\] left with exit code {code}"
    with pytest.raises(RoleFailed, match=left) as caught, Processes().crew() as crew:
        crew.start(count, code)
        crew.join()
    assert (caught.value.signal, caught.value.exit_code, caught.value.rank) == (None, code, 0)


def test_killed_while_the_driver_works_is_raised_at_the_end() -> None:
    def count() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RoleFailed) as caught, Processes().crew() as crew:
        crew.start(count)
        time.sleep(0.5)
    assert caught.value.signal == signal.SIGKILL


def stopped(crew: Any, drive: Callable[..., None]) -> RoleFailed:
    def count(ready: Any, channel: Any) -> None:
        ready.put(True)
        channel.take()

    channel, ready = crew.channel(name="channel"), crew.channel(name="ready")
    (member,) = crew.start(count, ready, channel)
    ready.take(10.0)
    os.kill(member.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(RoleFailed) as caught:
            drive(crew)
        assert 0.3 < time.monotonic() - began < 5.0
    finally:
        os.kill(member.pid, signal.SIGCONT)  # so that the crew's end need not wait for it
    return caught.value


@pytest.mark.parametrize(
    "drive", [lambda crew: crew.join(timeout=6.0), lambda crew: role().sleep(6.0)], ids=["join", "sleep"]
)
def test_a_stopped_role_has_failed(drive: Callable[..., None]) -> None:
    with pytest.raises(RoleFailed), Processes(stall_after=0.5).crew() as crew:
        error = stopped(crew, drive)
        assert (error.role, error.rank, error.signal) == ("count", 0, signal.SIGSTOP)
        assert "count[0]" in str(error)
        assert "stopped" in str(error)
        raise error


@pytest.mark.parametrize("work", [0.0, 0.002], ids=["waiting driver", "working driver"])
def test_a_stopped_role_surfaces_while_other_roles_keep_the_driver_busy(work: float) -> None:
    def count(lanes: Any) -> None:
        lane = lanes[role().rank]
        for k in lane.deliveries():
            lane.put(k)

    with pytest.raises(RoleFailed, match=r"count\[1\]"), Processes(stall_after=0.5).crew() as crew:
        lanes = crew.lanes(2, capacity=4, like=0)
        members = crew.start(count, lanes, copies=2)
        lanes.take_each(10.0)
        os.kill(members[1].pid, signal.SIGSTOP)
        until = time.monotonic() + 4.0
        try:
            while time.monotonic() < until:
                lanes.take_any(10.0)
                time.sleep(work)
        finally:
            os.kill(members[1].pid, signal.SIGCONT)  # so that the crew's end need not wait for it


@pytest.mark.slow
def test_a_role_that_goes_on_in_time_has_not_failed() -> None:
    def count(ready: Any, done: Any) -> None:
        ready.put(True)
        role().sleep(2.2)
        done.put(True)

    with Processes(stall_after=1.0).crew() as crew:
        ready, done = crew.channel(), crew.channel()
        (member,) = crew.start(count, ready, done)
        ready.take(10.0)
        for _ in range(2):  # stopped twice, for less than that each time
            os.kill(member.pid, signal.SIGSTOP)
            with pytest.raises(Stalled):
                done.take(0.6)
            os.kill(member.pid, signal.SIGCONT)
            with pytest.raises(Stalled):
                done.take(0.25)
        assert done.take(10.0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["busy", "asleep", "in C"])
def test_a_slow_role_has_not_failed(how: str) -> None:
    def count(done: Any, how: str) -> None:
        until = time.monotonic() + 1.2
        if how == "asleep":
            time.sleep(1.2)
        elif how == "busy":
            while time.monotonic() < until:
                pass
        else:
            __import__("ctypes").PyDLL(None).usleep(900_000)  # holds the interpreter lock
        done.put(True)

    with Processes(stall_after=0.4).crew() as crew:
        done = crew.channel()
        crew.start(count, done, how)
        assert done.take(15.0)


def test_a_dead_keeper_is_named() -> None:
    def count(channel: Any) -> None:
        channel.take()

    with pytest.raises(RoleFailed, match="keeper"), Processes().crew() as crew:
        channel = crew.channel()
        (member,) = crew.start(count, channel)
        os.kill(psutil.Process(member.pid).ppid(), signal.SIGKILL)
        crew.join(timeout=10.0)


def test_roles_are_not_ended_by_what_a_terminal_sends() -> None:
    def count(ready: Any, done: Any) -> None:
        ready.put(True)
        role().sleep(0.5)
        done.put(True)

    with Processes().crew() as crew:
        ready, done = crew.channel(), crew.channel()
        (member,) = crew.start(count, ready, done)
        ready.take(10.0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(member.pid, number)
        assert done.take(10.0)


def test_a_thread_that_does_not_notice_the_end_is_named(shared: Any) -> None:
    """Threads cannot end a role from outside; the block ends all the same, and says which role goes on."""
    shared.go = __import__("threading").Event()

    def deaf() -> None:
        __import__("headrace_test_shared").go.wait(20.0)

    try:
        with pytest.raises(Stalled, match=r"deaf\[0\]"), Threads(stall_after=0.5).crew() as crew:
            crew.start(deaf)
    finally:
        shared.go.set()


def test_inline_a_failure_stops_the_others_at_their_next_wait(shared: Any) -> None:
    shared.seen = []

    def endless() -> None:
        try:
            while True:
                role().sleep(1.0)
        finally:
            __import__("headrace_test_shared").seen.append("ended")

    def count() -> None:
        role().sleep(5.5)
        raise ArithmeticError("now")

    with pytest.raises(RoleFailed, match="now"), Inline().crew() as crew:
        crew.start(endless, copies=3)
        crew.start(count)
        crew.join()
    assert shared.seen == ["ended"] * 3
