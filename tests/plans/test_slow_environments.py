"""Environments that are slow and well: nobody takes them for dead."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from headrace import A2C, AsyncBatches, Env, Learner, Processes, RoleFailed, Spec
from headrace.envs.base import VectorEnv
from headrace.envs.toy import Target

STEP = 3.0  # seconds that a step of an actor's environments takes
STALL_AFTER = 2.0  # seconds after which a process that has been stopped is taken for lost
BATCH = 100  # environment steps


@pytest.fixture
def slow() -> Callable[[], Env]:
    class Slow(VectorEnv):
        def __init__(self, inner: VectorEnv) -> None:
            self.num_envs, self.inner = inner.num_envs, inner

        def reset(self, seed: int) -> Any:
            return self.inner.reset(seed)

        def step(self, action: Any) -> Any:
            time.sleep(STEP)
            return self.inner.step(action)

        def close(self) -> None:
            self.inner.close()

    @dataclass(frozen=True)
    class SlowTarget(Env):
        @property
        def spec(self) -> Spec:
            return Target().spec

        def make(self, indices: range) -> VectorEnv:
            return Slow(Target().make(indices))

    return SlowTarget


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_HC_19_a_batch_that_takes_long_is_waited_for(
    slow: Callable[[], Env], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And who waits says for how long, for whom, and where they are."""
    monkeypatch.setattr("headrace.place.context.NOTED", STEP)
    caplog.set_level(logging.INFO, "headrace")
    env = slow()
    plan = AsyncBatches(actors=2, num_envs=50, num_steps=2, batch_rollouts=2)
    learner = Learner(A2C(), env.spec, seed=1)
    (report,) = plan.run(learner, env, Processes(stall_after=STALL_AFTER), env_steps=BATCH)
    assert report.env_steps >= BATCH
    assert report.metrics["perf/waited_seconds"] > 2 * STEP > STALL_AFTER
    said = [record.getMessage() for record in caplog.records]
    found = [
        re.match(r"waiting for data for (\d+) s, to take .*rollouts.*; collect\[1\]: stepping .*", line)
        for line in said
    ]
    assert found, said
    assert all(found), said
    assert re.search(r"collect\[0\]: stepping environments 0 to 24 \(row [01] of rollout 0\)", said[0]), said[0]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_HC_19_how_long_a_step_may_take_is_a_setting_of_its_own(slow: Callable[[], Env]) -> None:
    env = slow()
    plan = AsyncBatches(actors=2, num_envs=50, num_steps=2, batch_rollouts=2, env_timeout=1.0)
    learner = Learner(A2C(), env.spec, seed=1)
    with pytest.raises(RoleFailed, match=r"stepping environments \d+ to \d+ \(row 0 of rollout 0\)"):
        list(plan.run(learner, env, Processes(stall_after=STALL_AFTER), env_steps=BATCH))
