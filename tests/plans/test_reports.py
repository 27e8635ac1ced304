"""What a report says, to the last digit, against environments whose every reward is known."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from headrace import A2C, PPO, Inline, Learner, Report
from headrace.envs.toy import Scripted

pytestmark = pytest.mark.timeout(60)

# Of environment 0, by row: 1 2 3 end · 10 20 end · 1 2 3 … ; environment 1 only knows an episode of seven steps.
SCRIPT = [((1, 2, 3), "terminated"), ((10, 20), "truncated")]
OTHER = [((-1, 0.5, 0, 0, 0, 0, 100), "truncated")]


def test_returns_and_lengths_are_those_of_the_episodes_that_ended(place: Any, train: Any) -> None:
    env = Scripted(SCRIPT, [OTHER])
    run = train(A2C(hidden=(4,)), env, place, updates=4, num_envs=2, actors=2, num_steps=5)
    # row      0  1  2  3  4 | 5  6  7  8  9 | 10 11 12 13 14 | 15 16 17 18 19
    # env 0    1  2  3  –  10| 20 –  1  2  3 | –  10 20 –  1  | 2  3  –  10 20
    # env 1    -1 ½  0  0  0 | 0 100 –  -1 ½ | 0  0  0  0 100 | –  -1 ½  0  0
    returns = [[6.0], [30.0, 99.5, 6.0], [30.0, 99.5], [6.0, 30.0]]
    lengths = [[3], [2, 7, 3], [2, 7], [3, 2]]
    assert [report.episode_returns.tolist() for report in run.reports] == returns
    assert [report.episode_lengths.tolist() for report in run.reports] == lengths
    assert [report.env_steps for report in run.reports] == [9, 17, 25, 33]
    for report, rollout in zip(run.reports, run.rollouts, strict=True):
        assert report.episode_returns.dtype == np.float32
        assert report.episode_lengths.dtype == np.int32
        assert rollout.episode_return[rollout.episode_length == 0].eq(0).all()


def test_episodes_that_run_on_are_told_of_too(train: Any) -> None:
    run = train(A2C(hidden=(4,)), Scripted(SCRIPT, [OTHER]), Inline(), updates=4, num_envs=2, actors=2, num_steps=5)
    # After rows 4, 9, 14, 19 of the table above: (10, -½), (6 has ended, -½ of two steps), (1, 99½ has ended), …
    told = [(report.running_return, report.running_length) for report in run.reports]
    assert told == [((10 - 0.5) / 2, (1 + 5) / 2), (-0.5, 2), (1, 1), (-0.5, 4)]


def test_before_an_episode_has_begun_nothing_is_told_of_it(train: Any) -> None:
    run = train(A2C(hidden=(4,)), Scripted([((1, 2), "truncated")]), Inline(), updates=1, num_envs=1, num_steps=2)
    assert (run.reports[0].running_return, run.reports[0].running_length) == (None, None)


@pytest.mark.parametrize(
    ("method", "gradient_steps", "ratio"),
    [
        (A2C(hidden=(4,)), 1, 1.0),
        (PPO(hidden=(4,), update_epochs=3, num_minibatches=5), 15, 3.0),
        (PPO(hidden=(4,), update_epochs=2, num_minibatches=2, memory="gru"), 4, 2.0),
    ],
)
def test_counters(method: Any, gradient_steps: int, ratio: float, train: Any) -> None:
    run = train(method, Scripted(SCRIPT), Inline(), updates=4, num_envs=2, actors=2, num_steps=5)
    for k, (report, env_steps) in enumerate(zip(run.reports, (8, 16, 22, 30), strict=True), 1):
        assert (report.version, report.updates) == (k, k)
        assert report.env_steps == env_steps
        assert report.gradient_steps == k * gradient_steps
        assert report.samples_learned == ratio * env_steps
        assert report.replay_ratio == ratio
        assert report.dropped == {}
    learner = run.learner
    assert learner.env_steps == 30
    assert learner.version == 4


def test_an_update_that_target_kl_ends_early_counts_what_it_learned(train: Any) -> None:
    method = PPO(hidden=(4,), update_epochs=3, num_minibatches=5, target_kl=1e-9, learning_rate=0.1)
    run = train(method, Scripted(SCRIPT), Inline(), updates=4, num_envs=2, num_steps=5)
    assert run.reports[-1].gradient_steps < 4 * 15
    assert run.reports[-1].replay_ratio < 3


@pytest.mark.parametrize("max_lag", [0, 1, 2, 3])
def test_lag(max_lag: int, train: Any) -> None:
    run = train(A2C(hidden=(4,)), Scripted(SCRIPT), Inline(), num_envs=2, actors=2, num_steps=5, max_lag=max_lag)
    for k, (report, rollout) in enumerate(zip(run.reports, run.rollouts, strict=True)):
        lag = min(k, max_lag)
        assert report.lag == (lag, lag, lag)
        assert report.lags.tolist() == [lag] * int(rollout.valid.sum())


def test_percentiles_of_the_lag() -> None:
    lags = np.repeat(np.array([0, 1, 7], np.int32), [60, 39, 1])
    counters = dict.fromkeys(("version", "env_steps", "frames", "gradient_steps", "samples_learned"), 0)
    nothing = {**counters, "dropped": {}, "metrics": {}}
    none = np.empty(0)
    report = Report(**nothing, episode_returns=none, episode_lengths=none, lags=lags)
    assert report.lag == (0.0, 1.0, 7)
    assert Report(**nothing, episode_returns=none, episode_lengths=none, lags=none).lag == (0.0, 0.0, 0)
    assert report.replay_ratio == 0


@pytest.mark.parametrize("method", [A2C(hidden=(4,)), PPO(hidden=(4,), num_minibatches=2, memory="gru")])
def test_metrics_are_plain_numbers_by_known_names(method: Any, train: Any) -> None:
    run = train(method, Scripted(SCRIPT), Inline(), updates=2, num_envs=2, actors=2, num_steps=5)
    names = {"losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/explained_variance"}
    if isinstance(method, PPO):
        names |= {"losses/approx_kl", "losses/clipfrac"}
    for report in run.reports:
        assert set(report.metrics) == names
        assert all(type(value) is float and np.isfinite(value) for value in report.metrics.values())
        assert json.loads(json.dumps(dict(report.metrics))) == report.metrics
        assert 0 < report.metrics["losses/entropy"] <= np.log(2) + 1e-6


def test_metrics_are_means_over_the_valid_rows(train: Any) -> None:
    """The value loss of an untrained constant critic, worked out by hand."""

    @dataclasses.dataclass(frozen=True)
    class Constant(A2C):
        def build(self, spec: Any, rng: Any) -> Any:
            net: Any = A2C.build(self, spec, rng)
            net.value.out.weight.data.zero_()
            return net

    # V = 0 and γ = 0, so a row's target is its reward: 1 2 3 – 10, and -1 ½ 0 0 0.
    env = Scripted(SCRIPT, [OTHER])
    run = train(Constant(hidden=(4,), gamma=0.0), env, Inline(), updates=1, num_envs=2, num_steps=5)
    (report,) = run.reports
    squares = [1, 4, 9, 100, 1, 0.25, 0, 0, 0]
    assert report.metrics["losses/value_loss"] == pytest.approx(np.mean(squares), rel=1e-5)
    assert report.metrics["losses/explained_variance"] == pytest.approx(0, abs=1e-6)


def test_a_report_holds_no_tensor(train: Any) -> None:
    run = train(PPO(hidden=(4,), num_minibatches=2, memory="gru"), Scripted(SCRIPT), Inline(), num_envs=2, num_steps=5)
    for report in run.reports:
        for field in dataclasses.fields(report):
            value = getattr(report, field.name)
            held = value.values() if isinstance(value, dict) else [value]
            assert not any(isinstance(each, torch.Tensor) for each in held)


def test_what_a_learner_by_itself_reports(train: Any) -> None:
    """A rollout can be prepared and learned from without any plan: the same numbers."""
    env, method = Scripted(SCRIPT), A2C(hidden=(4,))
    run = train(method, env, Inline(), updates=1, num_envs=2, num_steps=5)
    learner = Learner(method, env.spec, seed=1)
    report = learner.update(learner.prepare(run.rollouts[0]))
    (other,) = run.reports
    assert report.metrics == other.metrics
    assert report.env_steps == other.env_steps
    assert report.episode_returns.tolist() == other.episode_returns.tolist()
