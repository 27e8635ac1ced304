"""Rows of metrics: what they are means of, where they end, and that they go on from a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from headrace.encoding import Decoder, Encoder
from headrace.record.disk import json_text
from headrace.record.metrics import CURVE, EPISODES, MAX_ROWS, Metrics
from headrace.report import Report

Telling = Callable[..., Report]


def random_reports(told: Telling, count: int) -> Iterator[Report]:
    rng = np.random.default_rng(3)
    for version in range(1, count + 1):
        ended = int(rng.integers(0, 4))
        yield told(
            version,
            rng.normal(size=ended).tolist(),
            rng.integers(1, 50, ended).tolist(),
            lags=rng.integers(0, 6, 40).tolist(),
            metrics={"losses/policy_loss": float(rng.normal())} if version % 3 else {},
            learning_rates={"net": 0.5 / version},
        )


@pytest.mark.parametrize("every", [1, 7])
def test_a_row_is_the_mean_over_its_updates(told: Telling, every: int) -> None:
    reports = list(random_reports(told, 42))
    metrics = Metrics(every * 100 * MAX_ROWS)
    rows = [row for report in reports if (row := metrics.add(report))]
    assert len(rows) == 42 // every
    for number, row in enumerate(rows):
        its = reports[number * every : (number + 1) * every]
        so_far = reports[: (number + 1) * every]
        returns, lengths, lags, past = (
            np.concatenate([getattr(report, name) for report in some]).astype(np.float64)
            for name, some in (
                ("episode_returns", its),
                ("episode_lengths", its),
                ("lags", its),
                ("episode_returns", so_far),
            )
        )
        losses = [report.metrics["losses/policy_loss"] for report in its if report.metrics]
        last = its[-1]
        assert row["global_step"] == last.env_steps
        assert row["charts/episodes_finished"] == past.size
        assert row.get("charts/episodic_return") == (pytest.approx(returns.mean()) if returns.size else None)
        assert row.get("charts/episodic_length") == (pytest.approx(lengths.mean()) if returns.size else None)
        assert row.get("episodes", []) == [list(pair) for pair in zip(returns, lengths, strict=True)]
        assert row.get("charts/return_mean100") == (pytest.approx(past[-100:].mean()) if past.size else None)
        assert row.get("losses/policy_loss") == (pytest.approx(np.mean(losses)) if losses else None)
        p50, p95 = np.percentile(lags, (50, 95))
        assert (row["lag/versions_p50"], row["lag/versions_p95"]) == (pytest.approx(p50), pytest.approx(p95))
        assert row["lag/versions_max"] == lags.max()
        assert row["charts/learning_rate"] == last.learning_rates["net"]
    assert metrics.flush() is None


def test_several_optimizers_tell_their_learning_rates_by_name(told: Telling) -> None:
    row = Metrics(1_000).add(told(1, learning_rates={"actor": 0.1, "critic": 0.2}))
    assert row is not None
    assert (row["charts/learning_rate/actor"], row["charts/learning_rate/critic"]) == (0.1, 0.2)


def test_US_04_before_the_first_end_there_is_no_return_but_what_runs(told: Telling) -> None:
    """Episodes of 10,000 steps, a report every 500."""
    metrics = Metrics(20_000)
    rows = []
    for version in range(1, 21):
        ended = version == 20
        rows.append(
            metrics.add(
                told(
                    version,
                    [123.0] if ended else [],
                    [10_000] if ended else [],
                    env_steps=500 * version,
                    running_return=None if ended else 6.0 * version,
                    running_length=None if ended else 500.0 * version,
                )
            )
        )
        assert (metrics.return_mean100 is None) == (not ended)
        assert (metrics.best_return is None) == (not ended)
    for version, row in enumerate(rows[:-1], start=1):
        assert row is not None
        assert row["charts/episodes_finished"] == 0
        assert (row["charts/running_return"], row["charts/running_length"]) == (6.0 * version, 500.0 * version)
        assert not {"charts/episodic_return", "charts/episodic_length", "charts/return_mean100"} & set(row)
        assert json.loads(json_text(row), parse_constant=pytest.fail) == row
    last = rows[-1]
    assert last is not None
    assert (last["charts/episodic_return"], last["charts/return_mean100"]) == (123.0, 123.0)
    assert "charts/running_return" not in last


def test_what_is_not_finite_is_null(told: Telling) -> None:
    row = Metrics(1_000).add(told(1, [math.nan], metrics={"losses/policy_loss": math.inf}))
    held = json.loads(json_text(row), parse_constant=pytest.fail)
    assert (held["losses/policy_loss"], held["charts/return_mean100"], held["episodes"]) == (None, None, [[None, 7]])


@pytest.mark.parametrize(("total", "batch"), [(10_000, 7), (10_000, 200), (10_000, 201), (250, 100), (123, 1), (3, 9)])
def test_rows_are_one_an_update_up_to_a_number_that_they_never_pass(
    told: Telling, monkeypatch: pytest.MonkeyPatch, total: int, batch: int
) -> None:
    assert MAX_ROWS == 10_000
    monkeypatch.setattr("headrace.record.metrics.MAX_ROWS", 50)
    metrics, updates = Metrics(total), -(-total // batch)
    rows = [metrics.add(told(version, env_steps=batch * version)) for version in range(1, updates + 1)]
    assert sum(row is not None for row in rows) == min(updates, 50)
    assert metrics.flush() is None


@pytest.mark.parametrize("stop", [1, 20, 34, 35])
def test_going_on_from_a_state_gives_the_rows_that_would_have_been(told: Telling, stop: int) -> None:
    reports = list(random_reports(told, 70))
    straight, first, second = (Metrics(7 * 100 * MAX_ROWS) for _ in range(3))
    wanted = [straight.add(report) for report in reports]
    rows = [first.add(report) for report in reports[:stop]]
    encoder = Encoder("state")
    held = json.loads(json.dumps(encoder.encode(first.state())))
    assert not encoder.tensors
    first.flush()  # as the end of an interrupted run does
    second.load_state(Decoder("a test", dict, dict).decode(held))
    assert rows + [second.add(report) for report in reports[stop:]] == wanted
    assert second.state() == straight.state()
    assert (second.best_return, second.curve) == (straight.best_return, straight.curve)


def test_a_longer_run_goes_on_with_rows_of_its_own_length(told: Telling) -> None:
    first, second = Metrics(MAX_ROWS * 100), Metrics(MAX_ROWS * 200)
    for version in range(1, 5):
        first.add(told(version))
    second.load_state(first.state())
    assert [second.add(told(version)) is not None for version in range(5, 9)] == [False, True, False, True]


def test_the_curve_is_the_whole_run_thinned(told: Telling) -> None:
    metrics = Metrics(1_000_000)
    report = told(1, [0.0])
    for value in range(5 * CURVE):
        object.__setattr__(report, "episode_returns", np.full(100, value, np.float32))
        object.__setattr__(report, "episode_lengths", np.full(100, 1, np.int32))
        metrics.add(report)
        steps = np.diff(metrics.curve)
        assert (steps == steps[:1]).all()
        assert metrics.curve[0] == 0.0
        assert len(metrics.curve) <= CURVE
    assert len(metrics.curve) > CURVE // 2
    assert metrics.curve[-1] == pytest.approx(5 * CURVE, abs=steps[0] + 1)
    assert metrics.best_return == 5 * CURVE - 1


def test_a_row_tells_of_so_many_episodes_one_by_one(told: Telling) -> None:
    returns = [float(number) for number in range(EPISODES + 50)]
    row = Metrics(1_000).add(told(1, returns))
    assert row is not None
    assert [episode[0] for episode in row["episodes"]] == returns[:EPISODES]
    assert row["charts/episodic_return"] == np.mean(returns)
    assert row["charts/episodes_finished"] == EPISODES + 50
