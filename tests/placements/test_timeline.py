"""What everything in a crew counts: items, bytes, and seconds busy, starved and blocked."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from headrace import RoleFailed, Stalled, role

pytestmark = pytest.mark.timeout(60)


def named(interval: Any, kind: str | None = None) -> dict[str, Any]:
    return {a.name: a for a in interval.activities if kind in (None, a.kind)}


def test_items_and_bytes(place: Any, count: Any) -> None:
    def work(inward: Any, outward: Any, numbers: Any, weights: Any, group: Any, count: Any) -> None:
        for k in range(5):
            inward.take()
            outward.put(count(k))
        numbers.put((1, 2.0))
        for version in (1, 2, 3):
            weights.publish({"w": torch.zeros(1000)}, version)
        for _ in range(4):
            group.mean(torch.zeros(10))

    with place.crew() as crew:
        inward, outward = crew.channel(5, name="in"), crew.channel(5, like=count(), name="out")
        numbers = crew.channel(like=(0, 0.0), name="numbers")
        weights, group = (
            crew.weights({"w": torch.zeros(1000)}, name="net"),
            crew.group(1, like=torch.zeros(10), name="all"),
        )
        for k in range(5):
            inward.put([k])
        before = named(crew.timeline())
        assert (before["in"].items, before["out"].items) == (5, 0)
        crew.start(work, inward, outward, numbers, weights, group, count)
        crew.join(timeout=10.0)
        activities = named(crew.timeline())
        assert {name: a.kind for name, a in activities.items()} == {
            "in": "channel", "out": "channel", "numbers": "channel", "net": "weights", "all": "group",
            "driver[0]": "role", "work[0]": "role",
        }  # fmt: skip
        items = {name: a.items for name, a in activities.items()}
        assert (items["in"], items["out"], items["numbers"], items["net"], items["all"]) == (0, 5, 1, 3, 4)
        assert activities["out"].bytes >= 5 * count().nbytes
        assert activities["net"].bytes >= 3 * 4000
        assert activities["all"].bytes == 4 * 40
        assert items["work[0]"] == 5 + 1 + 3, "all that it put and published, and nothing else"
        assert activities["work[0]"].bytes == sum(activities[name].bytes for name in ("out", "numbers", "net"))
        assert (outward.statistics().items, outward.statistics().name) == (5, "out")
        assert (weights.statistics().kind, group.statistics().kind) == ("weights", "group")


def test_pickled_values_count_their_bytes(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(3)
        channel.put(b"x" * 1000)
        channel.put(b"x" * 2000)
        assert channel.statistics().items == 2
        assert 3000 <= channel.statistics().bytes < 3500


def test_items_of_earlier_runs_are_not_counted(place: Any) -> None:
    with place.crew() as crew:
        channel = crew.channel(3, like=0, start=100)
        channel.put(1)
        assert channel.statistics().items == 1
        assert named(crew.timeline())["channel"].items == 1


def test_intervals_add_up(place: Any, count: Any) -> None:
    def write(channel: Any, count: Any) -> None:
        for k in range(30):
            channel.put(count(k))

    with place.crew() as crew:
        channel = crew.channel(2, like=count(), name="counts")
        crew.start(write, channel, count)
        items = nbytes = busy = 0
        for k in range(30):
            channel.take(10.0)
            if k % 7 == 0:
                activity = named(crew.timeline())["counts"]
                items, nbytes, busy = items + activity.items, nbytes + activity.bytes, busy + activity.busy
        crew.join(timeout=10.0)
        activity = named(crew.timeline())["counts"]
        items, nbytes, busy = items + activity.items, nbytes + activity.bytes, busy + activity.busy
        total = channel.statistics()
        assert (items, nbytes) == (30, total.bytes)
        assert busy == pytest.approx(total.busy)
        assert total.busy > 0.0
        empty = named(crew.timeline())["counts"]
        assert (empty.items, empty.bytes, empty.busy, empty.starved, empty.blocked) == (0, 0, 0.0, 0.0, 0.0)


def test_the_seconds_of_an_interval(beside: Any) -> None:
    with beside.crew() as crew:
        time.sleep(0.1)
        first = crew.timeline()
        time.sleep(0.2)
        second = crew.timeline()
    assert 0.1 <= first.seconds < 2.0
    assert 0.2 <= second.seconds < 2.0
    driver = named(second)["driver[0]"]
    assert driver.busy + driver.starved + driver.blocked == pytest.approx(second.seconds, abs=0.02)


def test_a_reader_that_waits_is_starved(beside: Any) -> None:
    def write(lanes: Any) -> None:
        time.sleep(0.3)
        lanes[0].put(1)
        lanes[1].put(1)

    def read(lanes: Any, done: Any) -> None:
        lanes[0].take()
        time.sleep(0.1)
        done.put(True)

    with beside.crew() as crew:
        lanes, done = crew.lanes(2, name="lanes"), crew.channel(name="done")
        crew.start(read, lanes, done)
        crew.start(write, lanes)
        done.take(10.0)
        crew.join(timeout=10.0)
        activities = named(crew.timeline())
    assert 0.2 <= activities["lanes[0]"].starved < 3.0
    assert 0.2 <= activities["read[0]"].starved < 3.0
    assert activities["read[0]"].busy >= 0.09
    assert activities["read[0]"].blocked == 0.0
    assert activities["lanes[1]"].starved == 0.0
    assert activities["write[0]"].starved == 0.0
    assert activities["write[0]"].busy >= 0.25
    assert activities["driver[0]"].starved >= 0.3


def test_a_writer_that_waits_for_room_is_blocked(beside: Any) -> None:
    def write(channel: Any) -> None:
        channel.put(1)
        channel.put(2)

    with beside.crew() as crew:
        channel = crew.channel(name="slow")
        crew.start(write, channel)
        time.sleep(0.35)
        channel.take(10.0)
        channel.take(10.0)
        crew.join(timeout=10.0)
        activities = named(crew.timeline())
    assert 0.2 <= activities["slow"].blocked < 3.0
    assert 0.2 <= activities["write[0]"].blocked < 3.0
    assert activities["write[0]"].starved == 0.0


def test_waiting_for_weights_and_groups_is_starved(beside: Any) -> None:
    def pull(weights: Any) -> None:
        weights.pull({"w": torch.zeros(1)}, version=1)

    def meet(group: Any) -> None:
        time.sleep(0.3 * role().rank)
        group.barrier()

    with beside.crew() as crew:
        weights, group = crew.weights({"w": torch.zeros(1)}, name="net"), crew.group(2, name="pair")
        crew.start(pull, weights)
        crew.start(meet, group, copies=2)
        time.sleep(0.3)
        weights.publish({"w": torch.ones(1)}, 1)
        crew.join(timeout=10.0)
        activities = named(crew.timeline())
    assert activities["net"].starved >= 0.2
    assert activities["pull[0]"].starved >= 0.2
    assert activities["pair"].starved >= 0.2
    assert activities["meet[0]"].starved >= 0.2
    assert activities["meet[1]"].starved < 0.2


def test_a_wait_that_goes_on_is_counted_so_far(beside: Any) -> None:
    def read(channel: Any, ready: Any) -> None:
        ready.put(True)
        channel.take()

    with beside.crew() as crew:
        channel, ready = crew.channel(), crew.channel()
        crew.start(read, channel, ready)
        ready.take(10.0)
        time.sleep(0.15)
        crew.timeline()
        time.sleep(0.3)
        assert 0.2 <= named(crew.timeline())["read[0]"].starved < 2.0


@pytest.mark.parametrize("end", ["Stalled", "Closed"])
def test_a_wait_that_ends_in_vain_is_counted(beside: Any, end: str) -> None:
    def read(channel: Any, done: Any) -> None:
        try:
            channel.take(timeout=0.3 if end == "Stalled" else 20.0)
        except Stalled:
            pass
        finally:
            done.put(True)

    with beside.crew() as crew:
        channel, done = crew.channel(name="never"), crew.channel()
        crew.start(read, channel, done)
        if end == "Closed":
            time.sleep(0.3)
            channel.close()
        done.take(10.0)
        crew.join(timeout=10.0)
        activities = named(crew.timeline())
    assert activities["read[0]"].starved >= 0.2
    assert activities["never"].starved >= 0.2


def test_a_role_s_time_is_its_life(beside: Any) -> None:
    def work(inward: Any, outward: Any) -> None:
        while True:
            k = inward.take()
            time.sleep(0.05)
            outward.put(k)
            outward.put(k)

    with beside.crew() as crew:
        inward, outward = crew.channel(5), crew.channel()
        began = time.monotonic()
        crew.start(work, inward, outward)
        for k in range(3):
            inward.put(k)
            time.sleep(0.05)
        for _ in range(6):
            time.sleep(0.02)
            outward.take(10.0)
        inward.close()
        crew.join(timeout=10.0)
        lived = time.monotonic() - began
        time.sleep(0.3)
        activity = named(crew.timeline())["work[0]"]
    assert activity.busy + activity.starved + activity.blocked == pytest.approx(lived, abs=0.15)
    assert activity.busy >= 0.14
    assert activity.starved > 0.0
    assert activity.blocked > 0.0


def test_things_of_one_name_do_not_mix(place: Any) -> None:
    """Lanes are often named like the role that fills them."""

    def collect(lanes: Any) -> None:
        for k in range(3):
            lanes[role().rank].put(k)
            role().sleep(0.02)

    with place.crew() as crew:
        lanes = crew.lanes(2, capacity=5, name="collect")
        crew.start(collect, lanes, copies=2)
        crew.timeline()
        crew.join(timeout=10.0)
        crew.timeline()
        time.sleep(0.05)
        last = crew.timeline()
    for activity in last.activities:
        if activity.name.startswith("collect"):
            assert (activity.items, activity.bytes) == (0, 0), activity
            assert (activity.busy, activity.starved, activity.blocked) == (0.0, 0.0, 0.0), activity


def test_the_time_of_a_new_life_is_counted(beside: Any) -> None:
    def work(channel: Any, ready: Any) -> None:
        ready.put(True)
        if role().incarnation == 0:
            time.sleep(0.3)
            raise ArithmeticError
        channel.take()

    with beside.crew() as crew:
        channel, ready = crew.channel(), crew.channel(2)
        (member,) = crew.start(work, channel, ready)
        with pytest.raises(RoleFailed):
            crew.join(timeout=10.0)
        assert named(crew.timeline())["work[0]"].busy >= 0.25
        crew.restart(member)
        ready.take(10.0)
        ready.take(10.0)
        crew.timeline()
        time.sleep(0.3)
        activity = named(crew.timeline())["work[0]"]
        assert activity.starved >= 0.2
        assert activity.busy < 0.2


def test_the_interval_with_a_restart_loses_nothing(beside: Any) -> None:
    def work(ready: Any) -> None:
        time.sleep(0.3)
        ready.put(True)
        if role().incarnation == 0:
            time.sleep(0.05)
            raise ArithmeticError

    with beside.crew() as crew:
        ready = crew.channel(2)
        (member,) = crew.start(work, ready)
        ready.take(10.0)
        with pytest.raises(RoleFailed):
            crew.join(timeout=10.0)
        first = named(crew.timeline())["work[0]"]
        crew.restart(member)
        ready.take(10.0)
        crew.join(timeout=10.0)
        second = named(crew.timeline())["work[0]"]
    assert first.busy >= 0.25
    assert second.busy >= 0.25
