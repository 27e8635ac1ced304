"""How a run ends: as asked, by a failure, or before it begins; and that it leaves nothing behind."""

from __future__ import annotations

import dataclasses
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace import A2C, PPO, ConfigError, Gymnasium, Inline, Learner, RoleFailed, Stalled, SyncBatches, evaluate
from headrace.envs.toy import Identity, Target

pytestmark = pytest.mark.timeout(60)

BOUND = 6.0
"""Seconds in which a failure is reported: promised are 2, with threefold room for a busy machine."""

SMALL = A2C(hidden=(8,))


def begin(env: Any, place: Any, method: Any = SMALL, *, env_steps: float = 10**9, **plan: Any) -> Iterator[Any]:
    plan = {"actors": 2, "num_envs": 6, "num_steps": 8, **plan}
    return SyncBatches(**plan).run(Learner(method, env.spec, seed=1), env, place, env_steps=env_steps)


# As asked -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.005)


def use_it_up(reports: Iterator[Any]) -> None:
    assert [report.version for report in reports] == [1, 2, 3]


def break_out(reports: Iterator[Any]) -> None:
    for report in reports:
        if report.version == 2:
            break


def raise_in_the_loop(reports: Iterator[Any]) -> None:
    def loop() -> None:
        for report in reports:
            _ = 1 / (report.version - 2)

    with pytest.raises(ZeroDivisionError):
        loop()


def close(reports: Any) -> None:
    next(reports)
    reports.close()
    assert list(reports) == []


def never_begin(reports: Any) -> None:
    pass


def throw(reports: Any) -> None:
    next(reports)
    with pytest.raises(KeyboardInterrupt):
        reports.throw(KeyboardInterrupt)


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize(
    "use", [use_it_up, break_out, raise_in_the_loop, close, never_begin, throw], ids=lambda use: use.__name__
)
def test_nothing_is_left(place: Any, use: Callable[[Any], None]) -> None:
    """Processes are looked for after every test; threads are by the fixture here."""
    use(begin(Identity((30,)), place, max_lag=2, env_steps=3 * 48 - 10))


def test_a_run_ends_with_the_update_that_reaches_env_steps() -> None:
    """Rollouts of 48 steps together: what is asked for is a least number, and no update is made beyond it."""
    env = Identity((1000,))
    for env_steps, updates in ((1, 1), (48, 1), (49, 2), (96, 2), (97, 3)):
        reports = list(begin(env, Inline(), env_steps=env_steps))
        assert [report.env_steps for report in reports] == [48 * (k + 1) for k in range(updates)]
    for env_steps in (0, -1):
        assert list(begin(env, Inline(), env_steps=env_steps)) == []


def everything_global() -> dict[str, Any]:
    started: list[int] = []
    thread = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return {
        "torch generator": torch.get_rng_state().tolist(),
        "numpy generator": pickle.dumps(np.random.get_state()),
        "random": random.getstate(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "threads of a new thread": started[0],
        "interop threads": torch.get_num_interop_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "denormals": (torch.tensor([1e-39]) * 0.5).item() != 0,
        "float errors": np.geterr(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    }


@pytest.mark.parametrize("use", ["to the end", "break", "role fails"])
def test_what_is_global_stays_as_it_is(place: Any, use: str, Failing: Any) -> None:
    caller = torch.get_num_threads()
    torch.set_num_threads(2)  # not what roles and learners use
    try:
        before = everything_global()
        env: Any = Target(length=5)
        if use == "role fails":
            env = Failing(env, 4, 20)
        method = PPO(hidden=(8,), update_epochs=1, memory="gru", num_minibatches=2)
        try:
            for report in begin(env, place, method, max_lag=1, env_steps=110):
                assert everything_global() == before
                if report.version == 2 and use == "break":
                    break
        except RoleFailed:
            assert use == "role fails"
        assert everything_global() == before
    finally:
        torch.set_num_threads(caller)


def test_building_a_learner_and_evaluating_leave_what_is_global() -> None:
    env = Gymnasium("CartPole-v1")
    before = everything_global()
    learner = Learner(PPO(hidden=(8,), memory="gru"), env.spec, seed=1)
    learner.example(4, 2)
    evaluate(learner.method, learner.net, env, 2)
    learner.load_state(learner.state())
    assert everything_global() == before


# By a failure ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize(("max_lag", "actors"), [(0, 3), (2, 1)])
def test_an_environment_that_raises(place: Any, Failing: Any, max_lag: int, actors: int) -> None:
    """With lag the actor is ahead: its failure is reported before what it had sent is learned from."""
    reports = begin(Failing(Identity(), 5, 2 * 8 + 3), place, actors=actors, max_lag=max_lag)
    seen, began = [], time.monotonic()
    with pytest.raises(RoleFailed, match=rf"collect\[{actors - 1}\] raised ValueError: the ball rolled off") as caught:
        seen.extend(report.version for report in reports)
    assert time.monotonic() - began < BOUND
    assert seen == [1, 2][: len(seen) if max_lag else 2]
    error = caught.value
    assert (error.role, error.rank, error.signal) == ("collect", actors - 1, None)
    assert 'raise ValueError("the ball rolled off the table")' in error.traceback
    assert "in rollout" in error.traceback
    assert "in collect" in error.traceback
    del caught, error


@pytest.mark.parametrize("index", [0, 4])
def test_an_environment_that_raises_when_it_is_reset(place: Any, Failing: Any, index: int) -> None:
    with pytest.raises(RoleFailed, match="the maze has no door") as caught:
        next(begin(Failing(Identity(), index, how="reset"), place))
    assert caught.value.rank == index // 3


@pytest.mark.parametrize("max_lag", [0, 2])
def test_an_actor_that_is_killed(places: Any, Failing: Any, max_lag: int) -> None:
    reports = begin(Failing(Identity(), 3, 2 * 8 + 3, how="kill"), places["processes"], max_lag=max_lag)
    seen, began = [], time.monotonic()
    with pytest.raises(RoleFailed, match=r"collect\[1\].*SIGKILL") as caught:
        seen.extend(report.version for report in reports)
    assert time.monotonic() - began < BOUND
    assert seen == [1, 2][: len(seen) if max_lag else 2]
    assert (caught.value.role, caught.value.rank, caught.value.signal) == ("collect", 1, signal.SIGKILL)


def test_an_actor_that_fails_while_the_caller_takes_its_time(beside: Any, Failing: Any) -> None:
    """It fails in the rollout for which the first report's weights were published."""
    reports = begin(Failing(Identity(), 3, 2 * 8 + 3), beside, max_lag=1)
    assert next(reports).version == 1
    time.sleep(0.2)
    with pytest.raises(RoleFailed, match="rolled off"):
        list(reports)


@pytest.mark.usefixtures("no_thread_left")
def test_a_method_that_raises_in_the_learner(place: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Wrong(A2C):
        def losses(self, net: Any, batch: Any, step: int) -> Any:
            if step == 2:
                raise ValueError("no gradient today")
            yield from A2C.losses(self, net, batch, step)

    reports = begin(Identity(), place, Wrong(hidden=(8,)), max_lag=1)
    with pytest.raises(ValueError, match="no gradient today"):
        list(reports)


def test_a_method_that_raises_in_an_actor(place: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Wrong(A2C):
        def act(self, net: Any, observation: Any, memory: Any, noise: Any) -> Any:
            if noise is not None and (observation[:, 3] == 2).any():
                raise ValueError("cannot decide")
            return A2C.act(self, net, observation, memory, noise)

    with pytest.raises(RoleFailed, match="cannot decide") as caught:
        list(begin(Identity(), place, Wrong(hidden=(8,))))
    assert "in act" in caught.value.traceback


# Before it begins -----------------------------------------------------------------------------------------------------


class Nowhere:
    """A placement on which nothing may be started."""

    def crew(self, seed: int = 0) -> Any:
        raise AssertionError("a crew was opened")


@pytest.mark.parametrize(
    ("num_envs", "actors", "nearest"),
    [(6, 4, "num_envs 4 or 8"), (7, 3, "num_envs 6 or 9"), (2, 3, r"num_envs 3\.")],
)
def test_environments_that_do_not_divide(num_envs: int, actors: int, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"num_envs {num_envs} .* {actors} actors.*{nearest}"):
        SyncBatches(num_envs=num_envs, actors=actors)


@pytest.mark.parametrize("field", ["actors", "num_envs", "num_steps", "max_lag"])
def test_numbers_that_are_too_small_or_no_integers(field: str) -> None:
    for value in (-1, 6.5, True, *([0] if field != "max_lag" else [])):
        with pytest.raises(ConfigError, match=f"{field}={value}: give an integer from"):
            SyncBatches(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_minibatches": 5}, "48 samples .* 5 equal minibatches.*num_minibatches 4 or 6"),
        ({"num_minibatches": 100}, r"48 samples .* 100 equal minibatches.*num_minibatches 48\."),
        ({"num_minibatches": 4, "memory": "gru"}, "6 environments .* 4 equal minibatches.*num_minibatches 3 or 6"),
    ],
)
def test_minibatches_that_do_not_divide(fields: dict[str, Any], message: str) -> None:
    """Said by `run` itself, not only when its first report is asked for."""
    with pytest.raises(ConfigError, match=message):
        begin(Identity(), Nowhere(), PPO(hidden=(8,), **fields))


def test_an_environment_for_which_the_learner_was_not_built() -> None:
    learner = Learner(SMALL, Identity().spec)
    for env in (Target(), Gymnasium("CartPole-v1")):
        with pytest.raises(ConfigError, match=r"learner was built for .*Box\(0, inf.* this environment has "):
            SyncBatches().run(learner, env, Nowhere(), env_steps=100)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", ["cpu", "cuda:0", (), []])
def test_devices_are_a_sequence(devices: Any) -> None:
    with pytest.raises(ConfigError, match=r'devices=.*\("cpu",\)'):
        Learner(SMALL, Identity().spec, devices=devices)


def test_a_run_that_is_not_asked_for_a_report_starts_nothing() -> None:
    begin(Identity(), Nowhere())


def test_an_environment_that_cannot_be_shipped(places: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Held(Identity):
        lock: Any = dataclasses.field(default_factory=threading.Lock)

    with pytest.raises(ConfigError, match=r"collect cannot be shipped.*\.lock"):
        next(begin(Held(), places["processes"]))


def test_a_plan_and_a_method_are_values() -> None:
    assert SyncBatches(actors=2) == SyncBatches(actors=2) != SyncBatches(actors=4)
    assert pickle.loads(pickle.dumps(SyncBatches(actors=2))) == SyncBatches(actors=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SyncBatches().actors = 3  # type: ignore[misc]
    assert next(begin(Identity(), Inline())).version == 1


def test_an_evaluation_whose_episodes_do_not_end() -> None:
    env = Target(dimensions=1, length=10)
    learner = Learner(A2C(hidden=(4,)), env.spec)
    assert len(evaluate(learner.method, learner.net, env, 3, max_steps=10)) == 3
    with pytest.raises(Stalled, match="3 of 3 episodes of the evaluation had not ended after 9 steps"):
        evaluate(learner.method, learner.net, env, 3, max_steps=9)


def test_a_horizon_is_a_number_of_steps() -> None:
    env = Identity()
    with pytest.raises(ConfigError, match="horizon=-5"):
        SyncBatches().run(Learner(A2C(), env.spec), env, Inline(), env_steps=100, horizon=-5)
