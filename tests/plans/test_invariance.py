"""The law of the synchronous plans: the weights are a function of the seed, whatever the placement and its timing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import PPO, Inline
from headrace.envs.toy import Sleepy, Target

pytestmark = pytest.mark.timeout(60)

METHODS, LAGS, ACTORS, KINDS = ("a2c", "ppo"), (0, 1, 2), (1, 2, 3), ("discrete", "continuous", "recurrent")
TABLE = list(product(METHODS, LAGS, ACTORS, KINDS))

# Nine rows in which every pair of values of two columns occurs: `make test` runs these, `make test-all` the others.
COVERING = [
    (METHODS[min(1, (lag + 2 * actors) % 3)], LAGS[lag], ACTORS[actors], KINDS[(lag + actors) % 3])
    for lag, actors in product(range(3), range(3))
]


def test_the_covering_set_covers() -> None:
    for a, b in combinations(range(4), 2):
        assert {(row[a], row[b]) for row in COVERING} == {(row[a], row[b]) for row in TABLE}, (a, b)


@pytest.fixture
def who(tmp_path: Path, Noted: Any) -> Any:
    """who(env): the environment, which notes in which process it is made, and a function that reads these notes."""
    numbers = iter(range(1000))

    def wrap(env: Any) -> Any:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()

        def read() -> list[tuple[int, ...]]:
            found = {int(file.name): tuple(map(int, file.read_text().split())) for file in folder.iterdir()}
            return [found[rank] for rank in sorted(found)]

        return Noted(env, folder), read

    return wrap


def roles_were_real(name: str, noted: list[tuple[int, ...]], actors: int) -> None:
    """Whether each actor ran where its placement says."""
    pids, threads = {pid for pid, *_ in noted}, {thread for _, thread, _ in noted}
    assert len(noted) == actors
    assert all(torch_threads == 1 for *_, torch_threads in noted)
    if name == "processes":
        assert len(pids) == actors
        assert os.getpid() not in pids
    else:
        assert pids == {os.getpid()}
    if name == "threads":
        assert len(threads) == actors
        assert threading.get_native_id() not in threads


def hashes(
    setting: tuple[Any, ...], runs: Any, who: Any, task: Any, train: Any, digest: Any, places: Any
) -> Iterator[str]:
    """The hash of every run (placement, whether its environments sleep) of a setting."""
    method, max_lag, actors, kind = setting
    given, env = task(method, kind)
    for name, sleeps in runs:
        noting, read = who(Sleepy(env, 0.001) if sleeps else env)
        run = train(given, noting, places[name], max_lag=max_lag, actors=actors, anneal=True)
        assert 5 <= len(run.reports) <= 8
        roles_were_real(name, read(), actors)
        yield digest(run.learner)


def differs(setting: tuple[Any, ...], sha: str, task: Any, train: Any, digest: Any) -> None:
    """Whether learning did anything: other weights at the start, from another seed, at another learning rate."""
    method, max_lag, actors, kind = setting
    shas = {sha}
    for seed, fields in ((2, {}), (1, {"learning_rate": 1.1e-2})):
        given, env = task(method, kind, **fields)
        run = train(given, env, Inline(), seed=seed, max_lag=max_lag, actors=actors, anneal=True)
        shas.add(digest(run.learner))
        run.learner.net.load_state_dict(run.weights[0])
        shas.add(digest(run.learner))
    assert len(shas) == 5  # the start of seed 1 is that of both its learning rates, and differs from its ends


@pytest.mark.parametrize("setting", COVERING, ids=lambda setting: "-".join(map(str, setting)))
def test_one_hash_on_all_placements(setting: Any, who: Any, task: Any, train: Any, digest: Any, places: Any) -> None:
    whole = setting[1] == 1  # every kind, method and number of actors once; the others in the slow tier
    runs = [("inline", False), ("processes", True), *[("threads", True)] * whole]
    found = list(hashes(setting, runs, who, task, train, digest, places))
    assert found == found[:1] * len(runs)
    if whole:
        differs(setting, found[0], task, train, digest)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [row for row in TABLE if row not in COVERING], ids=lambda setting: "-".join(map(str, setting))
)
def test_one_hash_on_all_placements_in_the_rest_of_the_table(
    setting: Any, who: Any, task: Any, train: Any, digest: Any, places: Any
) -> None:
    runs = [("inline", False), ("inline", True), ("threads", True), ("processes", False), ("processes", True)]
    found = list(hashes(setting, runs, who, task, train, digest, places))
    assert found == found[:1] * len(runs)
    differs(setting, found[0], task, train, digest)


@pytest.mark.slow
@pytest.mark.parametrize("setting", COVERING, ids=lambda setting: "-".join(map(str, setting)))
def test_one_hash_over_repeats(setting: Any, who: Any, task: Any, train: Any, digest: Any, places: Any) -> None:
    runs = [*product(places, (False, True)), ("threads", True), ("processes", True)]
    found = list(hashes(setting, runs, who, task, train, digest, places))
    assert found == found[:1] * len(runs)
    differs(setting, found[0], task, train, digest)


def test_the_caller_s_torch_threads_change_nothing(task: Any, train: Any, digest: Any, within: Any) -> None:
    """Learner threads default to 1, whatever the caller's."""
    method, env = task("ppo", "recurrent", update_epochs=1, hidden=(32,))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            run = train(method, env, within, updates=3, actors=2, max_lag=1)
            assert torch.get_num_threads() == threads
            found.append(digest(run.learner))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_what_the_global_generators_hold_changes_nothing(task: Any, train: Any, digest: Any, within: Any) -> None:
    method, env = task("ppo", "continuous")
    found = set()
    for seed in (3, 4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found.add(digest(train(method, env, within, actors=2).learner))
    assert len(found) == 1


def test_the_plan_s_schedule_reaches_the_actors(task: Any, train: Any, digest: Any, places: Any) -> None:
    """A method that explores by how far the run is: the actors are told, and told the same on every placement."""

    @dataclass(frozen=True)
    class Cooling(PPO):
        heat: float = 1.0

        def noise(self, net: Any, num_steps: int, batch_size: int, rng: Any) -> Any:
            return PPO.noise(self, net, num_steps, batch_size, rng) * self.heat

        def anneal(self, progress: float) -> Any:
            return replace(PPO.anneal(self, progress), heat=max(0.0, 1 - 2 * progress))

    _, env = task("ppo", "continuous")
    method = Cooling(hidden=(8,), num_minibatches=3, update_epochs=1)
    runs = [train(method, env, place, updates=8, actors=2, max_lag=1, anneal=True) for place in places.values()]
    assert len({digest(run.learner) for run in runs}) == 1
    spread = []
    for rollout in runs[0].rollouts:  # log-probability of a mode is the highest that there is
        spread.append(rollout.log_prob[rollout.valid].std())
    assert spread[0] > 0.1
    assert spread[-1] < 1e-3


def test_a_method_s_class_in_the_driver_stays_as_it_is(place: Any, train: Any) -> None:
    """What a method of a user's own script does in the learner reaches that script's variables, on all placements."""
    heard: list[int] = []

    @dataclass(frozen=True)
    class Telling(PPO):
        def after_update(self, net: Any, version: int) -> None:
            heard.append(version)

    function = Telling.after_update
    train(Telling(hidden=(8,), num_minibatches=2), Target(), place, updates=3)
    assert heard == [1, 2, 3]
    assert Telling.after_update is function
