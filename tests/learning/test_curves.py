"""The curves of HalfCheetah-v5 beside Stable-Baselines3's: how they are averaged, and those that were committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest

from benchmarks.curves import FILE, LAST, SETTINGS, both, mean_return, ours, summary

SHORT = {**SETTINGS, "num_steps": 500, "num_epochs": 1, "minibatch_size": 250, "env_steps": 2_100}
COMMITTED = json.loads(FILE.read_text())
SYSTEMS = ["headrace", "stable-baselines3"]


def middle_half(values: Sequence[float]) -> float:
    """The mean between the quartiles: each value weighs as much as its share of the ranks lies in [1/4, 3/4]."""
    share = 1 / len(values)
    weights = [max(0.0, min(0.75, (k + 1) * share) - max(0.25, k * share)) for k in range(len(values))]
    return sum(weight * value for weight, value in zip(weights, sorted(values), strict=True)) / 0.5


def test_an_episode_counts_where_it_ended() -> None:
    run = {"ended": [10, 20, 30, 40], "returns": [1.0, 2.0, 4.0, 8.0]}
    assert mean_return(run, env_step=30, window=20) == 3.0
    assert mean_return(run, env_step=39, window=10) == 4.0


def test_training_tells_every_episode() -> None:
    run = ours(SHORT, seed=1)
    assert (run["system"], run["seed"]) == ("headrace", 1)
    assert run["ended"] == [1000, 2000]
    assert run["returns"] == [round(value, 1) for value in run["returns"]]
    assert all(-1_000 < value < 0 for value in run["returns"]), run  # of a policy that has learned nothing


def test_a_peer_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exit code 1"):
        both({**SHORT, "env_steps": 1}, seed=1, python="false")


def test_the_committed_curves_are_of_these_settings() -> None:
    assert COMMITTED["settings"] == SETTINGS, "the settings were changed after the curves were taken"


def test_the_committed_curves_are_of_seeds_101_to_103() -> None:
    made = [(run["system"], run["seed"]) for run in COMMITTED["runs"]]
    assert made == [(system, seed) for system in SYSTEMS for seed in (101, 102, 103)]
    assert len({tuple(run["returns"]) for run in COMMITTED["runs"]}) == len(made)


def test_both_committed_curves_are_of_the_same_environment() -> None:
    versions = {tuple(run["versions"][name] for name in ("gymnasium", "mujoco")) for run in COMMITTED["runs"]}
    assert len(versions) == 1, versions


@pytest.mark.parametrize("run", COMMITTED["runs"], ids=lambda run: f"{run['system']}-{run['seed']}")
def test_every_committed_episode_is_there(run: dict[str, Any]) -> None:
    """HalfCheetah never ends by itself: every episode takes as long as its time limit says."""
    limit = gymnasium.spec(SETTINGS["env"]).max_episode_steps
    assert run["ended"][: SETTINGS["env_steps"] // limit] == list(range(limit, SETTINGS["env_steps"] + 1, limit))
    assert len(run["returns"]) == len(run["ended"])
    assert np.isfinite(run["returns"]).all()


def test_the_committed_summary_is_that_of_the_runs() -> None:
    found = COMMITTED["summary"]
    again = summary(COMMITTED["runs"], SETTINGS["env_steps"])
    assert list(found) == list(again) == SYSTEMS
    for system in SYSTEMS:
        for was, now in ((found[system], again[system]), (found[system]["curve"], again[system]["curve"])):
            assert list(was) == list(now)
            for name in set(was) - {"curve"}:
                assert was[name] == pytest.approx(now[name], abs=0.11), name  # a sum's last bit may decide a rounding
        returns = [run["returns"][:300] for run in COMMITTED["runs"] if run["system"] == system]
        scores = [sum(its[250:]) / 50 for its in returns]
        assert found[system]["scores"] == pytest.approx(scores, abs=0.051)
        assert found[system]["iqm"] == pytest.approx(middle_half(scores), abs=0.051)
        assert found[system]["interval"] == pytest.approx([min(scores), max(scores)], abs=0.051)
        curve = [
            middle_half([sum(its[max(0, n - 20) : n]) / min(n, 20) for its in returns]) for n in range(10, 301, 10)
        ]
        assert found[system]["curve"]["iqm"] == pytest.approx(curve, abs=0.051)
        assert found[system]["curve"]["env_steps"] == [1_000 * n for n in range(10, 301, 10)]


def test_ours_learned_no_less_than_the_peer() -> None:
    mine, theirs = (COMMITTED["summary"][system] for system in SYSTEMS)
    assert mine["iqm"] >= theirs["interval"][0], (mine, theirs)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ours_still_learns_no_less_than_the_peer() -> None:
    """Seeds differ by hundreds, so half of the peer's lowest will do; who learns nothing stays below 0."""
    score = mean_return(ours(SETTINGS, seed=1), SETTINGS["env_steps"], LAST)
    assert score >= COMMITTED["summary"]["stable-baselines3"]["interval"][0] / 2
