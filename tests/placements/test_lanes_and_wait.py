"""Lanes and `wait`: many channels read by one role."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Closed, Inline, RoleFailed, Stalled, Threads, role, wait

pytestmark = pytest.mark.timeout(60)


def test_lanes_are_a_sequence_of_channels(place: Any) -> None:
    with place.crew() as crew:
        lanes = crew.lanes(3, capacity=2, name="counts")
        assert len(lanes) == 3
        assert list(lanes) == [lanes[0], lanes[1], lanes[2]]
        assert [lane.name for lane in lanes] == ["counts[0]", "counts[1]", "counts[2]"]
        assert [lane.capacity for lane in lanes] == [2, 2, 2]
        with pytest.raises(IndexError):
            lanes[3]


@pytest.mark.parametrize("like", [None, "struct"])
def test_take_each_is_in_rank_order(everywhere: Any, count: Any, like: Any) -> None:
    """Whoever is first: the result is the same on every placement."""

    def write(lanes: Any, count: Any) -> None:
        rank = role().rank
        generator = np.random.default_rng(role().seed)
        for k in lanes[rank].deliveries():
            role().sleep(float(generator.random()) * 0.004)
            lanes[rank].put(count(100 * rank + k) if count else 100 * rank + k)

    def program(crew: Any) -> Any:
        lanes = crew.lanes(3, like=count() if like else None)
        crew.start(write, lanes, count if like else None, copies=3)
        taken = []
        for _ in range(10):
            items = lanes.take_each(10.0)
            assert isinstance(items, list)
            taken.append([int(item.number[0]) if like else item for item in items])
        return taken

    assert everywhere(program) == [[k, 100 + k, 200 + k] for k in range(10)]


def test_take_each_that_timed_out_takes_nothing(place: Any) -> None:
    """Else a second try would take one item more of the fast lanes, and the rows would be out of step."""

    def write(lanes: Any) -> None:
        rank = role().rank
        for k in range(3):
            role().sleep(0.2 * rank)
            lanes[rank].put((rank, k))
        role().sleep(1000.0)

    with place.crew() as crew:
        lanes = crew.lanes(2, capacity=4)
        crew.start(write, lanes, copies=2)
        rows: list[Any] = []
        stalls = 0
        while len(rows) < 3:
            try:
                rows.append(lanes.take_each(timeout=0.05))
            except Stalled:
                stalls += 1
                assert stalls < 200
    assert rows == [[(0, k), (1, k)] for k in range(3)]
    assert stalls > 1


def test_take_each_that_meets_a_closed_lane_takes_nothing(place: Any) -> None:
    with place.crew() as crew:
        lanes = crew.lanes(2)
        lanes[0].put("kept")
        lanes[1].close()
        with pytest.raises(Closed):
            lanes.take_each(1.0)
        assert lanes[0].taken == 0
        assert lanes[0].take(1.0) == "kept"


def test_the_timeout_of_take_each_is_for_all_lanes_together(place: Any) -> None:
    def idle(lanes: Any) -> None:
        role().sleep(0.15)
        lanes[0].put(0)
        role().sleep(0.15)
        lanes[1].put(1)
        role().sleep(1000.0)

    with place.crew() as crew:
        lanes = crew.lanes(3)
        crew.start(idle, lanes)
        began = role().clock()
        with pytest.raises(Stalled):
            lanes.take_each(timeout=0.35)
        assert role().clock() - began < 0.34 + 0.25


def test_take_any_gives_what_is_ready(place: Any) -> None:
    def write(lanes: Any, gates: Any) -> None:
        rank = role().rank
        while True:
            lanes[rank].put((rank, gates[rank].take()))

    with place.crew() as crew:
        lanes, gates = crew.lanes(3), crew.lanes(3, name="gates")
        crew.start(write, lanes, gates, copies=3)
        for k, rank in enumerate([2, 0, 0, 1, 2, 2, 1]):
            gates[rank].put(k)
            taken = lanes.take_any(10.0)
            assert taken == (rank, (rank, k))
            assert (taken.rank, taken.item) == (rank, (rank, k))


def test_take_any_starves_no_lane(place: Any) -> None:
    def write(lanes: Any) -> None:
        for k in lanes[role().rank].deliveries():
            lanes[role().rank].put(k)

    with place.crew() as crew:
        lanes = crew.lanes(4, capacity=3, like=0)
        crew.start(write, lanes, copies=4)
        for lane in lanes:  # all are up
            lane.take(10.0)
        seen: dict[int, list[int]] = {rank: [] for rank in range(4)}
        until = time.monotonic() + 10.0
        while min(map(len, seen.values())) < 20:  # a process may be without a core for a while; a lane never for ever
            rank, item = lanes.take_any(10.0)
            seen[rank].append(item)
            assert time.monotonic() < until, {rank: len(items) for rank, items in seen.items()}
    assert all(items == list(range(1, len(items) + 1)) for items in seen.values()), "in order in every lane"


@pytest.mark.parametrize("placement", [Inline(), Threads()], ids=["inline", "threads"])
@settings(max_examples=15)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=5), data=st.data())
def test_take_any_is_fair_among_what_is_ready(placement: Any, counts: list[int], data: st.DataObject) -> None:
    """A lane with an item is passed over at most once by each other lane before it is its turn."""
    with placement.crew() as crew:
        lanes = crew.lanes(len(counts), capacity=5)
        for lane, many in zip(lanes, counts, strict=True):
            for k in range(many):
                lane.put(k)
        waits = dict.fromkeys(range(len(counts)), 0)
        taken: Counter[int] = Counter()
        for _ in range(sum(counts)):
            rank, item = lanes.take_any(1.0)
            assert item == taken[rank]
            taken[rank] += 1
            for other in waits:
                ready = other != rank and taken[other] < counts[other]
                waits[other] = waits[other] + 1 if ready else 0
                assert waits[other] < len(counts)
        lanes.close()
        with pytest.raises(Closed):
            lanes.take_any(1.0)


def test_take_any_passes_closed_lanes_over(place: Any) -> None:
    def write(lanes: Any) -> None:
        rank = role().rank
        for k in range(rank * 3):
            lanes[rank].put((rank, k))

    with place.crew() as crew:
        lanes = crew.lanes(4)
        crew.start(write, lanes, copies=4)
        taken = []
        with pytest.raises(Closed):  # rank 0 returns without having used its lane
            while True:
                rank, item = lanes.take_any(10.0)
                assert rank == item[0]
                taken.append(item)
        assert sorted(taken) == [(rank, k) for rank in range(4) for k in range(rank * 3)]


def test_take_any_drains_what_was_put_before_the_close(place: Any) -> None:
    with place.crew() as crew:
        lanes = crew.lanes(2, capacity=3)
        for k in range(3):
            lanes[1].put(k)
        lanes.close()
        assert [lanes.take_any() for _ in range(3)] == [(1, 0), (1, 1), (1, 2)]
        with pytest.raises(Closed):
            lanes.take_any()


def test_take_any_times_out(place: Any) -> None:
    def idle(lanes: Any) -> None:
        role().sleep(1000.0)

    with place.crew() as crew:
        lanes = crew.lanes(2, name="counts")
        crew.start(idle, lanes)
        began = role().clock()
        with pytest.raises(Stalled, match=r"driver\[0\] waited 0\.1 s to take from 'counts\[0\]'.* or .*'counts\[1\]'"):
            lanes.take_any(timeout=0.1)
        assert 0.1 - 1e-6 <= role().clock() - began < 5.0


def test_close_closes_every_lane(place: Any) -> None:
    with place.crew() as crew:
        lanes = crew.lanes(3)
        lanes[0].put(1)
        lanes.close()
        assert lanes[0].take() == 1
        for lane in lanes:
            with pytest.raises(Closed):
                lane.take()
            with pytest.raises(Closed):
                lane.put(1)


def test_lanes_can_be_read_by_a_role(everywhere: Any, ask: Any) -> None:
    def write(lanes: Any) -> None:
        for k in lanes[role().rank].deliveries():
            lanes[role().rank].put((k, role().rank))

    def read(lanes: Any) -> list[Any]:
        rows = [lanes.take_each() for _ in range(5)]
        lanes.close()
        return rows

    def program(crew: Any) -> Any:
        lanes = crew.lanes(2, like=(0, 0))
        crew.start(write, lanes, copies=2)
        rows = ask(crew, read, lanes)
        crew.join(timeout=10.0)
        return rows

    assert everywhere(program) == [[[(k, 0), (k, 1)] for k in range(5)]]


def test_a_second_reader_of_lanes_is_an_error(place: Any) -> None:
    def read(lanes: Any) -> None:
        lanes.take_any(timeout=1000.0)

    with pytest.raises(RoleFailed, match="reader"), place.crew() as crew:
        lanes = crew.lanes(2)
        assert not any(end.ready() for end in lanes.to_take)
        crew.start(read, lanes)
        crew.join(timeout=10.0)


# wait


def test_wait_over_channels_of_different_shapes_and_directions(place: Any, count: Any) -> None:
    def relay(gates: Any, struct: Any, value: Any, back: Any, count: Any) -> None:
        for _ in range(3):
            struct.put(count(gates.take()))
            value.put(("value", gates.take()))
            assert back.take() == 0  # makes room

    with place.crew() as crew:
        gates, struct = crew.channel(name="gates"), crew.channel(like=count(), name="struct")
        value, back = crew.channel(name="value"), crew.channel(like=0, name="back")
        crew.start(relay, gates, struct, value, back, count)
        ends = (struct.to_take, value.to_take, back.to_put)
        for k in range(3):
            assert wait(*ends, timeout=10.0) == [back.to_put]
            back.put(0)
            with pytest.raises(Stalled):
                wait(*ends, timeout=0.05)
            gates.put(k)
            assert wait(*ends, timeout=10.0) == [struct.to_take]
            assert wait(*ends) == [struct.to_take], "it does not consume"
            gates.put(k)
            while len(ready := wait(*ends)) < 2 and value.delivered == k:
                role().sleep(0.01)
            assert wait(*reversed(ends))[-1:] == [struct.to_take]
            assert wait(*ends)[:2] == [struct.to_take, value.to_take], "in the order given"
            assert ready
            assert struct.take(1.0).equal(count(k))
            assert value.take(1.0) == ("value", k)
            if k < 2:
                assert wait(back.to_put, timeout=10.0) == [back.to_put]


def test_wait_is_a_method_of_role_too(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel()
        assert role().wait(channel.to_put) == [channel.to_put]


def test_wait_says_what_for(place: Any) -> None:
    def idle(*ends: Any) -> None:
        role().sleep(1000.0)

    with place.crew() as crew:
        empty, full = crew.channel(name="empty"), crew.channel(name="full")
        crew.start(idle, empty, full)
        full.put(1)
        with pytest.raises(Stalled) as caught:
            wait(empty.to_take, full.to_put, timeout=0.1)
        message = str(caught.value)
        assert "driver[0] waited 0.1 s to take from 'empty'" in message
        assert "or to put into 'full'" in message


def test_a_closed_channel_is_ready(place: Any) -> None:
    with place.crew() as crew:
        one, two = crew.channel(), crew.channel()
        one.close()
        assert wait(two.to_put, one.to_take, timeout=1.0) == [two.to_put, one.to_take]
        assert wait(one.to_take, timeout=1.0) == [one.to_take]


def test_waiting_for_ends_that_nobody_can_serve_ends(place: Any) -> None:
    def forget(*ends: Any) -> None:
        pass

    with place.crew() as crew:
        one, two = crew.channel(), crew.channel()
        crew.start(forget, one, two)
        two.put(1)
        with pytest.raises(Closed):
            wait(one.to_take, two.to_put)


@pytest.mark.parametrize("how", ["wait", "take_any"])
def test_a_role_that_waits_for_many_is_woken_by_each(place: Any, how: str) -> None:
    def serve(requests: Any, answers: Any) -> None:
        ends = dict(zip(requests.to_take, range(3), strict=True))
        while ends:
            if how == "take_any":
                rank, number = requests.take_any()
            else:
                end = wait(*ends)[0]
                rank = ends[end]
                try:
                    number = requests[rank].take()
                except Closed:
                    del ends[end]
                    continue
            answers[rank].put(number + rank)

    def work(requests: Any, answers: Any, totals: Any) -> None:
        rank = role().rank
        total = 0
        for k in range(50):
            requests[rank].put(k)
            total += answers[rank].take()
        totals[rank].put(total)

    with place.crew() as crew:
        requests, answers, totals = crew.lanes(3, like=0), crew.lanes(3, like=0), crew.lanes(3)
        crew.start(serve, requests, answers)
        began = time.monotonic()
        crew.start(work, requests, answers, totals, copies=3)
        assert totals.take_each(20.0) == [sum(range(50)) + 50 * rank for rank in range(3)]
        assert time.monotonic() - began < 8.0, "each of 150 wake-ups waited for a tick"


@pytest.mark.slow
@pytest.mark.timeout(115)
def test_lanes_under_random_pauses(beside: Any) -> None:
    def write(lanes: Any) -> None:
        rank = role().rank
        generator = np.random.default_rng(role().seed)
        for k in range(3_000):
            if generator.random() < 0.02:
                time.sleep(generator.random() * 0.003)
            lanes[rank].put((rank, k, torch.full((8,), k)))

    with beside.crew() as crew:
        lanes = crew.lanes(5, capacity=2, like=(0, 0, torch.zeros(8, dtype=torch.int64)))
        crew.start(write, lanes, copies=5)
        taken: Counter[int] = Counter()
        with pytest.raises(Closed):
            while True:
                rank, (said, k, tensor) = lanes.take_any(20.0)
                assert (said, k) == (rank, taken[rank])
                assert tensor.tolist() == [k] * 8
                taken[rank] += 1
    assert taken == dict.fromkeys(range(5), 3_000)
