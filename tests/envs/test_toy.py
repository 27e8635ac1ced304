"""The toy environments, and what every vector of environments keeps: order of calls, resets, seeds."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import Inline, Threads, role
from headrace.channel import Placement
from headrace.envs.base import Env, VectorEnv, environment_seed
from headrace.envs.gymnasium import Gymnasium
from headrace.envs.toy import Identity, Recall, Scripted, Sleepy, Target
from headrace.errors import ConfigError, ShapeError
from headrace.spaces import Discrete

SCRIPT = [((1.0, 2.0, 3.0), "terminated"), ((4.0,), "truncated")]
TOYS = [Identity(), Scripted(SCRIPT), Recall(length=4, cues=3), Target(dimensions=2, length=5)]
ALL = [*TOYS, Gymnasium("CartPole-v1"), Gymnasium("CartPole-v1", vectorize=False)]


def name(env: Any) -> str:
    return env if isinstance(env, str) else repr(env)


def actions(env: Env, num_envs: int, num_steps: int, seed: int = 0) -> Any:
    """Random actions [T, B, …] as the space says."""
    rng = np.random.default_rng(seed)
    space = env.spec.action
    if isinstance(space, Discrete):
        return rng.integers(space.start, space.start + space.n, (num_steps, num_envs))
    shape = (num_steps, num_envs, *space.shape)
    return rng.uniform(space.low, space.high, shape).astype(space.low.dtype)


def play(env: Env, indices: range, given: Any, seed: int = 1) -> list[np.ndarray]:
    """[observation [T+1, B, …], reward, terminated, truncated [T, B]] of these environments under these actions."""
    vector = env.make(indices)
    observations = [vector.reset(seed).copy()]
    rows = []
    for action in given:
        observation, *row = vector.step(action)
        observations.append(observation.copy())
        rows.append([array.copy() for array in row])
    vector.close()
    return [np.stack(observations), *map(np.stack, zip(*rows, strict=True))]


def bits(arrays: list[np.ndarray]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


# What every vector of environments keeps ------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ALL, ids=name)
def test_what_is_returned_is_as_the_spec_says(env: Env) -> None:
    observation, reward, terminated, truncated = play(env, range(3), actions(env, 3, 40))
    example = env.spec.observation.zeros(41, 3).numpy()
    assert (observation.shape, observation.dtype) == (example.shape, example.dtype)
    assert (reward.shape, reward.dtype) == ((40, 3), np.float32)
    assert terminated.shape == truncated.shape == (40, 3)
    assert terminated.dtype == truncated.dtype == bool
    assert (terminated | truncated).any()


@pytest.mark.parametrize("env", ALL, ids=name)
def test_the_step_after_an_end_only_resets(env: Env) -> None:
    _, reward, terminated, truncated = play(env, range(4), actions(env, 4, 60))
    ended = (terminated | truncated)[:-1]
    after = np.stack([reward[1:], terminated[1:], truncated[1:]])
    assert ended.any()
    assert (after[:, ended] == 0).all()


@pytest.mark.parametrize("env", ALL, ids=name)
def test_the_action_of_a_reset_is_ignored(env: Env) -> None:
    given = actions(env, 2, 60)
    first = play(env, range(2), given)
    ended = (first[2] | first[3])[:-1]
    given[1:][ended] = actions(env, 2, 60, seed=5)[1:][ended]
    assert bits(play(env, range(2), given)) == bits(first)


@pytest.mark.parametrize("env", ALL, ids=name)
def test_an_environment_does_not_depend_on_who_steps_it(env: Env) -> None:
    given = actions(env, 8, 200)
    whole = play(env, range(8), given)
    for share in (range(4), range(4, 8), range(5, 6)):
        part = play(env, share, given[:, share.start : share.stop])
        assert bits(part) == bits([array[:, share.start : share.stop] for array in whole])


@pytest.mark.parametrize("env", ALL, ids=name)
def test_a_seed_repeats_on_the_same_object(env: Env) -> None:
    vector = env.make(range(2))
    given = actions(env, 2, 30)
    runs = []
    for seed in (3, 4, 3):
        observations = [vector.reset(seed).copy()] + [vector.step(action)[0].copy() for action in given]
        runs.append(np.stack(observations).tobytes())
    assert runs[0] == runs[2]
    assert runs[0] != runs[1] or isinstance(env, Identity | Scripted)  # these draw nothing


@pytest.mark.parametrize("env", [*ALL, Sleepy(Identity())], ids=name)
def test_an_environment_is_a_value(env: Env) -> None:
    _ = env.spec
    twin = pickle.loads(pickle.dumps(env))
    assert twin == env
    assert twin.spec == env.spec


@pytest.mark.parametrize("env", ALL, ids=name)
def test_HC_22_calls_in_the_wrong_order_name_the_expected_state(env: Env) -> None:
    vector = env.make(range(2))
    action = actions(env, 2, 1)[0]
    with pytest.raises(ConfigError, match=r"step\(\) was called before reset: expected environments that were reset"):
        vector.step(action)
    first = vector.reset(seed=1).copy()
    assert (vector.reset(seed=1) == first).all()  # twice is fine
    vector.step(action)
    vector.close()
    vector.close()
    with pytest.raises(ConfigError, match=r"step\(\) was called after close\(\): expected open"):
        vector.step(action)
    with pytest.raises(ConfigError, match=r"reset\(\) was called after close\(\): expected open"):
        vector.reset(seed=1)


class Gate(Env):
    """Environments whose reset and step wait for a word."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    @property
    def spec(self) -> Any:
        return Identity().spec

    def make(self, indices: range) -> VectorEnv:
        gate, inner = self, Identity().make(indices)

        class Slow(type(inner)):  # type: ignore[misc]
            def play(self, action: Any) -> Any:
                gate.entered.set()
                assert gate.leave.wait(10)
                return super().play(action)

        return Slow(Identity(), indices)


@pytest.mark.parametrize("call", ["step", "reset", "close"])
def test_HC_22_a_call_while_another_one_runs_is_refused_and_harms_nothing(call: str) -> None:
    env = Gate()
    vector = env.make(range(2))
    vector.reset(seed=1)
    action = np.zeros(2, np.int64)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(vector.step(action)))
    thread.start()
    assert env.entered.wait(10)
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: vector.step(action),
        "reset": lambda: vector.reset(seed=2),
        "close": vector.close,
    }
    try:
        with pytest.raises(ConfigError, match=rf"{call}\(\) was called while another call .* one call at a time"):
            calls[call]()
    finally:
        env.leave.set()
        thread.join()
    assert results[0][0][:, 3].tolist() == [1, 1]
    assert vector.step(action)[0][:, 3].tolist() == [2, 2]
    assert vector.reset(seed=1)[:, 3].tolist() == [0, 0]


def test_HC_22_a_call_that_raised_asks_for_a_reset() -> None:
    class Broken(type(Identity().make(range(1)))):  # type: ignore[misc]
        broken = True

        def play(self, action: Any) -> Any:
            if self.broken:
                raise RuntimeError("the simulator crashed")
            return super().play(action)

    vector = Broken(Identity(), range(2))
    vector.reset(seed=1)
    action = np.zeros(2, np.int64)
    with pytest.raises(RuntimeError, match="the simulator crashed"):
        vector.step(action)
    with pytest.raises(ConfigError, match=r"after a call that raised: expected environments that were reset"):
        vector.step(action)
    vector.broken = False
    vector.reset(seed=1)
    assert vector.step(action)[0][:, 3].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("env", "action", "expected", "given"),
    [
        (Identity(), np.zeros(3, np.int64), r"int64 \(2,\)", r"int64 \(3,\)"),
        (Identity(), np.zeros(2, np.float32), r"int64 \(2,\)", r"float32 \(2,\)"),
        (Identity(), [0, 1], r"int64 \(2,\)", "a list"),
        (Target(dimensions=3), np.zeros((2, 1), np.float32), r"float32 \(2, 3\)", r"float32 \(2, 1\)"),
        (Gymnasium("CartPole-v1"), np.zeros((2, 1), np.int64), r"int64 \(2,\)", r"int64 \(2, 1\)"),
    ],
)
def test_a_misshapen_action_is_refused(env: Env, action: Any, expected: str, given: str) -> None:
    vector = env.make(range(2))
    vector.reset(seed=1)
    with pytest.raises(ShapeError, match=f"expected an array {expected}, got {given}"):
        vector.step(action)
    vector.step(actions(env, 2, 1)[0])  # nothing was done


def test_no_environment_is_no_vector() -> None:
    with pytest.raises(ConfigError, match="a vector of 0 environments"):
        Identity().make(range(0))


def test_an_environment_s_seed_depends_on_run_and_index_alone() -> None:
    draws = {tuple(environment_seed(seed, index).generate_state(2)) for seed in (0, 1, 2) for index in range(20)}
    assert len(draws) == 60
    assert environment_seed(1, 2).entropy == environment_seed(1, 2).entropy
    with pytest.raises(ConfigError, match=r"reset\(seed=-1\)"):
        Target().make(range(1)).reset(seed=-1)


# Each toy -------------------------------------------------------------------------------------------------------------


def test_identity_says_where_every_observation_comes_from() -> None:
    observation, reward, terminated, truncated = play(Identity((1, 2)), range(4, 6), np.zeros((6, 2), np.int64))
    assert observation[:, 0].tolist() == [
        [0, 4, 0, 0],
        [0, 4, 0, 1],
        [0, 4, 1, 0],
        [0, 4, 1, 1],
        [0, 4, 1, 2],
        [0, 4, 2, 0],
        [0, 4, 2, 1],
    ]
    assert observation[:, 1, 1:].tolist() == [
        [5, 0, 0],
        [5, 0, 1],
        [5, 0, 2],
        [5, 1, 0],
        [5, 1, 1],
        [5, 2, 0],
        [5, 2, 1],
    ]
    assert reward.T.tolist() == [[1, 0, 1, 2, 0, 1], [1, 2, 0, 1, 0, 1]]
    assert terminated.T.tolist() == [[True, *[False] * 4, True], [False, True, *[False] * 4]]
    assert truncated.T.tolist() == [[*[False] * 3, True, *[False] * 2], [*[False] * 3, True, *[False] * 2]]


@pytest.mark.parametrize("lengths", [(), (3, 0)])
def test_identity_needs_lengths(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="at least one length"):
        Identity(lengths)


def observe_ranks(lanes: Any) -> None:
    vector = Identity().make(role().share_of(4))
    lanes[role().rank].put(vector.reset(seed=0)[:, :2].tolist())


def test_identity_knows_its_actor() -> None:
    with Inline().crew() as crew:
        lanes = crew.lanes(2)
        crew.start(observe_ranks, lanes, copies=2)
        assert lanes.take_each() == [[[0, 0], [0, 1]], [[1, 2], [1, 3]]]


def test_a_script_is_played_again_and_again() -> None:
    env = Scripted(SCRIPT, others=[[((7, 8), "truncated")]])
    observation, reward, terminated, truncated = play(env, range(1, 4), np.zeros((8, 3), np.int64))
    assert observation[:, 1, 0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert reward[:, 1].tolist() == [1, 2, 3, 0, 4, 0, 1, 2]
    assert terminated[:, 1].nonzero()[0].tolist() == [2]
    assert truncated[:, 1].nonzero()[0].tolist() == [4]
    for b in (0, 2):
        assert reward[:, b].tolist() == [7, 8, 0, 7, 8, 0, 7, 8]
        assert truncated[:, b].nonzero()[0].tolist() == [1, 4, 7]
        assert not terminated[:, b].any()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([], "at least one episode"),
        ([((), "terminated")], "at least one reward"),
        ([((1,), "done")], r"'terminated' or 'truncated'; got \(\(1.0,\), 'done'\)"),
    ],
)
def test_a_script_is_checked(script: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scripted(script)


def recall(policy: Callable[[np.ndarray], np.ndarray], length: int, cues: int) -> np.ndarray:
    """The returns of 50 episodes each of 8 environments; the policy sees the observations so far, [t+1, B, …]."""
    vector = Recall(length, cues).make(range(8))
    seen = [vector.reset(seed=2)]
    total = []
    for _ in range(50):
        for _ in range(length):
            observation, reward, terminated, _ = vector.step(policy(np.stack(seen)))
            seen.append(observation)
        assert terminated.all()
        assert not observation.any()
        total.append(reward)
        seen = [vector.step(np.zeros(8, np.int64))[0]]
    return np.stack(total)


def test_recall_rewards_who_remembers_the_cue() -> None:
    def remember(seen: np.ndarray) -> Any:
        assert (seen[1:, :, :-1] == 0).all()
        assert (seen[:, :, -1] == (np.arange(len(seen)) == 4)[:, None]).all()
        return seen[0, :, :-1].argmax(axis=1)

    assert (recall(remember, length=5, cues=3) == 1).all()


def test_recall_rewards_who_forgets_by_chance_only() -> None:
    assert abs(recall(lambda seen: np.zeros(8, np.int64), length=2, cues=4).mean() - 1 / 4) < 0.07  # 3 standard errors


@pytest.mark.parametrize("env", [{"length": 1}, {"cues": 0}])
def test_recall_is_checked(env: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="length must be at least 2"):
        Recall(**env)


def test_target_rewards_the_action_that_repeats_the_observation() -> None:
    env = Target(dimensions=2, length=3, low=-2, high=2)
    assert env.spec.action.high.tolist() == [2, 2]  # type: ignore[union-attr]
    vector = env.make(range(4))
    observation = vector.reset(seed=1)
    seen = [observation]
    for step in range(1, 12):
        offset = np.array([0.5, 0], np.float32)
        observation, reward, terminated, truncated = vector.step(observation + offset)
        seen.append(observation)
        assert reward == pytest.approx(0 if step % 4 == 0 else -0.125, abs=1e-6)
        assert (truncated == (step % 4 == 3)).all()
        assert not terminated.any()
    assert len(np.unique(np.stack(seen))) == 12 * 4 * 2
    assert np.abs(seen).max() <= 1


@pytest.mark.parametrize("env", [{"dimensions": 0}, {"length": 0}, {"low": 1.0, "high": -1.0}])
def test_target_is_checked(env: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _ = Target(**env).spec


def step_slowly(env: Env, lanes: Any) -> None:
    vector = env.make(role().share_of(4))
    vector.reset(seed=1)
    for _ in range(20):
        begun = role().clock()
        vector.step(np.zeros(2, np.int64))
        lanes[role().rank].put(role().clock() - begun)


@pytest.mark.parametrize("place", [Inline(), Threads()], ids=name)
def test_sleepy_environments_reorder_roles(place: Placement) -> None:
    order, times = [], []
    with place.crew() as crew:
        lanes = crew.lanes(2)
        crew.start(step_slowly, Sleepy(Identity(), seconds=0.004), lanes, copies=2)
        for _ in range(40):
            rank, seconds = lanes.take_any()
            order.append(rank)
            times.append(seconds)
    assert len(set(times)) == 40
    assert max(times) <= 0.0041 or place != Inline()
    assert sorted(order) == [0] * 20 + [1] * 20
    assert order != [0, 1] * 20


def test_sleepy_environments_are_those_they_wrap() -> None:
    env = Sleepy(Target(), seconds=0)
    given = actions(env, 3, 20)
    with Inline().crew():
        assert bits(play(env, range(3), given)) == bits(play(Target(), range(3), given))
    assert env.spec == Target().spec
