"""Gymnasium's environments: how they are named, shipped, seeded, stepped and checked."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.wrappers import TimeLimit, TransformReward

from headrace.envs.base import Env
from headrace.envs.gymnasium import Gymnasium
from headrace.errors import ConfigError, EnvironmentFault
from headrace.spaces import Box, Discrete, Spec

UNIT = gymnasium.spaces.Box(0, 1, (1,), np.float32)
COUNT = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)


class Counter(gymnasium.Env[Any, Any]):
    """Shows the step of the episode in ONE array, and in ONE info, which it writes in place."""

    observation_space = COUNT
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 4, end: str = "terminated") -> None:
        self.length, self.end = length, end
        self.shown = np.zeros(1, np.float32)
        self.info = {"step": 0}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.shown[0] = self.info["step"] = 0
        return self.shown, self.info

    def step(self, action: Any) -> Any:
        self.shown[0] += 1
        self.info["step"] += 1
        ended = self.info["step"] >= self.length
        return self.shown, 1.0, ended and self.end == "terminated", ended and self.end != "terminated", self.info


class Lottery(gymnasium.Env[Any, Any]):
    """Shows a random number at each reset; an episode is two steps long."""

    observation_space = UNIT
    action_space = gymnasium.spaces.Discrete(2)

    def _show(self) -> Any:
        return self.np_random.random(1).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(1, np.float32), 0.0, self.steps == 2, False, {}


class Odd(gymnasium.Env[Any, Any]):
    """Has the spaces, and gives the observations, that it is told to."""

    def __init__(self, space: Any = COUNT, action: Any = None, first: Any = None, then: Any = None) -> None:
        self.observation_space = space
        self.action_space = action or gymnasium.spaces.Discrete(2)
        self.first, self.then = first, then
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.first, {}

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        return self.then, 0.0, False, False, {}


def local() -> type[Counter]:
    """A class that another process cannot import: it travels by value."""

    class Local(Counter):
        pass

    return Local


@pytest.fixture
def registered() -> Iterator[str]:
    """The id of an environment that only this process has registered."""
    gymnasium.register("OnlyHere-v3", entry_point=local(), max_episode_steps=3, kwargs={"length": 9})
    yield "OnlyHere-v3"
    del gymnasium.registry["OnlyHere-v3"]


def wrong(value: Any) -> Any:
    """The value, whose type is not what is asked for."""
    return value


def zeros(num_envs: int) -> np.ndarray:
    return np.zeros(num_envs, np.int64)


# How an environment is named ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Gymnasium("CartPole-v1"), "Gymnasium('CartPole-v1')"),
        (lambda: Gymnasium("CartPole-v1", render_mode=None), "Gymnasium('CartPole-v1', render_mode=None)"),
        (
            lambda: Gymnasium("gymnasium.envs.classic_control:CartPoleEnv", vectorize=False, sutton_barto_reward=True),
            "Gymnasium('gymnasium.envs.classic_control:CartPoleEnv', vectorize=False, sutton_barto_reward=True)",
        ),
        (lambda: Gymnasium("gymnasium.envs:CartPole-v1"), "Gymnasium('gymnasium.envs:CartPole-v1')"),
        (lambda: Gymnasium(Counter, length=2), "Gymnasium(Counter, length=2)"),
        (lambda: Gymnasium(Counter, wrappers=[half]), "Gymnasium(Counter, wrappers=[half])"),
        (
            lambda: Gymnasium(Counter, bounds="clip", non_finite="pass", max_episode_steps=9, length=3),
            "Gymnasium(Counter, max_episode_steps=9, non_finite='pass', bounds='clip', length=3)",
        ),
    ],
)
def test_the_repr_is_what_was_written(make: Callable[[], Gymnasium], text: str) -> None:
    env = make()
    assert repr(env) == text
    assert env == make()
    assert env != Gymnasium("Acrobot-v1")
    assert isinstance(env.spec, Spec)
    assert env == make()  # the spec that one of them has read changes nothing
    assert cloudpickle.loads(cloudpickle.dumps(env)) == env
    with pytest.raises(dataclasses.FrozenInstanceError):
        env.vectorize = True  # type: ignore[misc]


@pytest.mark.parametrize("id", ["gymnasium.envs.classic_control:CartPoleEnv", Counter, lambda: Counter(length=7)])
def test_classes_and_functions_make_environments(id: Any) -> None:
    vector = Gymnasium(id).make(range(2))
    assert vector.reset(seed=1).shape[0] == 2
    assert vector.step(zeros(2))[1].tolist() == [1, 1]
    vector.close()


def test_keyword_arguments_go_to_the_environment() -> None:
    vector = Gymnasium(Counter, length=2, end="truncated").make(range(1))
    vector.reset(seed=1)
    ends = [vector.step(zeros(1))[2:] for _ in range(3)]
    assert [(bool(terminated[0]), bool(truncated[0])) for terminated, truncated in ends] == [
        (False, False),
        (False, True),
        (False, False),
    ]


def half(env: Any) -> Any:
    return TransformReward(env, lambda reward: reward / 2)


def test_wrappers_are_applied_in_order() -> None:
    seen: list[Any] = []

    def note(env: Any) -> Any:
        seen.append(env)
        return env

    env = Gymnasium(Counter, wrappers=[half, note, lambda env: TimeLimit(env, 2)])
    vector = env.make(range(2))
    vector.reset(seed=1)
    rewards, _, truncated = vector.step(zeros(2))[1:]
    assert rewards.tolist() == [0.5, 0.5]
    assert not truncated.any()
    assert vector.step(zeros(2))[3].all()
    assert isinstance(seen[0], TransformReward)


def test_a_wrapped_cartpole_is_wrapped() -> None:
    vector = Gymnasium("CartPole-v1", wrappers=[half]).make(range(2))
    vector.reset(seed=1)
    assert vector.step(zeros(2))[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gymnasium("CartPole"), r"Gymnasium\('CartPole'\): .* Nearest: CartPole-v1"),
        (lambda: Gymnasium("CartPole-v7"), "Nearest: CartPole-v1"),
        (lambda: Gymnasium("cartpole-v1"), "Nearest: CartPole-v1"),
        (lambda: Gymnasium("NoSuchPackage/Pong-v5"), "Have you installed the proper package for NoSuchPackage"),
        (lambda: Gymnasium("not an id"), "Malformed environment ID"),
        (lambda: Gymnasium("no_such_module:Maze"), "module 'no_such_module' could not be imported: ModuleNotFound"),
        (lambda: Gymnasium("gymnasium.envs.classic_control:CartpoleEnv"), "has no 'CartpoleEnv' .* Nearest: CartPole"),
        (lambda: Gymnasium("gymnasium:CartPole-v9"), "registers no such id. Nearest: CartPole-v1"),
        (lambda: Gymnasium("gymnasium:__version__"), "is a str: expected a class or function"),
        (lambda: Gymnasium(wrong(Counter())), "got a Counter: expected an id, or a class or function that makes one"),
        (lambda: Gymnasium("CartPole-v1", wrappers=wrong("half")), r"wrappers='half'\): give a list of functions"),
        (lambda: Gymnasium("CartPole-v1", wrappers=wrong(half)), "give a list of functions"),
    ],
)
def test_a_wrong_name_fails_at_once_with_the_nearest(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gymnasium(Counter, size=3), r"Gymnasium\(Counter, size=3\) could not be made: .*'size'"),
        (lambda: Gymnasium("CartPole-v1", size=3), "could not be made: .*'size'"),
        (lambda: Gymnasium(dict), "made a dict: expected a gymnasium.Env"),
        (lambda: Gymnasium(Counter, wrappers=[half, lambda env: None]), "<lambda> made a NoneType"),
    ],
)
def test_what_cannot_be_made_says_so_when_the_spec_is_asked_for(make: Callable[[], Env], message: str) -> None:
    env = make()
    with pytest.raises(ConfigError, match=message):
        _ = env.spec


def needs_simulator(**kwargs: Any) -> Any:
    raise gymnasium.error.DependencyNotInstalled('run `pip install "simulator"`')


@pytest.mark.parametrize(
    ("entry_point", "message"),
    [(needs_simulator, 'run `pip install "simulator"`'), ("no_such_package:Maze", "No module named 'no_such_package'")],
)
def test_a_missing_package_is_named(entry_point: Any, message: str) -> None:
    gymnasium.register("Missing-v0", entry_point=entry_point)
    try:
        env = Gymnasium("Missing-v0")
    finally:
        del gymnasium.registry["Missing-v0"]
    with pytest.raises(ConfigError, match=rf"Gymnasium\('Missing-v0'\) could not be made: .*{message}"):
        _ = env.spec


def test_no_warning_where_a_newer_version_exists() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Gymnasium("CartPole-v0").make(range(2)).reset(seed=1)
    assert caught == []


# How it travels -------------------------------------------------------------------------------------------------------


SCRIPT = """
import sys, cloudpickle, gymnasium, numpy
from headrace.envs.gymnasium import Gymnasium

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return numpy.ones(1, numpy.float32), {}

env = cloudpickle.loads(sys.stdin.buffer.read())
assert "OnlyHere-v3" not in gymnasium.registry
vector = env.make(range(2))
seen = [vector.reset(seed=1).tolist()] + [vector.step(numpy.zeros(2, int))[3].tolist() for _ in range(3)]

gymnasium.register("Mine-v0", entry_point="__main__:Mine")
values = [Gymnasium("__main__:Mine"), Gymnasium("Mine-v0"), Gymnasium(lambda: Mine())]
sys.stdout.buffer.write(cloudpickle.dumps((repr(env), seen, values)))
"""


@pytest.mark.slow
def test_what_only_one_process_knows_reaches_another(registered: str) -> None:
    """What is registered here goes there; what the main script there registers and defines comes back."""
    env = Gymnasium(registered)
    data = cloudpickle.dumps(env)
    assert cloudpickle.loads(data) == env
    ran = subprocess.run([sys.executable, "-c", SCRIPT], input=data, capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr.decode()
    text, seen, values = cloudpickle.loads(ran.stdout)
    assert text == repr(env)
    assert seen == [[[0], [0]], [False, False], [False, False], [True, True]]
    for value in values:
        assert value.spec.action == Discrete(2)
        assert value.make(range(3)).reset(seed=1).tolist() == [[1], [1], [1]]


def test_a_value_does_not_change_with_the_registry(registered: str) -> None:
    env = Gymnasium(registered)
    gymnasium.registry[registered].kwargs["length"] = 1
    gymnasium.registry[registered].max_episode_steps = 1
    vector = env.make(range(1))
    vector.reset(seed=1)
    assert not vector.step(zeros(1))[2].any()


# Spaces and checks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (gymnasium.spaces.Discrete(3, start=-1), Discrete(3, start=-1)),
        (gymnasium.spaces.Box(-2, 2, (3,), np.float64), Box(np.full(3, -2), np.full(3, 2), torch.float64)),
        (gymnasium.spaces.Box(0, 255, (4, 4), np.uint8), Box(np.zeros((4, 4)), np.full((4, 4), 255), torch.uint8)),
        (COUNT, Box(np.zeros(1), np.full(1, np.inf))),
    ],
)
def test_spaces_are_translated(theirs: Any, ours: Any) -> None:
    assert Gymnasium(Odd, space=theirs).spec.observation == ours
    assert Gymnasium(Odd, action=theirs).spec.action == ours


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"space": gymnasium.spaces.Text(3)}, r"observes Text\(.*: supported are Box, Discrete"),
        (
            {"action": gymnasium.spaces.Dict(a=gymnasium.spaces.Tuple((COUNT, gymnasium.spaces.Text(3))))},
            r"takes actions of key 'a' place 1 Text\(.*: supported are",
        ),
        ({"space": gymnasium.spaces.MultiDiscrete([[2, 2]])}, "MultiDiscrete with one axis"),
        ({"space": gymnasium.spaces.Box(0, 1, (1,), np.longdouble)}, "PyTorch has no dtype float128"),
    ],
)
def test_other_spaces_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = Gymnasium(Odd, **kwargs).spec


GOOD = np.zeros(1, np.float32)


@pytest.mark.parametrize(
    ("wrong", "given"),
    [
        (np.zeros(2, np.float32), r"float32 \(2,\)"),
        (np.zeros(1, np.complex64), r"complex64 \(1,\)"),
        (0.0, "a float"),
        ([0.0, 0.0], "a list of 2"),
        (None, "a NoneType"),
    ],
    ids=repr,
)
def test_an_observation_that_contradicts_its_space_is_named(wrong: Any, given: str) -> None:
    counted = iter(range(100))

    def second_is_odd(first: Any, then: Any) -> Any:
        """Only the environments with an odd number are wrong; number 0 is made to read the spaces."""
        return Odd(COUNT, first=first, then=then) if next(counted) % 2 else Odd(COUNT, first=GOOD, then=GOOD)

    message = rf"environment 7 .* gave .* contradicts its space: expected float32 \(1,\), got {given}\."
    env = Gymnasium(second_is_odd, first=wrong, then=GOOD)
    _ = env.spec
    next(counted)
    with pytest.raises(EnvironmentFault, match=message):
        env.make(range(6, 9)).reset(seed=1)

    counted = iter(range(100))
    env = Gymnasium(second_is_odd, first=GOOD, then=wrong)
    _ = env.spec
    next(counted)
    vector = env.make(range(6, 9))
    vector.reset(seed=1)
    with pytest.raises(EnvironmentFault, match=message):
        vector.step(zeros(3))


@pytest.mark.parametrize("observation", [1, np.int64(1), np.array(1)], ids=repr)
def test_a_discrete_observation_is_any_integer(observation: Any) -> None:
    space = gymnasium.spaces.Discrete(3)
    vector = Gymnasium(Odd, space=space, first=observation, then=observation).make(range(2))
    assert vector.reset(seed=1).tolist() == [1, 1]
    observation, *_ = vector.step(zeros(2))
    assert observation.dtype == np.int64


def test_actions_reach_the_environment_as_they_are() -> None:
    made: list[Odd] = []

    def odd(**kwargs: Any) -> Odd:
        made.append(Odd(first=GOOD, then=GOOD, **kwargs))
        return made[-1]

    vector = Gymnasium(odd, action=gymnasium.spaces.Discrete(2, start=5)).make(range(2))
    vector.reset(seed=1)
    vector.step(np.array([5, 6]))
    assert [env.taken for env in made[-2:]] == [[5], [6]]

    vector = Gymnasium(odd, action=gymnasium.spaces.Box(-1, 1, (2,), np.float64)).make(range(2))
    vector.reset(seed=1)
    given = np.array([[0.1, 0.2], [0.3, 0.4]])
    vector.step(given)
    assert [env.taken[0].tolist() for env in made[-2:]] == given.tolist()
    assert made[-1].taken[0].dtype == np.float64


def test_environments_are_closed() -> None:
    closed: list[Any] = []

    class Open(Counter):
        def close(self) -> None:
            closed.append(self)

    env = Gymnasium(Open)
    _ = env.spec
    assert len(closed) == 1
    vector = env.make(range(3))
    vector.close()
    vector.close()
    assert len(closed) == 4


# What is learnt from --------------------------------------------------------------------------------------------------


def test_LC_17_what_an_environment_changes_in_place_was_copied() -> None:
    vector = Gymnasium(Counter).make(range(2))
    rows = np.empty((9, 2), np.float32)
    rows[0] = vector.reset(seed=1)[:, 0]
    for t in range(1, 9):
        observation, _, terminated, _ = vector.step(zeros(2))
        rows[t] = observation[:, 0]
        assert terminated.all() == (t == 4)
    assert rows.T.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]] * 2


def test_LC_18_the_step_after_an_end_is_no_transition() -> None:
    vector = Gymnasium(Counter, length=3).make(range(2))
    observation = vector.reset(seed=1).copy()
    ended = np.zeros(2, bool)
    transitions, returns, running = [], [], np.zeros(2)
    for _ in range(12):
        after, reward, terminated, truncated = vector.step(zeros(2))
        for b in np.flatnonzero(~ended):
            transitions.append((observation[b, 0], after[b, 0]))
        assert (reward[ended] == 0).all()
        assert (after[ended] == 0).all()
        running = np.where(ended, 0, running) + reward
        ended = terminated | truncated
        returns += running[ended].tolist()
        observation = after.copy()
    assert len(transitions) == 18
    assert set(transitions) == {(0, 1), (1, 2), (2, 3)}
    assert returns == [3] * 6


def lottery(shares: list[range], seed: int) -> dict[tuple[int, int], float]:
    """(environment, episode) → what its reset showed, of five episodes each."""
    shown = {}
    for share in shares:
        vector = Gymnasium(Lottery).make(share)
        observation = vector.reset(seed)
        for episode in range(5):
            shown |= {(index, episode): float(observation[b, 0]) for b, index in enumerate(share)}
            for _ in range(3):
                observation, *_ = vector.step(zeros(len(share)))
    return shown


def test_LC_45_no_two_environments_share_their_random_numbers() -> None:
    actors = [range(first, first + 3) for first in range(0, 12, 3)]
    shown = lottery(actors, seed=7)
    assert len(set(shown.values())) == len(shown) == 60
    assert lottery(actors, seed=7) == shown
    assert lottery([range(12)], seed=7) == shown
    assert not set(lottery(actors, seed=8).values()) & set(shown.values())


# CartPole, vectorised -------------------------------------------------------------------------------------------------


def cartpole(env: Gymnasium, indices: range, num_steps: int) -> list[np.ndarray]:
    """[observation, reward, terminated, truncated] by step under random actions that depend on the environment only."""
    vector = env.make(indices)
    given = np.stack([np.random.default_rng(index).integers(0, 2, num_steps) for index in indices], axis=1)
    rows = [(vector.reset(seed=5).copy(), *np.zeros((3, len(indices)), bool))]
    rows += [tuple(array.copy() for array in vector.step(action)) for action in given]
    return [np.stack(column) for column in zip(*rows, strict=True)]


def test_cartpole_does_not_depend_on_how_it_is_split() -> None:
    whole = cartpole(Gymnasium("CartPole-v1"), range(8), 2000)
    assert whole[2].sum() > 400
    for indices in (range(4), range(4, 8), range(7, 8)):
        part = cartpole(Gymnasium("CartPole-v1"), indices, 2000)
        for array, of_whole in zip(part, whole, strict=True):
            assert array.tobytes() == np.ascontiguousarray(of_whole[:, indices.start : indices.stop]).tobytes()


def test_cartpole_starts_where_gymnasium_s_does() -> None:
    observation, _, terminated, truncated = cartpole(Gymnasium("CartPole-v1"), range(8), 2000)
    first = observation[1:][(terminated | truncated)[:-1]]
    assert len(first) > 400
    assert len(np.unique(first, axis=0)) == len(first)
    assert np.abs(first).max() <= 0.05
    assert np.abs(first.mean(axis=0)).max() < 0.01
    assert np.abs(first.std(axis=0) - 0.1 / np.sqrt(12)).max() < 0.003


@pytest.mark.parametrize(
    ("kwargs", "ends"), [({}, [500]), ({"max_episode_steps": 170}, [170, 341]), ({"max_episode_steps": -1}, [])]
)
@pytest.mark.parametrize("vectorize", [True, False])
def test_cartpole_respects_the_time_limit(kwargs: dict[str, Any], ends: list[int], vectorize: bool) -> None:
    vector = Gymnasium("CartPole-v1", vectorize=vectorize, **kwargs).make(range(2))
    observation = vector.reset(seed=1)
    lengths = []
    for step in range(1, 510):
        push = observation @ np.array([0.05, 0.2, 1.5, 0.6], np.float32) > 0  # balances for ever
        observation, reward, terminated, truncated = vector.step(push.astype(np.int64))
        assert not terminated.any()
        if truncated.any():
            assert truncated.all()
            lengths.append(step)
        assert (reward == (step - 1 not in lengths)).all()
    assert lengths == ends


def test_cartpole_v0_is_shorter() -> None:
    assert Gymnasium("CartPole-v0")._cartpole() == {"max_episode_steps": 200, "sutton_barto_reward": False}


@pytest.mark.parametrize(
    ("kwargs", "vectorised"),
    [
        ({}, True),
        ({"sutton_barto_reward": True}, True),
        ({"render_mode": None}, True),
        ({"render_mode": "rgb_array"}, False),
        ({"wrappers": [half]}, False),
        ({"vectorize": False}, False),
    ],
)
def test_cartpole_is_vectorised_where_that_is_the_same_task(kwargs: dict[str, Any], vectorised: bool) -> None:
    vector = Gymnasium("CartPole-v1", **kwargs).make(range(2))
    assert isinstance(getattr(vector, "_vector", None), CartPoleVectorEnv) is vectorised


@pytest.mark.parametrize("kwargs", [{}, {"sutton_barto_reward": True}, {"max_episode_steps": 9}])
def test_cartpole_moves_and_rewards_as_the_scalar_one(kwargs: dict[str, Any]) -> None:
    fast = Gymnasium("CartPole-v1", **kwargs).make(range(4))
    slow = Gymnasium("CartPole-v1", vectorize=False, **kwargs).make(range(4))
    fast.reset(seed=1)
    slow.reset(seed=1)
    rng = np.random.default_rng(0)
    for _ in range(200):
        for b, one in enumerate(slow._envs):  # type: ignore[attr-defined]
            one.unwrapped.state = tuple(fast._vector.state[:, b])  # type: ignore[attr-defined]
        action = rng.integers(0, 2, 4)
        fresh = np.array(slow._ended)  # type: ignore[attr-defined]
        for (name, ours), theirs in zip(
            zip(("observation", "reward", "terminated", "truncated"), fast.step(action), strict=True),
            slow.step(action),
            strict=True,
        ):
            assert ours.dtype == theirs.dtype, name
            assert ours[~fresh] == pytest.approx(theirs[~fresh], abs=1e-6), name
