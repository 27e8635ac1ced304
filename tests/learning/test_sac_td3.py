"""SAC and TD3 learn: one seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.learning import UNSCORED, train

EARLY = {"env_steps": 10_000, "threshold": -250}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["sac-pendulum", "td3-pendulum"])
def test_the_pendulum_is_swung_up_within_10_000_steps(name: str) -> None:
    task = replace(UNSCORED[name], **EARLY)
    result = train(task, seed=1)
    assert result["score"] >= task.threshold, result


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["sac-pendulum", "td3-pendulum", "sac-cartpole"])
def test_it_learns(name: str) -> None:
    result = train(UNSCORED[name], seed=1)
    assert result["score"] >= UNSCORED[name].threshold, result
