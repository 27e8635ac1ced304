"""Methods learn: one seed here, ten seeds in the results that were committed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.learning import LEARNED, TASKS, train

CARTPOLE = ["ppo-cartpole", "a2c-cartpole"]
WORST = 400  # of ten seeds on CartPole
GUESSING = 0.7  # on the memory task, whose cue is one of two: 0.5, and what 50 episodes add to it by chance


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CARTPOLE, "a2c-recall-gru"])
def test_it_learns(name: str) -> None:
    result = train(TASKS[name], seed=1)
    assert result["score"] >= TASKS[name].threshold, result


@pytest.mark.slow
def test_without_memory_the_memory_task_is_guesswork() -> None:
    result = train(TASKS["a2c-recall-forward"], seed=1)
    assert result["score"] <= GUESSING, result


def committed(name: str) -> list[dict[str, Any]]:
    data = json.loads((LEARNED / f"{name}.json").read_text())
    assert data["setting"] == repr(TASKS[name]), "the task was changed after its results were taken"
    return data["results"]


@pytest.mark.parametrize("name", TASKS)
def test_the_results_are_of_seeds_101_to_110(name: str) -> None:
    assert [result["seed"] for result in committed(name)] == list(range(101, 111))


@pytest.mark.parametrize("name", [*CARTPOLE, "a2c-recall-gru"])
def test_nine_of_ten_seeds_learned(name: str) -> None:
    scores = [result["score"] for result in committed(name)]
    assert sum(score >= TASKS[name].threshold for score in scores) >= 9, scores
    if name in CARTPOLE:
        assert min(scores) >= WORST, scores


def test_no_seed_solved_the_memory_task_without_memory() -> None:
    assert max(result["score"] for result in committed("a2c-recall-forward")) <= GUESSING
