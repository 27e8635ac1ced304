"""What environments do wrong, and what they may do as they like: cases.jsonl, by id in the names."""

from __future__ import annotations

import pickle
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation

from headrace.envs.base import environment_seed
from headrace.envs.gymnasium import Gymnasium
from headrace.errors import Closed, ConfigError, EnvironmentFault, ShapeError

FLOATS = spaces.Box(-1, 1, (3,), np.float32)
GOOD = np.zeros(3, np.float32)


class Plain(gymnasium.Env[Any, Any]):
    """Gives what it is told to in step `at` of episode `episode` of its life, and what is right before."""

    def __init__(
        self,
        space: Any = FLOATS,
        good: Any = GOOD,
        result: Any = None,
        first: Any = None,
        at: int = 1,
        action: Any = None,
        length: int = 10**9,
    ) -> None:
        self.observation_space, self.action_space = space, action or spaces.Discrete(2)
        self.good, self.result, self.first, self.at, self.length = good, result, first, at, length
        self.steps = self.step_of_episode = 0
        self.taken: list[Any] = []
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.step_of_episode = 0
        return (self.good, {}) if self.first is None else self.first

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.step_of_episode += 1
        self.taken.append(action)
        if self.steps == self.at and self.result is not None:
            return self.result(self) if callable(self.result) else self.result
        return self.good, 0.5, False, self.step_of_episode >= self.length, {}

    def close(self) -> None:
        self.closed += 1


def only(odd: int, **wrong: Any) -> Callable[..., Plain]:
    """Environment `odd` is wrong in this way, all others are right."""

    def make(index: int, **kwargs: Any) -> Plain:
        return Plain(**kwargs, **(wrong if index == odd else {}))

    return make


def steps(env: Gymnasium, count: int, indices: range = range(4)) -> Any:
    """What the last of so many steps returned."""
    vector = env.make(indices)
    vector.reset(seed=1)
    for _ in range(count):
        result = vector.step(np.zeros(len(indices), np.int64))
    return result


# Where and when -------------------------------------------------------------------------------------------------------


def bad_state(self: Plain) -> Any:
    raise ValueError("bad state 42")


def test_what_a_step_raises_says_where_and_when() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        steps(Gymnasium(only(6, result=bad_state, at=100), length=30), 200, range(4, 8))
    fault = caught.value
    assert isinstance(fault.__cause__, ValueError)
    seed = int(environment_seed(1, 6).generate_state(1)[0] >> 1)
    # Steps 1 to 30, 31 to 60 and 61 to 90 were episodes 0 to 2.
    assert (fault.environment, fault.episode, fault.step, fault.seed) == (6, 3, 10, seed)
    text = str(fault)
    for part in (
        "environment 6",
        "env 2 of this actor's 4",
        "ValueError: bad state 42",
        "episode 3, step 10",
        "step 100",
    ):
        assert part in text
    assert str(seed) in text
    again = pickle.loads(pickle.dumps(fault))
    assert (again.environment, again.episode, again.step, again.seed) == (6, 3, 10, seed)
    assert str(again) == text


def test_what_a_reset_raises_says_which_episode() -> None:
    class Fails(Plain):
        def __init__(self, index: int) -> None:
            super().__init__(length=5)
            self.index, self.resets = index, 0

        def reset(self, **kwargs: Any) -> Any:
            self.resets += 1
            if self.index == 1 and self.resets == 3:
                raise RuntimeError("the map is empty")
            return super().reset(**kwargs)

    with pytest.raises(EnvironmentFault, match=r"environment 1 .* reset\(\) raised RuntimeError: the map") as caught:
        steps(Gymnasium(Fails), 12, range(2))
    assert (caught.value.episode, caught.value.step) == (2, 0)
    vector = Gymnasium(Fails).make(range(2))
    vector.reset(seed=1)
    vector.reset(seed=1)
    with pytest.raises(EnvironmentFault, match="the map is empty"):
        vector.reset(seed=1)
    with pytest.raises(ConfigError, match="after a call that raised"):
        vector.step(np.zeros(2, np.int64))
    assert vector.reset(seed=1).shape == (2, 3)


def test_who_is_told_that_it_is_enough_has_not_failed() -> None:
    def closed(self: Plain) -> Any:
        raise Closed("the crew is closing")

    with pytest.raises(Closed, match="the crew is closing"):
        steps(Gymnasium(Plain, result=closed), 1)


def test_what_making_one_raises_says_which_and_closes_the_others() -> None:
    made: list[Plain] = []

    def make(index: int) -> Plain:
        if index == 2:
            raise FileNotFoundError("level-2.map")
        made.append(Plain())
        return made[-1]

    env = Gymnasium(make)
    with pytest.raises(EnvironmentFault, match="environment 2 could not be made: it raised FileNotFoundError: level-2"):
        env.make(range(4))
    assert [one.closed for one in made] == [1, 1, 1]  # of the spec, 0 and 1
    with pytest.raises(EnvironmentFault, match="FileNotFoundError"):
        _ = Gymnasium(lambda: make(2)).spec


def test_all_are_closed_although_one_of_them_cannot() -> None:
    made: list[Plain] = []

    class Fails(Plain):
        def __init__(self, index: int) -> None:
            super().__init__(result=bad_state if index == 3 else None)
            self.index = index
            made.append(self)

        def close(self) -> None:
            super().close()
            if self.index == 1:
                raise OSError("the display is gone")

    vector = Gymnasium(Fails).make(range(4))
    with pytest.raises(EnvironmentFault, match=r"environment 1: close\(\) raised OSError: the display is gone"):
        vector.close()
    assert [one.closed for one in made] == [1] * 5
    vector = Gymnasium(Fails).make(range(4))
    vector.reset(seed=1)
    with pytest.raises(EnvironmentFault, match="bad state"):
        vector.step(np.zeros(4, np.int64))
    vector.close()  # it is known already that they are broken


def test_the_beat_says_what_begins() -> None:
    vector = Gymnasium(Plain, length=2).make(range(3, 5))
    heard: list[Any] = []
    vector.beat = lambda *what: heard.append(what[:3])  # type: ignore[attr-defined]
    vector.reset(seed=1)
    for _ in range(4):
        vector.step(np.zeros(2, np.int64))
    moments = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert heard == [(index, *moment) for moment in moments for index in (3, 4)]


# Numbers --------------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("result", "field"),
    [
        ((GOOD, NAN, False, False, {}), "reward nan"),
        ((GOOD, np.float32(INF), False, False, {}), "reward inf"),
        ((GOOD, 1e300, False, False, {}), r"reward 1e\+300"),
        ((np.array([0, NAN, 0], np.float32), 0.0, False, False, {}), r"observation\[1\] = nan"),
        ((np.array([0, 0, -INF], np.float32), 0.0, False, False, {}), r"observation\[2\] = -inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_HC_15_what_is_no_number_is_found_in_its_step(result: Any, field: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"environment 2 .*{field}.*finite") as caught:
        steps(Gymnasium(only(2, result=result, at=500)), 500)
    assert (caught.value.environment, caught.value.step) == (2, 500)
    observation, reward, *_ = steps(Gymnasium(only(2, result=result, at=500), non_finite="pass"), 500)
    assert not (np.isfinite(observation).all() and np.isfinite(reward).all())
    assert np.isfinite(observation[[0, 1, 3]]).all()


def test_a_first_observation_is_looked_at_too() -> None:
    env = Gymnasium(only(1, first=(np.full(3, NAN, np.float32), {})))
    with pytest.raises(EnvironmentFault, match=r"environment 1 .* reset\(\) gave .*\[0\] = nan"):
        env.make(range(2)).reset(seed=1)


def test_a_later_first_observation_is_known_to_be_a_reset_s() -> None:
    class Fails(Plain):
        resets = 0

        def reset(self, **kwargs: Any) -> Any:
            self.resets += 1
            return (np.full(3, NAN, np.float32), {}) if self.resets == 2 else super().reset(**kwargs)

    with pytest.raises(EnvironmentFault, match=r"environment 0 .* reset\(\) gave .*\[0\] = nan") as caught:
        steps(Gymnasium(Fails, length=5), 6)
    assert (caught.value.episode, caught.value.step) == (1, 0)


def test_sums_that_overflow_are_no_fault() -> None:
    large = np.full(3, np.finfo(np.float16).max, np.float16)
    space = spaces.Box(-INF, INF, (3,), np.float16)
    assert (steps(Gymnasium(Plain, space=space, good=large), 2)[0] == large).all()


# Forms ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.array([0.25, 0.1, 1]), [0.25, np.float32(0.1), 1]),
        ([0.25, 0.5, 1], [0.25, 0.5, 1]),
        (np.array([0, 1, -1]), [0, 1, -1]),
        (np.array([0, 1, np.float32(1 + 1e-7)], np.float32), [0, 1, np.nextafter(np.float32(1), np.float32(2))]),
    ],
    ids=["float64", "list", "int", "just above"],
)
@pytest.mark.parametrize("bounds", ["ignore", "raise"])
def test_US_02_other_numbers_are_cast(given: Any, kept: Any, bounds: Any) -> None:
    observation, *_ = steps(Gymnasium(Plain, bounds=bounds, result=(given, 0.0, False, False, {})), 1)
    assert observation.dtype == np.float32
    assert observation.tolist() == [[float(value) for value in kept]] * 4


@pytest.mark.parametrize(
    ("dtype", "given", "message"),
    [
        (
            np.uint8,
            np.array([0, 256, 0]),
            r"expected uint8 \(3,\), got int64 \(3,\) with values that uint8 cannot hold",
        ),
        (np.uint8, np.array([0.0, 1.0, 2.0]), r"expected uint8 \(3,\), got float64 \(3,\)"),
        (np.float32, np.array(["a", "b", "c"]), r"expected float32 \(3,\), got <U1 \(3,\)"),
        (np.float32, [[1], [1, 2], []], "which is no array"),
    ],
)
def test_US_02_what_would_be_another_value_is_not_cast(dtype: Any, given: Any, message: str) -> None:
    space = spaces.Box(0, 1, (3,), dtype)
    env = Gymnasium(Plain, space=space, good=np.zeros(3, dtype), result=(given, 0.0, False, False, {}))
    with pytest.raises(EnvironmentFault, match=message):
        steps(env, 1)


ROOM = spaces.Dict(lidar=spaces.Box(0, 100, (32,), np.float32), door=spaces.Discrete(2))


def room(value: float) -> Any:
    lidar = np.full(32, 50, np.float32)
    lidar[17] = value
    return {"lidar": lidar, "door": 1}


def test_US_03_what_is_out_of_bounds_is_named() -> None:
    wrong = {"result": (room(300), 0.0, False, False, {}), "at": 12}
    kwargs: dict[str, Any] = {"space": ROOM, "good": room(50)}
    with pytest.raises(EnvironmentFault) as caught:
        steps(Gymnasium(only(3, **wrong), bounds="raise", **kwargs), 20)
    text = str(caught.value)
    assert len(text.splitlines()) <= 15
    for part in ("lidar[17]", "300.0", "low 0.0", "high 100.0", "float32", "(32,)", "environment 3", "step 12"):
        assert part in text
    assert steps(Gymnasium(only(3, **wrong), **kwargs), 12)[0]["lidar"][3, 17] == 300
    clipped = steps(Gymnasium(only(3, **wrong), bounds="clip", **kwargs), 12)[0]["lidar"]
    assert clipped[3, 17] == 100
    assert clipped[:, 0].tolist() == [50] * 4


@pytest.mark.parametrize("bounds", ["ignore", "clip"])
def test_a_value_that_a_discrete_space_does_not_have_is_refused(bounds: Any) -> None:
    env = Gymnasium(Plain, space=spaces.Discrete(3, start=2), good=2, result=(5, 0.0, False, False, {}), bounds=bounds)
    with pytest.raises(EnvironmentFault, match=r"observation = 5, outside of its bounds \(Discrete\(3, start=2\)\)"):
        steps(env, 1)


@pytest.mark.parametrize("name", ["non_finite", "bounds"])
def test_policies_that_there_are_not(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='warn'\): give one of"):
        Gymnasium(Plain, **{name: "warn"})


STEP = "expected a tuple of observation, reward, terminated, truncated and info, a dict"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((GOOD, 0.0, False, {}), rf"a tuple of 4 \(float32 \(3,\), a float, a bool, a dict\): {STEP}"),
        (GOOD, rf"returned float32 \(3,\): {STEP}"),
        (lambda self: None, rf"returned a NoneType: {STEP}"),
        ((GOOD, 0.0, False, False, []), rf"a list of 0\): {STEP}"),
        ((GOOD, None, False, False, {}), "as reward a NoneType: expected one number"),
        ((GOOD, "1.0", False, False, {}), "as reward a str: expected one number"),
        ((GOOD, 1j, False, False, {}), "as reward a complex: expected one number"),
        ((GOOD, 0.0, None, False, {}), "as terminated a NoneType: expected True or False"),
        ((GOOD, 0.0, False, 0.5, {}), "as truncated a float: expected True or False"),
        ((GOOD, 0.0, False, 2, {}), "as truncated a int: expected True or False"),
        ((np.zeros((1, 3), np.float32), 0.0, False, False, {}), r"expected float32 \(3,\), got float32 \(1, 3\)"),
    ],
)
def test_US_08_what_a_step_must_not_return(result: Any, message: str) -> None:
    env = Gymnasium(only(1, result=result, at=3))
    with pytest.raises(EnvironmentFault, match=rf"environment 1 .*step\(\) .*{message}") as caught:
        steps(env, 3)
    assert caught.value.step == 3


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (GOOD, r"returned float32 \(3,\): expected a tuple of observation and info, a dict"),
        ((GOOD, []), r"a tuple of 2 \(float32 \(3,\), a list of 0\): expected a tuple of observation and info"),
        ((np.zeros(4, np.float32), {}), r"expected float32 \(3,\), got float32 \(4,\)"),
    ],
)
def test_US_08_what_a_reset_must_not_return(first: Any, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"environment 1 .*reset\(\) .*{message}"):
        Gymnasium(only(1, first=first)).make(range(2)).reset(seed=1)


@pytest.mark.parametrize("yes", [True, np.True_, 1, np.int64(1), np.array(True)], ids=repr)
def test_US_08_ends_in_any_form(yes: Any) -> None:
    no = type(yes)(0) if not isinstance(yes, np.ndarray) else np.array(False)
    for terminated, truncated in ((yes, no), (no, yes)):
        result = steps(Gymnasium(Plain, result=(GOOD, 0.0, terminated, truncated, {})), 1)
        assert result[2].tolist() == [bool(terminated)] * 4
        assert result[3].tolist() == [bool(truncated)] * 4


@pytest.mark.parametrize("form", [float, np.float64, np.float32, np.array, lambda value: np.array([value])])
def test_LC_34_rewards_in_any_form(form: Any) -> None:
    reward = steps(Gymnasium(Plain, result=(GOOD, form(0.3), False, False, {})), 1)[1]
    assert reward.dtype == np.float32
    assert reward.tolist() == [float(np.float32(0.3))] * 4


def test_LC_34_two_rewards_are_refused() -> None:
    with pytest.raises(EnvironmentFault, match=r"environment 2 .*as reward float64 \(2,\): expected one number"):
        steps(Gymnasium(only(2, result=(GOOD, np.zeros(2), False, False, {}))), 1)


MIXED = spaces.Dict(
    b=spaces.Discrete(200), a=spaces.Box(0, 1, (1,)), n=spaces.Dict(z=spaces.Discrete(30), y=spaces.Box(2, 3, (2,)))
)


class Shuffled(gymnasium.Env[Any, Any]):
    """Gives dicts whose keys come in another order every time; each value says its key."""

    observation_space, action_space = MIXED, spaces.Discrete(2)

    def __init__(self, index: int) -> None:
        self.random = random.Random(index)

    def _shuffled(self, items: dict[str, Any]) -> dict[str, Any]:
        return dict(self.random.sample(list(items.items()), len(items)))

    def _show(self) -> Any:
        inner = self._shuffled({"z": 26, "y": np.array([2.25, 2.75], np.float32)})
        return self._shuffled({"a": np.array([0.5], np.float32), "b": 111, "n": inner})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._show(), {}

    def step(self, action: Any) -> Any:
        return self._show(), 0.0, False, False, {}


def test_LC_33_values_go_by_their_key() -> None:
    vector = Gymnasium(Shuffled).make(range(3))
    observations = [vector.reset(seed=1)] + [vector.step(np.zeros(3, np.int64))[0] for _ in range(10)]
    for observation in observations:
        assert observation["a"].tolist() == [[0.5]] * 3
        assert observation["b"].tolist() == [111] * 3
        assert observation["n"]["z"].tolist() == [26] * 3
        assert observation["n"]["y"].tolist() == [[2.25, 2.75]] * 3


@pytest.mark.parametrize("missing", [{"lidar": GOOD}, {"lidar": GOOD, "door": 1, "key": 2}, [1, 2]])
def test_a_dict_with_other_keys_is_refused(missing: Any) -> None:
    env = Gymnasium(Plain, space=ROOM, good=room(50), result=(missing, 0.0, False, False, {}))
    with pytest.raises(EnvironmentFault, match=r"expected a dict with the keys \['door', 'lidar'\], got "):
        steps(env, 1)


@pytest.mark.parametrize(
    "space",
    [spaces.Text(3), spaces.Sequence(FLOATS), spaces.Graph(FLOATS, None), spaces.OneOf((FLOATS, spaces.Discrete(2)))],
    ids=lambda space: type(space).__name__,
)
def test_US_09_what_has_no_fixed_size_is_refused_with_what_is_supported(space: Any) -> None:
    for given in (space, spaces.Dict(inner=spaces.Tuple((FLOATS, space)))):
        with pytest.raises(ConfigError, match="supported are Box, Discrete, MultiDiscrete with one axis, MultiBinary"):
            _ = Gymnasium(Plain, space=given).spec


# Actions --------------------------------------------------------------------------------------------------------------

LEVER = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros((2, 2), np.float32), r"expected an array float32 \(4, 2\), got float32 \(2, 2\)"),
        (np.zeros((5, 2), np.float32), r"expected an array float32 \(4, 2\), got float32 \(5, 2\)"),
        (np.zeros((4, 2)), r"expected an array float32 \(4, 2\), got float64 \(4, 2\)"),
        (
            np.array([[0, 0], [0, 0], [0, NAN], [0, 0]], np.float32),
            r"of number 2 of these .* is nan at \[1\]: expected",
        ),
    ],
    ids=["2 actions", "5 actions", "dtype", "NaN"],
)
def test_HC_07_bad_actions_are_refused_at_once(action: Any, message: str) -> None:
    made: list[Plain] = []

    def make(index: int) -> Plain:
        made.append(Plain(action=LEVER))
        return made[-1]

    vector = Gymnasium(make).make(range(4))
    vector.reset(seed=1)
    begun = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        vector.step(action)
    assert time.perf_counter() - begun < 1
    assert isinstance(caught.value, ConfigError | ShapeError)
    assert not any(one.taken for one in made)
    vector.step(np.full((4, 2), 0.5, np.float32))  # the environments are as they were
    assert [one.taken[0].tolist() for one in made[1:]] == [[0.5, 0.5]] * 4


def test_an_action_is_the_environments_to_change() -> None:
    def change(self: Plain) -> Any:
        self.taken[-1] *= 100
        return GOOD, 0.0, False, False, {}

    vector = Gymnasium(Plain, action=LEVER, result=change).make(range(2))
    vector.reset(seed=1)
    action = np.full((2, 2), 0.5, np.float32)
    vector.step(action)
    assert (action == 0.5).all()


def test_actions_that_are_trees_reach_each_environment_as_its_part() -> None:
    made: list[Plain] = []

    def make(index: int) -> Plain:
        made.append(Plain(action=spaces.Dict(turn=spaces.Discrete(3), push=spaces.Tuple((LEVER, LEVER)))))
        return made[-1]

    vector = Gymnasium(make).make(range(2))
    vector.reset(seed=1)
    push = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    vector.step({"turn": np.array([1, 2]), "push": (push[0], push[1])})
    for row, one in enumerate(made[1:]):
        taken = one.taken[0]
        assert taken["turn"] == row + 1
        assert [part.tolist() for part in taken["push"]] == push[:, row].tolist()


# Factories ------------------------------------------------------------------------------------------------------------


def test_HC_09_one_environment_for_all_is_found_at_the_start() -> None:
    premade = Plain()
    with pytest.raises(ConfigError, match="the factory returned the same object for environments 0 and 1"):
        Gymnasium(lambda: premade).make(range(4))
    with pytest.raises(ConfigError, match="the factory returned the same object for environments 4 and 5"):
        Gymnasium(lambda: gymnasium.wrappers.TimeLimit(premade, 9)).make(range(4, 8))


def test_HC_09_a_factory_is_told_which_environment_it_makes() -> None:
    shown: list[int] = []

    class Numbered(Plain):
        def __init__(self, index: int = -1, offset: int = 0) -> None:
            super().__init__(good=np.full(3, index / 10 + offset, np.float32))
            shown.append(index)

    env = Gymnasium(Numbered)
    _ = env.spec
    first, second = (env.make(indices).reset(seed=1)[:, 0] * 10 for indices in (range(2), range(2, 4)))
    assert [*first.round(), *second.round()] == [0, 1, 2, 3]
    assert shown == [0, 0, 1, 2, 3]  # the first for the spec
    assert (Gymnasium(Numbered, index=5).make(range(2)).reset(seed=1) == np.float32(0.5)).all()


def test_environments_have_the_same_spaces() -> None:
    def make(index: int) -> Plain:
        return Plain(space=spaces.Box(-1, 2, (3,), np.float32) if index == 3 else FLOATS)

    with pytest.raises(ConfigError, match=r"environment 3 has .*: expected the spaces of environment 0"):
        Gymnasium(make).make(range(2, 4))


# The same as gymnasium's loop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["Acrobot-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1"])
def test_all_numbers_are_those_of_gymnasium_s_own_loop(id: str) -> None:
    env = Gymnasium(id, max_episode_steps=20)
    ours = env.make(range(3, 6))
    theirs: Any = SyncVectorEnv([lambda: gymnasium.make(id, max_episode_steps=20)] * 3)
    theirs.action_space.seed(0)
    seeds = [int(environment_seed(9, index).generate_state(1)[0] >> 1) for index in range(3, 6)]
    expected, got = theirs.reset(seed=seeds)[0], ours.reset(seed=9)
    ends = 0
    for _ in range(100):
        for mine, reference in zip(
            *(tree if isinstance(tree, tuple) else (tree,) for tree in (got, expected)), strict=True
        ):
            assert mine.tobytes() == np.asarray(reference, mine.dtype).tobytes()
        action = theirs.action_space.sample()
        expected, reward, terminated, truncated, _ = theirs.step(action)
        got, *rest = ours.step(action)
        assert rest[0].tolist() == reward.astype(np.float32).tolist()
        assert [flag.tolist() for flag in rest[1:]] == [terminated.tolist(), truncated.tolist()]
        ends += int(terminated.sum() + truncated.sum())
    assert ends >= 12


# Wrappers and limits --------------------------------------------------------------------------------------------------


class Counting(gymnasium.Env[Any, Any]):
    """Shows 100 times its episode plus the step."""

    observation_space, action_space = spaces.Box(0, 10_000, (1,), np.float32), spaces.Discrete(2)

    def __init__(self) -> None:
        self.episode, self.count = -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.count = self.episode + 1, 0
        return np.array([100 * self.episode], np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.array([100 * self.episode + self.count], np.float32), 1.0, False, False, {}


def test_a_class_can_be_given_a_time_limit() -> None:
    vector = Gymnasium(Counting, max_episode_steps=3).make(range(2))
    vector.reset(seed=1)
    ends = [vector.step(np.zeros(2, np.int64))[2:] for _ in range(8)]
    assert [truncated.all() for _, truncated in ends] == [False, False, True, False, False, False, True, False]
    assert not any(terminated.any() for terminated, _ in ends)
    vector = Gymnasium(Counting, max_episode_steps=-1).make(range(2))
    vector.reset(seed=1)
    assert not any(vector.step(np.zeros(2, np.int64))[3].any() for _ in range(8))


def test_a_class_that_has_a_time_limit_of_its_own_is_given_it() -> None:
    given: list[Any] = []

    class Limited(Counting):
        def __init__(self, max_episode_steps: int = 9) -> None:
            super().__init__()
            given.append(max_episode_steps)

    _ = Gymnasium(Limited, max_episode_steps=3).spec
    assert given == [3]


@pytest.mark.parametrize("limit", [0, -2, 2.5, "5"])
def test_a_time_limit_that_is_none(limit: Any) -> None:
    with pytest.raises(ConfigError, match="give a number from 1 on, or -1"):
        Gymnasium(Counting, max_episode_steps=limit)


@pytest.mark.parametrize("padding", ["reset", "zero"])
def test_stacked_frames_do_not_leak_over_the_end_of_an_episode(padding: str) -> None:
    def stacked(env: Any) -> Any:
        return FrameStackObservation(env, 3, padding_type=padding)

    env = Gymnasium(Counting, max_episode_steps=4, wrappers=[stacked])
    assert env.spec.observation.shape == (3, 1)
    vector = env.make(range(2))
    rows = [vector.reset(seed=1)[..., 0].copy()] + [
        vector.step(np.zeros(2, np.int64))[0][..., 0].copy() for _ in range(14)
    ]
    for t, row in enumerate(rows):
        episode, step = divmod(t, 5)  # four steps, and one that resets
        first = 100 * episode
        pad = first if padding == "reset" else 0
        expected = [first + step - age if age <= step else pad for age in (2, 1, 0)]
        assert row.tolist() == [expected] * 2


# Packages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "module", "message"),
    [
        ("ALE/Pong-v5", "ale_py", 'needs ale-py, which is not installed. pip install "headrace[atari]"'),
        (
            "MiniGrid-Empty-5x5-v0",
            "minigrid",
            'needs minigrid, which is not installed. pip install "headrace[minigrid]"',
        ),
        ("FetchReach-v4", "gymnasium_robotics", "needs gymnasium-robotics, which is not installed. pip install"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    id: str, module: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=re.escape(f'"{id}" {message}')):
        Gymnasium(id)


def test_a_package_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "minigrid.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "minigrid", raising=False)
    with pytest.raises(ConfigError, match="minigrid, which could not be imported: No module named 'what_it_needs'"):
        Gymnasium("MiniGrid-Empty-5x5-v0")
