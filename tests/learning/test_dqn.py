"""DQN learns: the median of its last five evaluations, of one seed."""

from __future__ import annotations

import pytest

from benchmarks.learning import UNSCORED, train


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dqn_solves_cartpole() -> None:
    task = UNSCORED["dqn-cartpole"]
    result = train(task, seed=1)
    assert result["score"] >= task.threshold, result
