"""What only Inline promises: one role at a time, an order that a seed repeats, a virtual clock, named deadlocks."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch

from headrace import Inline, RoleFailed, Stalled, role, wait

pytestmark = pytest.mark.timeout(30)


def order(seed: int, shared: Any) -> list[int]:
    """Who ran when, in a crew of three roles that have nothing to do with each other."""
    shared.trace = []

    def count(channel: Any) -> None:
        trace = __import__("headrace_test_shared").trace
        for _ in range(10):
            trace.append(role().rank)
            channel[role().rank].put(1)
            trace.append(role().rank)

    with Inline().crew(seed=seed) as crew:
        lanes = crew.lanes(3)
        crew.start(count, lanes, copies=3)
        for _ in range(30):
            shared.trace.append(10 + lanes.take_any(5.0).rank)
    return list(shared.trace)


def test_the_order_is_repeated_by_the_seed(shared: Any) -> None:
    traces = {seed: order(seed, shared) for seed in range(6)}
    for seed, trace in traces.items():
        assert order(seed, shared) == trace
    assert len({tuple(trace) for trace in traces.values()}) > 1, "another seed, another order"


def test_the_order_depends_on_no_global_generator(shared: Any) -> None:
    import random

    random.seed(1)
    first = order(3, shared)
    random.seed(2)
    assert order(3, shared) == first


def test_one_role_runs_at_a_time(shared: Any) -> None:
    shared.running, shared.overlaps = [], []

    def count(inward: Any, outward: Any) -> None:
        state = __import__("headrace_test_shared")
        rank = role().rank
        for _ in range(5):
            inward[rank].take()
            state.running.append(rank)
            time.sleep(0.001)  # any other runnable thread would run now
            state.overlaps.append(list(state.running))
            state.running.remove(rank)
            outward[rank].put(1)
            role().sleep(0.1)

    with Inline().crew() as crew:
        inward, outward = crew.lanes(3), crew.lanes(3)
        crew.start(count, inward, outward, copies=3)
        for _ in range(5):
            for lane in inward:
                lane.put(1)
            outward.take_each()
    assert len(shared.overlaps) == 15
    assert all(len(running) == 1 for running in shared.overlaps)


def test_roles_start_when_the_driver_waits(shared: Any) -> None:
    shared.ran = []

    def count(rank: int) -> None:
        __import__("headrace_test_shared").ran.append(rank)

    with Inline().crew() as crew:
        crew.start(count, 1)
        time.sleep(0.05)
        assert shared.ran == []
        crew.join()
        assert shared.ran == [1]


# The virtual clock


def test_sleeping_takes_no_time_and_wakes_by_deadline(shared: Any) -> None:
    shared.woke = []

    def nap() -> None:
        for seconds in (1000.0, 500.0) if role().rank else (400.0, 1500.0):
            role().sleep(seconds)
            __import__("headrace_test_shared").woke.append((role().clock(), role().rank))

    began = time.monotonic()
    with Inline().crew() as crew:
        assert role().clock() == 0.0
        crew.start(nap, copies=2)
        role().sleep(700.0)
        assert role().clock() == 700.0
        assert shared.woke == [(400.0, 0)]
        crew.join()
    assert shared.woke == [(400.0, 0), (1000.0, 1), (1500.0, 1), (1900.0, 0)]
    assert time.monotonic() - began < 5.0


def test_the_clock_stands_while_somebody_can_go_on() -> None:
    def work(channel: Any) -> None:
        for k in range(100):
            channel.put(k)

    with Inline().crew() as crew:
        channel = crew.channel()
        crew.start(work, channel)
        assert [channel.take(timeout=0.001) for _ in range(100)] == list(range(100))
        assert role().clock() == 0.0


def test_timeouts_pass_on_the_virtual_clock() -> None:
    def late(channel: Any) -> None:
        role().sleep(5000.0)
        channel.put("late")
        role().sleep(10_000.0)

    began = time.monotonic()
    with Inline().crew() as crew:
        channel = crew.channel()
        crew.start(late, channel)
        with pytest.raises(Stalled, match="waited 3600 s"):
            channel.take(timeout=3600.0)
        assert role().clock() == 3600.0
        with pytest.raises(Stalled, match="waited 1000 s"):
            wait(channel.to_take, timeout=1000.0)
        assert channel.take(timeout=401.0) == "late"
        assert role().clock() == 5000.0
    assert time.monotonic() - began < 5.0


# Deadlocks


def test_a_deadlock_is_named_at_once_with_every_role() -> None:
    def grab(mine: Any, other: Any) -> None:
        mine.take()
        other.put(1)

    began = time.monotonic()
    with pytest.raises(Stalled, match="deadlock") as caught, Inline().crew() as crew:
        one, two = crew.channel(name="one"), crew.channel(name="two")
        crew.start(grab, one, two, name="left")
        crew.start(grab, two, one, name="right")
        crew.join()
    assert time.monotonic() - began < 2.0
    message = str(caught.value)
    assert "left[0] waits to take from 'one'" in message
    assert "right[0] waits to take from 'two'" in message
    assert "driver[0] waits to see the end of left[0], right[0]" in message


def test_a_deadlock_with_the_driver_in_it() -> None:
    def fill(channel: Any, answers: Any) -> None:
        channel.put(1)
        channel.put(2)
        channel.put(3)
        answers.put(1)

    with pytest.raises(Stalled, match="deadlock") as caught, Inline().crew() as crew:
        channel, answers = crew.channel(name="numbers"), crew.channel(name="answers")
        crew.start(fill, channel, answers)
        channel.take()
        answers.take()
    assert "driver[0] waits to take from 'answers'" in str(caught.value)
    assert "fill[0] waits to put into 'numbers' (full: 1" in str(caught.value)


def test_a_deadlock_over_weights_a_group_and_several_ends() -> None:
    def pull(weights: Any, group: Any, one: Any) -> None:
        weights.pull({"w": torch.zeros(1)}, version=3)

    def meet(weights: Any, group: Any, one: Any) -> None:
        group.barrier()

    def many(weights: Any, group: Any, one: Any) -> None:
        wait(one.to_take, one.to_put)  # one is full of nothing: never
        one.put(1)
        wait(one.to_put)

    with pytest.raises(Stalled, match="deadlock") as caught, Inline().crew() as crew:
        ends = crew.weights({"w": torch.zeros(1)}, name="net"), crew.group(2, name="pair"), crew.channel(name="one")
        for function in (pull, meet, many):
            crew.start(function, *ends)
        crew.join()
    message = str(caught.value)
    assert "pull[0] waits to pull version 3 from 'net'" in message
    assert "meet[0] waits to meet rank 1" in message
    assert "many[0] waits to put into 'one'" in message


def test_a_deadlock_leaves_an_orderly_crew_behind(shared: Any) -> None:
    shared.ended = []

    def grab(channel: Any) -> None:
        try:
            channel.take()
        finally:
            __import__("headrace_test_shared").ended.append(role().rank)

    threads = threading.active_count()
    with Inline().crew() as crew:
        crew.start(grab, crew.channel())
        with pytest.raises(Stalled, match="deadlock"):
            crew.join()
        with pytest.raises(Stalled, match="deadlock"):
            crew.join()
    assert shared.ended == [0]
    assert threading.active_count() == threads


# Interruptions


def ping(inward: Any, outward: Any) -> None:
    while True:
        inward.take()
        outward.put(1)


@pytest.mark.parametrize("how", ["raise_signal", "interrupt_main", "kill"])
def test_ctrl_c_from_a_role_takes_effect(how: str, shared: Any) -> None:
    shared.ended = []

    def interrupt(channel: Any) -> None:
        try:
            for k in range(1_000_000):
                channel.put(k)
                if k == 20:
                    if how == "raise_signal":
                        signal.raise_signal(signal.SIGINT)
                    elif how == "interrupt_main":
                        _thread.interrupt_main()
                    else:
                        os.kill(os.getpid(), signal.SIGINT)
        finally:
            __import__("headrace_test_shared").ended.append(True)

    threads = threading.active_count()
    taken = 0
    with pytest.raises(KeyboardInterrupt), Inline().crew() as crew:
        channel = crew.channel(2)
        crew.start(interrupt, channel)
        while True:
            channel.take()
            taken += 1
            assert taken < 10_000
    assert shared.ended == [True]
    assert threading.active_count() == threads


def test_ctrl_c_reaches_a_driver_that_never_gets_its_turn() -> None:
    def swing(inward: Any, outward: Any, starts: bool) -> None:
        if starts:
            outward.put(0)
        while True:
            k = inward.take()
            outward.put(k + 1)
            if k == 200:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), Inline().crew() as crew:
        one, two = crew.channel(), crew.channel()
        crew.start(swing, one, two, True, name="left")
        crew.start(swing, two, one, False, name="right")
        crew.join()


def test_any_exception_of_a_signal_handler_unwinds_the_crew(shared: Any) -> None:
    """SIGTERM handlers raise SystemExit, test runners their timeouts: KeyboardInterrupt is not alone."""
    shared.running, shared.most = set(), 0

    class Told(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Told

    def swing(inward: Any, outward: Any, starts: bool) -> None:
        state, name = __import__("headrace_test_shared"), role().name
        if starts:
            outward.put(0)
        while True:
            k = inward.take()
            state.running.add(name)
            state.most = max(state.most, len(state.running))
            if k % 50 == 0:
                time.sleep(0.001)
            state.running.discard(name)
            outward.put(k + 1)
            if k == 200:
                os.kill(os.getpid(), signal.SIGUSR1)

    threads = threading.active_count()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Told), Inline().crew() as crew:
            one, two = crew.channel(), crew.channel()
            crew.start(swing, one, two, True, name="left")
            crew.start(swing, two, one, False, name="right")
            crew.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert shared.most == 1
    assert threading.active_count() == threads


def test_gradient_modes_do_not_leak_from_a_parked_role() -> None:
    def parked(gate: Any) -> None:
        with torch.no_grad(), torch.inference_mode():
            gate.take()

    def look(told: Any) -> None:
        told.put((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    with Inline().crew() as crew:
        gate, told = crew.channel(), crew.channel()
        crew.start(parked, gate)
        role().sleep(1.0)
        crew.start(look, told)
        assert told.take() == (True, False)
        assert torch.is_grad_enabled()
        gate.put(1)
        crew.join()


def test_a_failure_keeps_the_trace_through_the_baton() -> None:
    def deep(k: int) -> None:
        if k == 0:
            raise ArithmeticError("deep")
        role().sleep(1.0)
        deep(k - 1)

    with pytest.raises(RoleFailed) as caught, Inline().crew() as crew:
        crew.start(deep, 2)
        crew.join()
    assert caught.value.traceback.count("in deep") == 3


def test_many_crews_leave_no_threads() -> None:
    def count(channel: Any) -> None:
        for k in channel.deliveries():
            channel.put(k)

    threads = threading.active_count()
    for _ in range(30):
        with Inline().crew() as crew:
            channel = crew.channel()
            crew.start(count, channel)
            channel.take()
    assert threading.active_count() == threads
    assert "headrace_test_shared" not in sys.modules


def test_threads_may_run_anywhere_while_they_run() -> None:
    """A role that waits is woken where the one before it ran; what it starts then may use every core."""
    cores = os.sched_getaffinity(0)

    def work(lane: Any) -> None:
        for _ in range(3):
            lane.put(tuple(sorted(os.sched_getaffinity(0))))

    with Inline().crew() as crew:
        lane = crew.channel()
        crew.start(work, lane)
        for _ in range(3):
            assert set(lane.take()) == cores
            assert os.sched_getaffinity(0) == cores
    assert os.sched_getaffinity(0) == cores
