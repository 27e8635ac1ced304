"""The verdict names the bottleneck that was put there, and says nothing where there is none to name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headrace import Threads, role
from headrace.record.timeline import Timeline
from headrace.view.moment import Queue, Stage
from headrace.view.verdict import SILENT, verdict


def stages(actors: Sequence[tuple[float, float, float]], learner: tuple[float, float, float]) -> list[Stage]:
    """Of shares of time: busy, starved, blocked."""
    return [Stage("driver", 0, 10.0, *learner), *(Stage("collect", k, 10.0, *it) for k, it in enumerate(actors))]


def queues(*fills: float) -> list[Queue]:
    return [Queue(f"rollouts[{k}]", 10.0, fill, 1) for k, fill in enumerate(fills)]


def said(found: list[Stage], fills: list[Queue], **known: Any) -> str:
    known = {"seconds": 60.0, "cores_busy": 1.0, "cores": 8, "lock_step": False, **known}
    return verdict(found, fills, **known) or ""


SLOW_ACTORS = stages([(0.95, 0.05, 0.0)] * 2, (0.45, 0.55, 0.0))
SLOW_LEARNER = stages([(0.55, 0.05, 0.4)] * 2, (0.97, 0.03, 0.0))
BALANCED = stages([(0.95, 0.05, 0.0)] * 2, (0.92, 0.08, 0.0))
IN_TURN = stages([(0.6, 0.4, 0.0)] * 2, (0.38, 0.62, 0.0))


def test_an_empty_queue_and_a_starved_learner_are_the_actors_doing() -> None:
    line = said(SLOW_ACTORS, queues(0.0, 0.1))
    assert line.startswith("the actors are the bottleneck (busy 95 %, the learner waits 55 %)")
    assert "Try --plan.actors 4." in line


def test_a_full_queue_and_blocked_actors_are_the_learner_s_doing() -> None:
    line = said(SLOW_LEARNER, queues(1.0, 0.9))
    assert line.startswith("the learner is the bottleneck (busy 97 %, the actors wait 45 %)")
    assert "--update-epochs" in line


def test_actors_that_wait_for_weights_instead_of_room_are_the_learner_s_doing_too() -> None:
    line = said(stages([(0.55, 0.45, 0.0)] * 2, (0.97, 0.03, 0.0)), queues(1.0, 1.0))
    assert line.startswith("the learner is the bottleneck")


def test_inference_that_is_busy_while_actors_wait() -> None:
    found = [*stages([(0.3, 0.7, 0.0)] * 2, (0.3, 0.7, 0.0)), Stage("infer", 0, 500.0, 0.9, 0.1, 0.0)]
    line = said(found, queues(0.0, 0.0))
    assert line.startswith("inference is the bottleneck (busy 90 %, the actors wait 70 %)")
    assert "--plan.num-envs" in line


def test_nobody_busy_means_that_handing_over_costs_most() -> None:
    line = said(stages([(0.5, 0.2, 0.3)] * 2, (0.48, 0.52, 0.0)), queues(0.5, 0.5))
    assert line.startswith("handing over costs most (the busiest, collect[0], works 50 % of its time)")
    assert "--plan.num-steps" in line


@pytest.mark.parametrize("lock_step", [False, True])
def test_one_that_is_far_busier_than_the_others_holds_them_up(lock_step: bool) -> None:
    found = stages([(0.4, 0.3, 0.3), (0.95, 0.05, 0.0), (0.46, 0.24, 0.3)], (0.25, 0.75, 0.0))
    line = said(found, queues(0.3, 0.0, 0.2), lock_step=lock_step)
    assert line.startswith("collect[1] holds up the others (busy 95 %, they wait 57 %)")
    assert "fewer --plan.actors" in line


def test_a_full_cpu() -> None:
    line = said(BALANCED, queues(0.5, 0.5), cores_busy=1.97, cores=2)
    assert line.startswith("the CPU is full (2.0 of 2 cores busy). Try --plan.actors 1")


def test_a_full_cpu_has_no_room_for_more_actors() -> None:
    assert said(SLOW_ACTORS, queues(0.0, 0.0), cores_busy=3.9, cores=4).startswith("the CPU is full (3.9 of 4")
    assert "--plan" not in said(SLOW_ACTORS, queues(0.0, 0.0), cores_busy=3.9, cores=4)


def test_lock_step_is_named_where_both_parts_count() -> None:
    line = said(IN_TURN, queues(0.0, 0.0), lock_step=True)
    assert line.startswith("actors and learner wait for each other in turn (acting 60 % of the time, learning 38 %)")
    assert "Try --plan.max-lag 1" in line


def test_lock_step_where_one_part_takes_nearly_all() -> None:
    line = said(stages([(0.9, 0.1, 0.0)], (0.08, 0.92, 0.0)), queues(0.0), lock_step=True)
    assert line.startswith("the actors are the bottleneck")
    line = said(stages([(0.1, 0.9, 0.0)], (0.9, 0.1, 0.0)), queues(0.0), lock_step=True)
    assert line.startswith("the learner is the bottleneck")


def test_one_role_at_a_time_is_told_by_shares() -> None:
    found = stages([(0.6, 0.4, 0.0)], (0.38, 0.62, 0.0))
    line = said(found, queues(0.0), lock_step=True, one_at_a_time=True)
    assert line.startswith("one role works at a time (acting 60 % of it, learning 38 %)")
    assert "--place processes --plan.max-lag 1" in line
    assert "--place" not in said(found, queues(0.0), lock_step=True, one_at_a_time=True, cores=1)
    found = stages([(0.05, 0.95, 0.0), (0.05, 0.95, 0.0)], (0.88, 0.12, 0.0))
    line = said(found, queues(0.0, 0.0), lock_step=True, one_at_a_time=True)
    assert line.startswith("one role works at a time (acting 10 % of it, learning 88 %)")
    assert "--update-epochs" in line


def test_nothing_is_said_where_everybody_works() -> None:
    assert verdict(BALANCED, queues(0.5, 0.5), 60.0, 3.0, 8, lock_step=False) is None


def test_nothing_is_said_before_there_is_anything_to_see() -> None:
    assert verdict([], [], 60.0, 3.0, 8, lock_step=False) is None
    assert verdict([Stage("driver", 0, 1.0, 1.0, 0.0, 0.0)], [], 60.0, 3.0, 8, lock_step=False) is None


@pytest.mark.parametrize("found", [SLOW_ACTORS, SLOW_LEARNER], ids=["actors", "learner"])
def test_nothing_is_said_in_the_first_ten_seconds(found: list[Stage]) -> None:
    fills = queues(0.0, 0.0) if found is SLOW_ACTORS else queues(1.0, 1.0)
    assert SILENT == 10.0
    assert verdict(found, fills, 9.99, 1.0, 8, lock_step=False) is None
    assert verdict(found, fills, 10.0, 1.0, 8, lock_step=False) is not None


def watched(act: Sequence[float], learn: float, max_lag: int | None) -> str:
    """What is said of actors that take act[rank] seconds for a rollout, and a learner that takes `learn`.

    max_lag: how exactly an actor waits for weights, as in SyncBatches; None: it never does.
    """

    def collect(weights: Any, lanes: Any, act: Sequence[float], max_lag: int | None) -> None:
        rank = role().rank
        for number in lanes[rank].deliveries():
            if max_lag is not None:
                weights.pull({"w": torch.zeros(1)}, version=max(0, number - max_lag))
            time.sleep(act[rank])
            lanes[rank].put(number)

    timeline, found = Timeline(), ""
    with Threads().crew() as crew:
        weights = crew.weights({"w": torch.zeros(1)}, (max_lag or 0) + 1, name="weights")
        lanes = crew.lanes(len(act), max(1, max_lag or 0), like=0, name="rollouts")
        crew.start(collect, weights, lanes, tuple(act), max_lag, copies=len(act))
        version, began, looked = 0, time.monotonic(), False
        while (now := time.monotonic()) < began + 1.2:
            lanes.take_each(timeout=10.0)
            time.sleep(learn)
            version += 1
            weights.publish({"w": torch.zeros(1)}, version)
            if not looked and now > began + 0.3:
                timeline.look(crew)  # what came before was the start
                looked = True
        timeline.look(crew)
        found = verdict(timeline.stages, timeline.queues, 60.0, 0.1, 8, lock_step=max_lag == 0) or ""
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "learn", "max_lag", "expected"),
    [
        ((0.05, 0.05), 0.005, None, "the actors are the bottleneck"),
        ((0.05, 0.05), 0.005, 1, "the actors are the bottleneck"),
        ((0.005, 0.005), 0.05, None, "the learner is the bottleneck"),
        ((0.005, 0.005), 0.05, 1, "the learner is the bottleneck"),
        ((0.005, 0.005), 0.05, 0, "the learner is the bottleneck"),
        ((0.03, 0.03), 0.03, 0, "actors and learner wait for each other in turn"),
        ((0.005, 0.05), 0.002, 1, "collect[1] holds up the others"),
    ],
)
def test_the_verdict_on_real_roles(act: Sequence[float], learn: float, max_lag: int | None, expected: str) -> None:
    found = watched(act, learn, max_lag)
    assert found.startswith(expected), found
