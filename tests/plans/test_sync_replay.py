"""SyncReplay: one run on every placement, the replay ratio as a law, which weights act, and what a snapshot holds."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import DQN, PPO, ConfigError, Gymnasium, Inline, Learner, Processes, SyncBatches, SyncReplay, Threads
from headrace.envs.toy import Identity, Sleepy

pytestmark = pytest.mark.timeout(60)

INLINE = Inline()
CARTPOLE = Gymnasium("CartPole-v1")
METHOD = DQN(hidden=(8,), learning_rate=3e-2, target_update_interval=3, exploration_fraction=0.6)
PRIORITISED = dataclasses.replace(METHOD, prioritized_replay_alpha=0.6, n_step=3)
SMALL = {"num_envs": 2, "num_steps": 4, "batch_size": 8, "ratio": 3.0, "learning_starts": 30, "buffer_size": 100}


def learn(
    plan: SyncReplay, place: Any = INLINE, method: Any = METHOD, env: Any = CARTPOLE, seed: int = 1, **run: Any
) -> tuple[Learner, list[Any]]:
    """A learner after a run, and the run's reports."""
    learner = Learner(method, env.spec, seed=seed)
    return learner, list(plan.run(learner, env, place, **{"env_steps": 150, **run}))


# One run, wherever it runs --------------------------------------------------------------------------------------------

TABLE = [
    (actors, max_lag, method, sleeps)
    for (actors, max_lag), method, sleeps in product(
        ((1, 0), (2, 0), (2, 1), (3, 2)), (METHOD, PRIORITISED), (False, True)
    )
]


def hashes(row: Any, places: Any) -> list[str]:
    actors, max_lag, method, sleeps = row
    plan = SyncReplay(**{**SMALL, "actors": actors, "num_envs": 6, "max_lag": max_lag})
    env = Sleepy(CARTPOLE, 0.0005) if sleeps else CARTPOLE
    return [learn(plan, place, method, env, env_steps=250)[0].digest() for place in places]


@pytest.mark.parametrize("row", [(2, 0, METHOD, False), (2, 1, PRIORITISED, True)], ids=["lock-step", "overlapped"])
def test_one_hash_on_inline_and_threads(row: Any) -> None:
    first, second = hashes(row, (Inline(), Threads()))
    assert first == second
    (other,) = hashes((row[0], 1 - row[1], *row[2:]), (Inline(),))
    assert other != first  # another lag is another run: learning did something


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}-{row[2].n_step}-{row[3]}")
def test_one_hash_on_all_placements(row: Any) -> None:
    found = hashes(row, (Inline(), Threads(), Processes()))
    assert found == found[:1] * 3


# The ratio ------------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    actors=st.integers(1, 3),
    width=st.integers(1, 3),
    num_steps=st.integers(1, 9),
    rates=st.sampled_from([(0.1, 1), (0.7, 5), (1.0, 16), (2.7, 8), (4.0, 64), (40.0, 256)]),
    learning_starts=st.integers(0, 40),
    max_lag=st.integers(0, 1),
)
def test_the_ratio_is_kept_whenever_new_data_is_taken(
    actors: int, width: int, num_steps: int, rates: tuple[float, int], learning_starts: int, max_lag: int
) -> None:
    ratio, batch_size = rates
    plan = SyncReplay(
        actors, actors * width, num_steps, ratio, batch_size, 300, learning_starts=learning_starts, max_lag=max_lag
    )
    env = Identity()
    learner, looks = Learner(METHOD, env.spec, seed=1), []
    hear = learner.hear

    def heard(rollout: Any) -> int:
        if rollout.rank[0] == 0:
            looks.append((learner.env_steps, learner.samples_learned))
        return hear(rollout)

    learner.hear = heard  # type: ignore[method-assign]
    reports, rounds = [], []
    two_rounds = actors * width * num_steps + 1
    for report in plan.run(learner, env, Inline(), env_steps=max(60, two_rounds)):
        reports.append(report)
        rounds.append(len(looks))
    assert len(looks) > 1
    for steps, samples in [*looks, (learner.env_steps, learner.samples_learned)]:
        due = ratio * max(0, steps - learning_starts)
        assert due - batch_size < samples <= due + 1e-9
    assert set(rounds) == {*range(1, len(looks) + 1)}  # each is told of
    assert [report.more for report in reports] == [after == now for now, after in pairwise([*rounds, 0])]
    last = reports[-1]
    assert last.samples_learned == batch_size * last.version
    assert last.metrics["replay/ratio"] == last.samples_learned / max(1, last.env_steps - learning_starts)
    assert last.replay_ratio == last.samples_learned / last.env_steps


def test_adding_actors_changes_no_number_that_shapes_learning() -> None:
    told = set()
    for actors in (1, 2, 4):
        _, reports = learn(SyncReplay(**{**SMALL, "num_envs": 4, "actors": actors}), env=Identity(lengths=(10**6,)))
        told.add((len(reports), reports[-1].env_steps, reports[-1].version, reports[-1].samples_learned))
    assert len(told) == 1


# What acts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_round_acts_with_the_weights_of_max_lag_rounds_before_and_at_random_at_first(max_lag: int) -> None:
    """Told by what the actors note: the learner's version, which counts updates and not rounds."""
    env, seen = Identity(lengths=(10**6,)), []
    method = dataclasses.replace(METHOD, exploration_initial_eps=0.0, exploration_final_eps=0.0)
    learner = Learner(method, env.spec, seed=1)
    hear, behind = learner.hear, [0]

    def heard(rollout: Any) -> int:
        versions = rollout.version.unique().tolist()
        assert versions == [behind[max(0, len(behind) - 1 - max_lag)]]
        with torch.no_grad():
            seen.append(bool((rollout.action == greedy(rollout)).all()))
        return hear(rollout)

    def greedy(rollout: Any) -> Any:
        flat = rollout.observation[:-1].flatten(0, 1)
        return method.act(learner.acting, flat, None, None).action.unflatten(0, rollout.action.shape)

    learner.hear = heard  # type: ignore[method-assign]
    plan = SyncReplay(**{**SMALL, "num_steps": 8, "max_lag": max_lag})
    for report in plan.run(learner, env, Inline(), env_steps=120):
        if not report.more:
            behind.append(report.version)
    assert behind[:3] == [0, 0, 0]  # 16 and 32 steps: 30 are stored first, then 8 samples have to be due
    assert behind[-1] > 20
    assert seen[:2] == [False, False]  # steps 0 to 31 begin below 30
    if max_lag == 0:
        assert all(seen[2:])


def test_rounds_without_an_update_are_told_too() -> None:
    _, reports = learn(SyncReplay(**{**SMALL, "ratio": 0.5}), env=Identity(lengths=(3, 5)))
    steps, versions = [report.env_steps for report in reports], [report.version for report in reports]
    assert all(before < after for before, after in pairwise(steps))
    assert steps[-1] >= 150 > steps[-2]
    assert versions[0] == 0
    assert len(set(versions)) < len(versions) - 5
    assert sum(report.episode_returns.size for report in reports) > 10
    assert all(report.lags.size for report in reports)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratio": 0}, "ratio=0: give the samples to learn per environment step, above 0"),
        ({"ratio": -1.0}, "ratio=-1.0"),
        ({"ratio": math.inf}, "ratio=inf"),
        ({"ratio": math.nan}, "ratio=nan"),
        ({"batch_size": 0}, "batch_size=0: give an integer from 1 on"),
        ({"buffer_size": 999}, "buffer_size=999 rows: .*Give at least 1,000"),
        ({"buffer_size": 50, "learning_starts": 10}, "a batch of 64 .*Give at least 64"),
        ({"buffer_size": 100, "learning_starts": 0, "num_steps": 101}, "num_steps = 101 rows .*Give at least 101"),
        ({"actors": 2, "num_envs": 3}, "cannot be divided evenly among 2 actors"),
        ({"max_lag": -1}, "max_lag=-1"),
        ({"env_timeout": 0}, "env_timeout=0"),
    ],
)
def test_HC_14_settings_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyncReplay(**fields)


def refused(plan: Any, method: Any, **run: Any) -> str:
    learner = Learner(method, CARTPOLE.spec)
    with pytest.raises(ConfigError) as found:
        plan.run(learner, CARTPOLE, Inline(), **{"env_steps": 10_000, **run})  # without asking for a report
    return str(found.value)


def test_a_method_that_does_not_learn_from_what_is_moved_is_refused_by_name() -> None:
    assert "PPO learns from fresh batches" in refused(SyncReplay(), PPO())
    assert "SyncReplay" in refused(SyncBatches(), METHOD)


def test_a_run_that_would_learn_nothing_and_a_store_without_room_are_refused_before_anything_starts() -> None:
    assert "learning_starts=1,000, and the run ends after 1,000" in refused(SyncReplay(), METHOD, env_steps=1_000)
    assert "available to this process" in refused(SyncReplay(buffer_size=10**12), METHOD)
    assert "n_step=300" in refused(SyncReplay(num_envs=4, buffer_size=1_000), dataclasses.replace(METHOD, n_step=300))


# Numbers that are not finite ------------------------------------------------------------------------------------------


def test_a_rollout_that_is_not_finite_is_left_out_of_the_store_and_counted() -> None:
    env = Identity(lengths=(10**6,))
    learner, numbers = Learner(METHOD, env.spec, seed=1, non_finite="skip"), []
    hear = learner.hear

    def heard(rollout: Any) -> int:
        if int(rollout.sequence[0]) == 6:
            rollout.reward[1, 0] = math.nan
        numbers.append(len(rollout.reward) * rollout.reward.shape[1])
        return hear(rollout)

    learner.hear = heard  # type: ignore[method-assign]
    *_, last = SyncReplay(**SMALL).run(learner, env, Inline(), env_steps=150)
    assert last.dropped == {"non_finite": 8}
    assert last.env_steps == sum(numbers)
    assert 3 * (last.env_steps - 8 - 30) - 8 < last.samples_learned <= 3 * (last.env_steps - 8 - 30)
    assert all(tensor.isfinite().all() for tensor in learner.net.state_dict().values())


# Going on -------------------------------------------------------------------------------------------------------------


def begun(plan: SyncReplay, at: int, method: Any = METHOD, place: Any = INLINE) -> tuple[Any, Learner]:
    """A snapshot at the report of this number, and the learner after the run had gone on."""
    learner, snapshot = Learner(method, CARTPOLE.spec, seed=1), None
    for number, report in enumerate(plan.run(learner, CARTPOLE, place, env_steps=150)):
        if number == at:
            snapshot = report.snapshot()
    assert snapshot is not None
    return snapshot, learner


def plain(tree: Any) -> Any:
    """A snapshot as plain values, which compare."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.tolist()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return (tree.version, dict(tree.values)) if hasattr(tree, "values") else tree


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 12, 17], ids=["before learning", "amid a round", "later"])
def test_CR_02_a_run_goes_on_with_its_replay(at: int) -> None:
    plan = SyncReplay(**{**SMALL, "actors": 2, "max_lag": 1})
    snapshot, _ = begun(plan, at, PRIORITISED)
    before = plain(snapshot)
    found = []
    for place in (Inline(), Threads()):
        learner = Learner(PRIORITISED, CARTPOLE.spec, seed=1)
        told = list(plan.run(learner, CARTPOLE, place, env_steps=150, state=snapshot))
        assert plain(snapshot) == before  # it is a copy: nothing reaches it
        assert told[0].version == snapshot["learner"]["counters"]["version"] + (at > 2)
        samples, steps = learner.samples_learned, learner.env_steps
        assert 3 * (steps - 30) - 8 < samples <= 3 * (steps - 30)
        found.append(learner.digest())
    assert found[0] == found[1]


def test_CR_02_what_is_drawn_next_is_what_would_have_been_drawn() -> None:
    """The rest of a round that a snapshot was taken amid needs no environment: it is the same to the bit."""
    plan = SyncReplay(**{**SMALL, "ratio": 40.0, "num_steps": 8})
    learner, weights, snapshot = Learner(PRIORITISED, CARTPOLE.spec, seed=1), {}, None
    for report in plan.run(learner, CARTPOLE, Inline(), env_steps=150):
        weights[report.version] = learner.digest()
        if report.version == 100:
            assert report.more
            snapshot, rounds = report.snapshot(), report.env_steps
    again, compared = Learner(PRIORITISED, CARTPOLE.spec, seed=7), 0
    for report in plan.run(again, CARTPOLE, Inline(), env_steps=150, state=snapshot):
        if report.env_steps > rounds:
            break
        assert again.digest() == weights[report.version]
        compared += 1
    assert compared >= 10


def test_CR_02_without_the_replay_learning_waits_and_the_saved_policy_collects() -> None:
    method = dataclasses.replace(METHOD, exploration_initial_eps=0.0, exploration_final_eps=0.0)
    plan = SyncReplay(**{**SMALL, "save_replay": False})
    snapshot, _ = begun(plan, 25, method)
    assert snapshot["replay"] is None
    version, steps = (snapshot["learner"]["counters"][name] for name in ("version", "env_steps"))
    assert version > 0
    learner, greedy = Learner(method, CARTPOLE.spec, seed=1), []
    hear = learner.hear

    def heard(rollout: Any) -> int:
        flat = rollout.observation[:-1].flatten(0, 1)
        best = method.act(learner.acting, flat, None, None).action.unflatten(0, rollout.action.shape)
        greedy.append(bool((rollout.action == best)[rollout.valid].all()))
        return hear(rollout)

    learner.hear = heard  # type: ignore[method-assign]
    reports = list(plan.run(learner, CARTPOLE, Inline(), env_steps=steps + 100, state=snapshot))
    assert all(greedy)
    waits = [report.version == version for report in reports]
    assert [report.env_steps - steps <= 30 + 8 for report in reports if report.version == version] == [True] * sum(
        waits
    )
    first = reports[waits.index(False)]
    assert first.env_steps - steps >= 30
    assert first.metrics["replay/size"] >= 30


@pytest.mark.slow
def test_HC_14_a_state_of_other_settings_is_refused_and_goes_on_without_its_replay() -> None:
    snapshot, _ = begun(SyncReplay(**SMALL), 20)
    for name, value, message in (
        ("ratio", 6.0, "counted with ratio=3.0, and this plan has 6.0"),
        ("learning_starts", 40, "counted with learning_starts=30, and this plan has 40"),
        ("buffer_size", 200, "buffer_size"),
        ("num_envs", 4, "num_envs"),
    ):
        plan = SyncReplay(**{**SMALL, name: value})
        with pytest.raises(ConfigError, match=message):
            learn(plan, state=snapshot, env_steps=400)
        learner, reports = learn(plan, state={**snapshot, "replay": None}, env_steps=400)
        assert learner.samples_learned > snapshot["learner"]["counters"]["samples_learned"]
        assert reports[-1].metrics["replay/ratio"] == pytest.approx(plan.ratio, rel=0.1)


def test_a_snapshot_is_asked_for_at_its_report() -> None:
    reports = SyncReplay(**SMALL).run(Learner(METHOD, CARTPOLE.spec), CARTPOLE, INLINE, env_steps=150)
    first = next(reports)
    next(reports)
    with pytest.raises(ConfigError, match="gone on from this report"):
        first.snapshot()
    reports.close()  # type: ignore[attr-defined]


def test_HC_14_the_ratio_over_10_000_inserts_is_within_a_tenth_of_4() -> None:
    plan = SyncReplay(num_envs=50, num_steps=5, ratio=4.0, batch_size=400, buffer_size=1_000, learning_starts=100)
    env = Identity(lengths=(10**6,))
    learner = Learner(DQN(hidden=(4,)), env.spec, seed=1)
    *_, last = plan.run(learner, env, Inline(), env_steps=10_100)
    assert last.env_steps - 100 >= 10_000
    assert last.metrics["replay/ratio"] == pytest.approx(4.0, rel=0.1)
    assert last.metrics["replay/size"] == 1_000
    assert 0 < last.metrics["replay/age"] < 1_000
