"""A role that failed is started again from what was shipped, and goes on where its channels stand."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import cloudpickle
import pytest
import torch

import headrace.channel
from headrace import Closed, ConfigError, Inline, Processes, RoleFailed, Threads, role
from headrace.place.context import Identity

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["inline", "threads", "raised", "killed"])
def life(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A placement, and how a role's life ends on it: a function to be called in the role."""
    place = {"inline": Inline(), "threads": Threads()}.get(request.param, Processes())

    def die() -> None:
        if request_param == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("the first life")

    request_param = request.param
    return place, die


def test_a_writer_goes_on_where_its_lane_stands(life: Any) -> None:
    place, die = life

    def write(lanes: Any, die: Any) -> None:
        me = role()
        for k in lanes[me.rank].deliveries():
            lanes[me.rank].put((me.rank, k, me.incarnation))
            if (me.rank, k, me.incarnation) in ((1, 4, 0), (1, 9, 1)):
                die()

    with place.crew() as crew:
        lanes = crew.lanes(2, capacity=2, like=(0, 0, 0))
        members = crew.start(write, lanes, die, copies=2)
        taken: list[Any] = []
        failed: list[tuple[str, int, int]] = []
        restarts = 0
        while len(taken) < 40:
            try:
                taken += lanes.take_each(10.0)
            except RoleFailed as error:
                failed.append((error.role, error.rank, error.incarnation))
                new = crew.restart(members[1])
                restarts += 1
                assert (new.name, new.rank, new.of, new.incarnation) == ("write", 1, 2, restarts)
                assert crew.members == (members[0], new)
                members = crew.members
        assert failed == [("write", 1, 0), ("write", 1, 1)]
        for rank in range(2):
            assert [k for r, k, _ in taken if r == rank] == list(range(20)), "none lost, none twice"
        assert [life for r, _, life in taken if r == 1] == [0] * 5 + [1] * 5 + [2] * 10
        assert {life for r, _, life in taken if r == 0} == {0}


def test_what_a_new_life_knows(life: Any) -> None:
    place, die = life

    def describe(lanes: Any, numbers: list[int], die: Any) -> None:
        me = role()
        numbers.append(me.incarnation)
        lanes[me.rank].put(
            (me.incarnation, list(numbers), me.name, me.rank, me.of, tuple(map(int, me.seed.generate_state(4))))
        )
        if me.incarnation < 2:
            me.sleep(0.1)  # the driver takes first, so that it hears of the failure in join
            die()

    with place.crew(seed=4) as crew:
        lanes = crew.lanes(1, capacity=5)
        (member,) = crew.start(describe, lanes, [7], die)
        lives = [lanes[0].take(10.0)]
        for _ in range(2):
            with pytest.raises(RoleFailed):
                crew.join(timeout=10.0)
            (member,) = (crew.restart(member),)
            lives.append(lanes[0].take(10.0))
        crew.join(timeout=10.0)
    assert [life[0] for life in lives] == [0, 1, 2]
    assert [life[1] for life in lives] == [[7, 0], [7, 1], [7, 2]], "from what was shipped"
    assert {life[2:5] for life in lives} == {("describe", 0, 1)}
    assert len({life[5] for life in lives}) == 3, "a seed of its own for each life"


def test_a_slot_that_was_reserved_is_reclaimed(life: Any, count: Any) -> None:
    place, die = life

    def write(channel: Any, told: Any, count: Any, die: Any) -> None:
        me = role()
        for k in channel.deliveries():
            slot = channel.reserve()
            slot.copy_(count(-1))
            if k == 3 and me.incarnation == 0:
                told.put("reserved")
                me.sleep(0.1)
                die()
            slot.copy_(count(k))
            channel.commit()

    with place.crew() as crew:
        channel, told = crew.channel(2, like=count()), crew.channel()
        (member,) = crew.start(write, channel, told, count, die)
        assert channel.take(10.0).equal(count(0))
        assert channel.take(10.0).equal(count(1))
        assert told.take(10.0) == "reserved"
        with pytest.raises(RoleFailed):
            crew.join(timeout=10.0)
        assert channel.reclaimed == 0
        crew.restart(member)
        for k in range(2, 8):
            assert channel.take(10.0).equal(count(k))
        assert channel.reclaimed == 1


def test_a_reader_goes_on_where_its_channel_stands(life: Any) -> None:
    place, die = life

    def read(inward: Any, outward: Any, die: Any) -> None:
        for _ in range(100):
            number = inward.take()
            outward.put((number, role().incarnation))
            if number == 4 and role().incarnation == 0:
                die()

    with place.crew() as crew:
        inward, outward = crew.channel(2), crew.channel(20)
        (member,) = crew.start(read, inward, outward, die)
        put = 0
        failed = False
        while put < 10:
            try:
                inward.put(put, timeout=10.0)
                put += 1
            except RoleFailed:
                failed = True
                member = crew.restart(member)
        if not failed:
            with pytest.raises(RoleFailed):
                crew.join(timeout=10.0)
            crew.restart(member)
        taken = [outward.take(10.0) for _ in range(10)]
    assert taken == [(k, 0 if k < 5 else 1) for k in range(10)]


def test_a_publisher_and_a_pulling_role_start_again(life: Any) -> None:
    place, die = life

    def publish(weights: Any, die: Any) -> None:
        for version in range(weights.latest + 1, 7):
            weights.publish({"w": torch.full((3,), float(version))}, version, life=role().incarnation)
            if version == 3 and role().incarnation == 0:
                die()

    with place.crew() as crew:
        weights = crew.weights({"w": torch.zeros(3)}, banks=7)
        (member,) = crew.start(publish, weights, die)
        with pytest.raises(RoleFailed):
            crew.join(timeout=10.0)
        crew.restart(member)
        crew.join(timeout=10.0)
        own = {"w": torch.zeros(3)}
        lives = [weights.pull(own, version=version)["life"] for version in range(1, 7)]
        assert lives == [0, 0, 0, 1, 1, 1]
        assert own["w"].tolist() == [6.0] * 3


def test_a_second_failure_is_raised(life: Any) -> None:
    place, die = life

    def count(die: Any) -> None:
        die()

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        (member,) = crew.start(count, die)
        with pytest.raises(RoleFailed):
            crew.join(timeout=10.0)
        crew.restart(member)
        crew.join(timeout=10.0)
    assert caught.value.incarnation == 1
    assert "incarnation 1" in str(caught.value)


def test_a_failure_that_was_forgiven_is_not_raised_at_the_end(life: Any) -> None:
    place, die = life

    def count(die: Any) -> None:
        if role().incarnation == 0:
            die()

    with place.crew() as crew:
        (member,) = crew.start(count, die)
        with pytest.raises(RoleFailed):
            crew.join(timeout=10.0)
        crew.restart(member)
        crew.join(timeout=10.0)
        role().sleep(0.05)


def test_the_failure_of_another_role_is_not_forgiven(life: Any) -> None:
    place, die = life

    def count(die: Any) -> None:
        die()

    def one_of(crew: Any, members: Any, failure: RoleFailed) -> None:
        crew.restart(next(m for m in members if m.rank == failure.rank))

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        members = crew.start(lambda die: die() if role().incarnation == 0 else None, die, copies=2, name="count")
        with pytest.raises(RoleFailed) as first:
            crew.join(timeout=10.0)
        one_of(crew, members, first.value)
        crew.join(timeout=10.0)
    assert caught.value.rank != first.value.rank
    assert caught.value.incarnation == 0


def test_an_unforgiven_failure_is_raised_again(life: Any) -> None:
    place, die = life

    def count(die: Any) -> None:
        die()

    with pytest.raises(RoleFailed), place.crew() as crew:
        crew.start(count, die)
        for _ in range(2):
            with pytest.raises(RoleFailed):
                crew.join(timeout=10.0)


def test_restart_of_what_is_not_there(life: Any) -> None:
    place, die = life

    def count(die: Any) -> None:
        if role().incarnation == 0:
            die()
        role().sleep(1000.0)

    with place.crew() as crew:
        (member,) = crew.start(count, die)
        with pytest.raises(RoleFailed):
            crew.join(timeout=10.0)
        crew.restart(member)
        with pytest.raises(ConfigError, match="incarnation"):
            crew.restart(member)
    with place.crew() as crew, pytest.raises(ConfigError, match="no role"):
        crew.restart(member)


def test_processes_a_living_role_is_ended_and_started_again() -> None:
    def write(channel: Any) -> None:
        for k in channel.deliveries():
            channel.put((k, role().incarnation))

    with Processes().crew() as crew:
        channel = crew.channel(1)
        (member,) = crew.start(write, channel)
        taken = [channel.take(10.0) for _ in range(3)]
        second = crew.restart(member)
        assert second.pid != member.pid
        taken += [channel.take(10.0) for _ in range(5)]
        assert [k for k, _ in taken] == list(range(8))
        assert taken[-1][1] == 1
        os.kill(second.pid, signal.SIGSTOP)
        crew.restart(second)
        taken += [channel.take(10.0) for _ in range(5)]
        assert [k for k, _ in taken] == list(range(13))
        assert taken[-1][1] == 2


def test_processes_killed_at_any_instant_loses_and_doubles_nothing(count: Any) -> None:
    def write(lane: Any, count: Any) -> None:
        for k in lane.deliveries():
            lane.put(count(k, 500))

    with Processes().crew() as crew:
        lane = crew.channel(3, like=count(0, 500))
        (member,) = crew.start(write, lane, count)
        generator = torch.Generator().manual_seed(1)
        k = 0
        for _ in range(8):
            for _ in range(int(torch.randint(1, 60, (1,), generator=generator))):
                assert lane.take(10.0).equal(count(k, 500))
                k += 1
            os.kill(member.pid, signal.SIGKILL)
            with pytest.raises(RoleFailed) as caught:
                while True:
                    assert lane.take(10.0).equal(count(k, 500))
                    k += 1
            assert caught.value.signal == signal.SIGKILL
            member = crew.restart(member)
        assert lane.take(10.0).equal(count(k, 500))
        assert 0 <= lane.reclaimed <= 8


def test_threads_cannot_end_a_living_role() -> None:
    def endless(channel: Any) -> None:
        channel.take()

    with Threads().crew() as crew:
        channel = crew.channel()
        (member,) = crew.start(endless, channel)
        with pytest.raises(ConfigError, match="still runs"):
            crew.restart(member)
        assert crew.members == (member,)


@pytest.mark.parametrize("late", ["commit", "put", "take", "publish", "reserve"])
def test_a_late_operation_of_an_old_life_is_refused(shared: Any, count: Any, late: str) -> None:
    """A thread that an old life left behind goes on using the handles that it has; the new life's items stay whole."""
    shared.go, shared.done = threading.Event(), threading.Event()
    shared.outcome = None

    def work(channel: Any, inward: Any, weights: Any, ready: Any, count: Any, late: str) -> None:
        shared = __import__("headrace_test_shared")
        old = role().incarnation == 0
        if old:
            channel.put(count(0))
            assert inward.take() == 0
            weights.publish({"w": torch.zeros(1)}, 1)
            if late == "commit":
                channel.reserve().copy_(count(-5))

            def later() -> None:
                shared.go.wait(20.0)
                try:
                    if late == "commit":
                        channel.commit()
                    elif late == "put":
                        channel.put(count(-5))
                    elif late == "reserve":
                        channel.reserve().copy_(count(-5))
                    elif late == "take":
                        shared.outcome = inward.take(0.0)
                    else:
                        weights.publish({"w": torch.full((1,), -5.0)}, 9)
                    shared.outcome = shared.outcome or "no error"
                except Exception as error:
                    shared.outcome = error
                shared.done.set()

            threading.Thread(target=later, daemon=True).start()
            raise ArithmeticError("the first life")
        channel.put(count(1))
        assert inward.take() == 1
        weights.publish({"w": torch.ones(1)}, 2)
        ready.put(True)
        role().sleep(1000.0)

    with Threads().crew() as crew:
        channel, inward, ready = crew.channel(3, like=count()), crew.channel(3), crew.channel()
        weights = crew.weights({"w": torch.zeros(1)})
        (member,) = crew.start(work, channel, inward, weights, ready, count, late)
        inward.put(0)
        with pytest.raises(RoleFailed):
            crew.join(timeout=10.0)
        crew.restart(member)
        inward.put(1)
        inward.put(2)
        ready.take(10.0)
        shared.go.set()
        assert shared.done.wait(10.0)
        assert isinstance(shared.outcome, Closed | ConfigError), shared.outcome
        assert channel.delivered == 2
        assert channel.take(1.0).equal(count(0))
        if late != "commit":  # whoever holds a slot can write into it; nobody else can
            assert channel.take(1.0).equal(count(1)), "the new life's item was overwritten"
        assert (inward.taken, weights.latest) == (2, 2)
        own = {"w": torch.zeros(1)}
        weights.pull(own)
        assert own["w"].item() == 1.0


@pytest.mark.parametrize("late", ["commit", "put", "take", "publish"])
def test_two_lives_at_once(count: Any, late: str) -> None:
    """As where an old life is cut off but not dead: both lives bound, the new one has claimed the end."""

    def bound(crew: Any, handle: Any, life: int) -> Any:
        """A copy of the handle, bound to that life of role 1."""
        copied = cloudpickle.loads(cloudpickle.dumps(handle))
        context = crew._context(Identity("work", 0, 1, life, "cpu", 1, 0))

        def bind() -> None:
            headrace.channel.enter(crew.id, context)
            assert copied.context is context

        thread = threading.Thread(target=bind)
        thread.start()
        thread.join()
        return copied

    with Threads().crew() as crew:
        crew.board.begin(1, "work[0]", 0, 1)
        channel, inward = crew.channel(3, like=count()), crew.channel(3)
        weights = crew.weights({"w": torch.zeros(1)}, banks=3)
        handle = {"commit": channel, "put": channel, "take": inward, "publish": weights}[late]
        old, new = bound(crew, handle, 0), bound(crew, handle, 1)
        if late in ("put", "commit"):
            old.put(count(0))
            if late == "commit":
                old.reserve().copy_(count(-5))
            new.put(count(1))
            with pytest.raises(Closed, match="incarnation 1"):
                old.commit() if late == "commit" else old.put(count(-5))
            assert channel.delivered == 2
            assert channel.take(1.0).equal(count(0))
            assert channel.take(1.0).equal(count(1)), "the new life's item was overwritten"
            new.put(count(2))
            assert channel.take(1.0).equal(count(2))
        elif late == "take":
            for k in range(3):
                inward.put(k)
            assert (old.take(1.0), new.take(1.0)) == (0, 1)
            with pytest.raises(Closed, match="incarnation 1"):
                old.take(1.0)
            assert (inward.taken, new.take(1.0)) == (2, 2)
        else:
            old.publish({"w": torch.zeros(1)}, 1)
            new.publish({"w": torch.ones(1)}, 2)
            with pytest.raises(Closed, match="incarnation 1"):
                old.publish({"w": torch.full((1,), -5.0)}, 3)
            own = {"w": torch.zeros(1)}
            assert weights.pull(own).version == 2
            assert own["w"].item() == 1.0
        with pytest.raises(Closed, match="incarnation 1"):  # an old life that has not claimed its end before
            again = bound(crew, handle, 0)
            again.take(1.0) if late == "take" else again.publish(
                {"w": torch.zeros(1)}, 9
            ) if late == "publish" else again.put(count(9))


@pytest.mark.slow
@pytest.mark.timeout(115)
def test_processes_killed_a_hundred_times(count: Any) -> None:
    def write(lanes: Any, count: Any) -> None:
        lane = lanes[role().rank]
        for k in lane.deliveries():
            slot = lane.reserve()
            slot.copy_(count(-1, 2000))
            time.sleep(0.001)  # most kills fall between reserve and commit
            slot.copy_(count(k, 2000))
            lane.commit()

    with Processes().crew() as crew:
        lanes = crew.lanes(2, capacity=2, like=count(0, 2000))
        members = list(crew.start(write, lanes, count, copies=2))
        generator = torch.Generator().manual_seed(2)
        seen = [0, 0]
        for kill in range(100):
            for _ in range(int(torch.randint(1, 60, (1,), generator=generator))):
                rank, item = lanes.take_any(10.0)
                assert item.equal(count(seen[rank], 2000))
                seen[rank] += 1
            os.kill(members[kill % 2].pid, signal.SIGKILL)
            with pytest.raises(RoleFailed):
                while True:
                    rank, item = lanes.take_any(10.0)
                    assert item.equal(count(seen[rank], 2000))
                    seen[rank] += 1
            members[kill % 2] = crew.restart(members[kill % 2])
        assert lanes[0].reclaimed + lanes[1].reclaimed > 0
