"""check_env: every planted fault is one finding, all of them at once, and what is right is left in peace."""

from __future__ import annotations

import random
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from headrace import ConfigError, Gymnasium
from headrace.envs.check import Checked, Finding, check_env
from headrace.envs.toy import Identity

UNIT = spaces.Box(0, 1, (20,), np.float32)


class Right(gymnasium.Env[Any, Any]):
    """A ball that rolls; nothing is wrong with it. A subclass plants its faults in the hooks below."""

    metadata = {"render_modes": ["rgb_array", "ansi"]}  # noqa: RUF012
    observation_space: Any = spaces.Dict({"lidar": UNIT, "gear": spaces.Discrete(3, start=-1)})
    action_space: Any = spaces.Discrete(2)
    length = 7

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation(), self.info()

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation(), self.reward(), self.terminated(), self.truncated(), self.info()

    def observation(self) -> Any:
        return {"lidar": self.np_random.random(20, dtype=np.float32), "gear": int(self.np_random.integers(-1, 2))}

    def reward(self) -> Any:
        return float(self.steps)

    def terminated(self) -> Any:
        return self.steps == self.length

    def truncated(self) -> Any:
        return False

    def info(self) -> Any:
        return {}

    def render(self) -> Any:
        return "a ball" if self.render_mode == "ansi" else np.zeros((4, 6, 3), np.uint8)


def keys(checked: Checked) -> list[str]:
    return sorted(finding.key for finding in checked.findings)


def only(maker: Any, **arguments: Any) -> Finding:
    """The one finding."""
    checked = check_env(maker, **{"steps": 20, **arguments})
    assert len(checked.findings) == 1, str(checked)
    assert not checked.ok
    return checked.findings[0]


# What is right --------------------------------------------------------------------------------------------------------


class Nested(Right):
    """Every kind of space, on both sides, and a mask of what is allowed, which it insists on."""

    observation_space = spaces.Dict(
        {
            "action_mask": spaces.Box(0, 1, (2 + 5 + 4,), np.int8),
            "pair": spaces.Tuple((spaces.MultiBinary((2, 2)), spaces.MultiDiscrete([2, 3], start=[0, 5]))),
            "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "half": spaces.Box(-1, 1, (), np.float16),
        }
    )
    action_space = spaces.Dict(
        {
            "b": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2))),
            "a": spaces.Discrete(2, start=-1),
            "c": spaces.Box(-1, 1, (2,), np.float32),
        }
    )

    def observation(self) -> Any:
        draw = self.np_random.integers
        self.mask = np.array([1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1], np.int8)
        self.mask[:2] = np.roll(self.mask[:2], draw(2))
        return {
            "action_mask": self.mask,
            "pair": (draw(2, size=(2, 2)).astype(np.int8), np.array([draw(2), 5 + draw(3)])),
            "image": draw(256, size=(4, 4, 3)).astype(np.uint8),
            "half": np.array(draw(-1, 2), np.float16),
        }

    def step(self, action: Any) -> Any:
        assert self.mask[action["a"] + 1]
        (first, second), (one, other) = action["b"]
        assert first == 1
        assert second in (0, 1)
        assert one == 0 or not self.mask[7]  # of the pair (off, on) = (1, 0): only off
        assert other in (0, 1)
        assert np.abs(action["c"]).max() <= 1
        return super().step(action)


REGISTERED = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0", "FrozenLake-v1"]


@pytest.mark.parametrize("env", [*REGISTERED, Right, Nested])
def test_nothing_is_found_where_nothing_is_wrong(env: Any) -> None:
    checked = check_env(env, steps=250)
    assert checked.ok, str(checked)
    assert checked.env_steps >= 250
    assert checked.step_seconds is not None
    assert 0 < checked.step_seconds.median <= checked.step_seconds.p95 <= checked.step_seconds.slowest
    assert checked.step_seconds.count == checked.env_steps
    assert "nothing found" in str(checked)
    assert "steps/s" in str(checked)


def test_nothing_is_found_in_mujoco_s_and_minigrid_s() -> None:
    pytest.importorskip("mujoco")
    assert check_env("HalfCheetah-v5", steps=100).ok
    wrappers = pytest.importorskip("minigrid.wrappers")
    checked = check_env(Gymnasium("MiniGrid-Empty-5x5-v0", wrappers=[wrappers.ImgObsWrapper]), steps=100)
    assert checked.ok, str(checked)


@pytest.mark.parametrize(
    "give", [Right, lambda: Right(), Gymnasium(Right), "gymnasium.envs.classic_control:CartPoleEnv"]
)
def test_all_that_makes_an_environment_is_taken(give: Any) -> None:
    assert check_env(give, steps=20).ok


def test_an_environment_itself_is_taken_and_left_open() -> None:
    closed: list[bool] = []

    class Closing(Right):
        def close(self) -> None:
            closed.append(True)

    env = Closing()
    checked = check_env(env, steps=20)
    assert checked.ok
    assert any("shipping" in note for note in checked.notes)
    assert not closed
    assert check_env(Closing, steps=20).ok
    assert len(closed) == 3  # two that were compared, one that was rendered


@pytest.mark.parametrize("give", [3, None, Identity(), [Right()], gymnasium.make_vec("CartPole-v1", num_envs=2)])
def test_what_is_no_environment_is_refused(give: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a gymnasium.Env, a class or function"):
        check_env(give)


def test_what_makes_no_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="made a int"):
        check_env(lambda: 3)
    with pytest.raises(ConfigError, match="CartPole-v1"):
        check_env("CartPool-v1")
    with pytest.raises(ConfigError, match="at least one step"):
        check_env(Right, steps=0)


def test_global_generators_stay_as_they_were() -> None:
    class Global(Right):
        def step(self, action: Any) -> Any:
            np.random.rand()
            random.random()
            torch.rand(1)
            return super().step(action)

    before = np.random.get_state()[1].tobytes(), random.getstate(), torch.get_rng_state().tolist()  # type: ignore
    checked = check_env(Global, steps=20)
    assert keys(checked) == ["random"] * 3
    assert (np.random.get_state()[1].tobytes(), random.getstate(), torch.get_rng_state().tolist()) == before  # type: ignore


# All at once ----------------------------------------------------------------------------------------------------------


def test_five_planted_faults_are_five_findings() -> None:
    class Five(Right):
        def observation(self) -> Any:
            found = super().observation()
            found["lidar"][17] = 7.5
            return found

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset()  # the seed is lost

        def reward(self) -> Any:
            return float("nan")

        def terminated(self) -> Any:
            return float(super().terminated())

        def info(self) -> Any:
            return None

    checked = check_env(Five)
    assert keys(checked) == ["info", "observation['lidar'][17]", "reward", "seed", "terminated"]
    found = {finding.key: finding for finding in checked.findings}
    assert found["observation['lidar'][17]"].expected == "from 0.0 to 1.0"
    assert found["observation['lidar'][17]"].actual.startswith("7.5 (step 0 of episode 1), and ")
    assert found["reward"].expected == "a finite number"
    assert found["reward"].actual.startswith("nan (step 1 of episode 1), and ")
    assert found["terminated"].actual.startswith("0.0, a float")
    assert found["info"].actual.startswith("None")
    lines = str(checked).splitlines()
    assert "Five" in lines[0]
    assert "5 findings" in lines[0]
    assert [line[:4] for line in lines[1:6]] == ["  1.", "  2.", "  3.", "  4.", "  5."]


# One by one -----------------------------------------------------------------------------------------------------------


def seen(change: Any) -> type[Right]:
    """The environment with this function of its observations."""

    class Changed(Right):
        def observation(self) -> Any:
            return change(super().observation())

    return Changed


def put(value: Any) -> Any:
    def change(observation: Any) -> Any:
        observation["lidar"][3:5] = value
        return observation

    return change


@pytest.mark.parametrize(
    ("change", "key", "expected", "actual"),
    [
        (put(np.nan), "observation['lidar'][3]", "a finite number", "nan, and 1 other elements"),
        (put(-np.inf), "observation['lidar'][3]", "a finite number", "-inf, and 1"),
        (put(-0.5), "observation['lidar'][3]", "from 0.0 to 1.0", "-0.5, and 1"),
        (lambda o: {**o, "gear": 2}, "observation['gear']", "from -1 to 1", "2"),
        (lambda o: {**o, "gear": 0.0}, "observation['gear']", "int64 ()", "a float"),
        (lambda o: {**o, "lidar": o["lidar"].astype(float)}, "observation['lidar']", "float32 (20,)", "float64 (20,)"),
        (lambda o: {**o, "lidar": o["lidar"][1:]}, "observation['lidar']", "float32 (20,)", "float32 (19,)"),
        (lambda o: {**o, "lidar": o["lidar"].tolist()}, "observation['lidar']", "float32 (20,)", "a list"),
        (lambda o: {**o, "lidar": [[1], [1, 2]]}, "observation['lidar']", "float32 (20,)", "a list"),
        (
            lambda o: {"lidar": o["lidar"]},
            "observation",
            "a dict with the keys ['gear', 'lidar']",
            "the keys ['lidar']",
        ),
        (lambda o: o["lidar"], "observation", "a dict with the keys ['gear', 'lidar']", "float32 (20,)"),
        (lambda o: None, "observation", "a dict with the keys ['gear', 'lidar']", "None"),
    ],
)
def test_observations(change: Any, key: str, expected: str, actual: str) -> None:
    found = only(seen(change))
    assert (found.key, found.expected) == (key, expected)
    assert found.actual.startswith(actual)


def test_observations_in_tuples_and_of_several_axes() -> None:
    class Two(Right):
        observation_space = spaces.Tuple((spaces.Box(0, 9, (2, 3), np.float32), spaces.MultiDiscrete([2, 2])))

        def observation(self) -> Any:
            grid = self.np_random.random((2, 3), dtype=np.float32)
            grid[1, 2] = 10
            return grid, np.array([0, 2])

    assert keys(check_env(Two, steps=10)) == ["observation[0][1, 2]", "observation[1][1]"]


@pytest.mark.parametrize(
    ("name", "value", "actual"),
    [
        ("reward", None, "None"),
        ("reward", "1", "a str"),
        ("reward", np.ones(2), "float64 (2,)"),
        ("reward", np.inf, "inf"),
        ("reward", 1j, "a complex"),
        ("terminated", None, "None"),
        ("truncated", 0.0, "0.0, a float"),
        ("truncated", "no", "'no', a str"),
        ("truncated", 2, "2, an int"),
        ("info", [], "a list"),
    ],
)
def test_what_a_step_returns(name: str, value: Any, actual: str) -> None:
    found = only(type("Odd", (Right,), {name: lambda self: value}))
    assert found.key == name
    assert found.actual.startswith(actual + " (")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", 1),
        ("reward", np.float32(1)),
        ("reward", np.array(1.0)),
        ("reward", np.ones(1)),
        ("truncated", np.False_),
        ("truncated", 0),
        ("truncated", np.array(False)),
    ],
)
def test_numbers_and_bools_of_numpy_are_fine(name: str, value: Any) -> None:
    assert check_env(type("Fine", (Right,), {name: lambda self: value}), steps=10).ok


def test_the_old_interface() -> None:
    class Old(Right):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed=seed)[0]

        def step(self, action: Any) -> Any:
            observation, reward, terminated, _, info = super().step(action)
            return observation, reward, terminated, info

    checked = check_env(Old)
    assert keys(checked) == ["reset", "step"]
    assert "got 4 " in str(checked)


def test_what_cannot_be_told_apart_is_not_stepped() -> None:
    class Three(Right):
        def step(self, action: Any) -> Any:
            return super().step(action)[:3]

    assert only(Three).actual.startswith("3 ")


@pytest.mark.parametrize("name", ["reset", "step", "render", "close", "__init__"])
def test_what_raises_is_a_finding(name: str) -> None:
    def raises(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("the ball is lost")

    found = only(type("Raising", (Right,), {"render_mode": "ansi", name: raises}))
    assert found.key == ("make" if name == "__init__" else name)
    assert found.actual.startswith("ValueError: the ball is lost")


def test_a_step_that_raises_late_hides_nothing_else() -> None:
    class Late(Right):
        def step(self, action: Any) -> Any:
            if self.steps == 5:
                raise RuntimeError("the ball is lost")
            return super().step(action)

        def truncated(self) -> Any:
            return None

    checked = check_env(Late)
    assert keys(checked) == ["step", "truncated"]
    assert checked.findings[1].actual.startswith("RuntimeError: the ball is lost (step 6 of episode 1), and ")


def test_a_reset_without_a_seed_that_raises() -> None:
    class Needs(Right):
        def reset(self, *, seed: Any, options: Any = None) -> Any:  # type: ignore[override]
            return super().reset(seed=seed)

    class Takes(Right):
        def reset(self) -> Any:  # type: ignore[override]
            return super().reset()

    assert only(Needs).actual.startswith("TypeError")
    assert only(Takes).actual.startswith("TypeError")


def test_it_breaks_after_many_episodes() -> None:
    class Worn(Right):
        episodes = 0

        def reset(self, **given: Any) -> Any:
            self.episodes += 1
            if self.episodes == 25:
                raise OSError("the disk is full")
            return super().reset(**given)

    found = only(Worn, steps=10)
    assert found.key == "reset"
    assert found.actual.startswith("OSError: the disk is full (step 0 of episode 25)")


# Chance ---------------------------------------------------------------------------------------------------------------


class Own(Right):
    """Has a generator of its own, made by `fresh` at each reset."""

    generator: Any = None

    def fresh(self, seed: int | None) -> Any:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.generator = self.fresh(seed)
        return super().reset()

    def observation(self) -> Any:
        return {"lidar": self.generator.random(20, dtype=np.float32), "gear": 0}


@pytest.mark.parametrize(
    ("fresh", "expected", "actual"),
    [
        (lambda self, seed: self.generator or np.random.default_rng(), "the same episode from", "another one: observ"),
        (
            lambda self, seed: self.generator if seed is None and self.generator else np.random.default_rng(3),
            "other episodes from another seed",
            "the same",
        ),
        (lambda self, seed: np.random.default_rng(seed), "episodes after the seeded one", "others"),
        (lambda self, seed: np.random.default_rng(seed or 3), "new episodes from resets without", "the same"),
        (
            lambda self, seed: (
                self.generator if seed is None and self.generator else np.random.default_rng((seed or 0, id(self)))
            ),
            "the same episode from seed=0 and the same actions in every environment",
            "another one",
        ),
    ],
)
def test_seeds_that_do_not_decide(fresh: Any, expected: str, actual: str) -> None:
    found = only(type("Chancy", (Own,), {"fresh": fresh}))
    assert found.key == "seed"
    assert found.expected.startswith(expected)
    assert found.actual.startswith(actual)


def test_no_chance_at_all_is_fine() -> None:
    assert check_env(seen(lambda o: {"lidar": np.full(20, 0.5, np.float32), "gear": 0}), steps=20).ok


def test_something_that_survives_a_reset() -> None:
    class Grows(Right):
        level = 0

        def reset(self, **given: Any) -> Any:
            self.level = min(self.level + 1, 10**6)
            return super().reset(**given)

        def reward(self) -> Any:
            return self.level

    found = only(Grows)
    assert found.key == "seed"
    assert "reward after 1 steps differs" in found.actual


@pytest.mark.parametrize(
    ("draw", "generator"),
    [(np.random.rand, "numpy.random"), (random.random, "random"), (lambda: torch.rand(()).item(), "torch generator")],
)
def test_global_generators_are_one_finding(draw: Any, generator: str) -> None:
    class Global(Right):
        def observation(self) -> Any:
            return {"lidar": np.full(20, draw(), np.float32), "gear": 0}

    found = only(Global)
    assert (found.key, found.expected) == ("random", f"no use of the global {generator}")


# In place, factories, spaces, masks, pictures -------------------------------------------------------------------------


def test_what_is_changed_in_place() -> None:
    class Shared(Right):
        shown = np.zeros(20, np.float32)

        def observation(self) -> Any:
            self.shown[:] = super().observation()["lidar"]
            return {"lidar": self.shown, "gear": 0}

    found = only(Shared)
    assert found.key == "observation['lidar']"
    assert found.actual.startswith("step changes it in place (step 1 of episode 1)")

    class Scales(Right):
        action_space = spaces.Box(1, 2, (1,), np.float32)

        def step(self, action: Any) -> Any:
            action *= 2
            return super().step(action)

    assert only(Scales).key == "action"


def test_factories() -> None:
    env = Right()
    found = only(lambda: env)
    assert (found.key, found.actual) == ("make", "the same one twice")
    lock = threading.Lock()
    found = only(lambda: Right() if lock else None)
    assert found.key == "shipping"
    assert "lock" in found.actual


def test_spaces() -> None:
    class Odd(Right):
        observation_space = spaces.Dict({"lidar": UNIT, "gear": spaces.Discrete(3, start=-1), "note": spaces.Text(9)})
        action_space = spaces.MultiDiscrete([[2, 2], [2, 2]])

        def observation(self) -> Any:
            return {**super().observation(), "note": "hello"}

    assert keys(check_env(Odd, steps=10)) == ["action_space", "observation_space['note']"]

    class Without(Right):
        observation_space = None
        action_space = None

        def info(self) -> Any:
            return None

    assert keys(check_env(Without, steps=10)) == ["action_space", "info", "observation_space"]

    class Crossed(Right):
        observation_space = spaces.Dict(
            {"lidar": spaces.Box(0, 1, (20,), np.float32), "gear": spaces.Discrete(3, start=-1)}
        )

    Crossed.observation_space["lidar"].low[4] = 2
    found = only(Crossed)
    assert found.key == "observation_space['lidar']"
    assert "every low must be ≤ its high" in found.actual


def masked(mask: Any, space: Any = None) -> type[Right]:
    class Masked(Right):
        observation_space = spaces.Dict({"action_mask": space or spaces.Box(0, 9, (4,), np.int8), "lidar": UNIT})
        action_space = spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(1)))

        def observation(self) -> Any:
            return {"action_mask": mask.copy(), "lidar": super().observation()["lidar"]}

    return Masked


def test_masks() -> None:
    ones = np.ones(4, np.int8)
    assert check_env(masked(ones), steps=20).ok
    found = only(masked(np.array([1, 3, 1, 1], np.int8)))
    assert (found.key, found.expected) == ("observation['action_mask']", "zeros and ones")
    found = only(masked(np.array([1, 1, 0, 0], np.int8)))
    assert (found.key, found.expected) == ("observation['action_mask']", "at least one allowed value for each choice")
    found = only(masked(ones[:3], spaces.Box(0, 1, (3,), np.int8)))
    assert (found.key, found.expected) == ("observation_space['action_mask']", "the shape (4,)")


def test_pictures() -> None:
    class Grey(Right):
        def render(self) -> Any:
            return np.zeros((4, 6), np.uint8)

    found = only(Grey)  # it says that it can, so it is asked to
    assert (found.key, found.expected) == ("render", "uint8 [height, width, 3]")
    assert found.actual == "uint8 (4, 6)"
    assert only(Gymnasium(Grey, render_mode="ansi")).actual == "uint8 (4, 6)"
    assert only(Gymnasium(Right, render_mode="video")).key == "render_mode"
    assert any("render" in note for note in check_env("CartPole-v1", steps=10).notes)


def test_notes_are_no_findings() -> None:
    class Endless(Right):
        length = 10**9
        action_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    checked = check_env(Endless, steps=30)
    assert checked.ok
    assert "no episode ended in 30 steps, and there is no time limit" in checked.notes
    assert "action_space: not bounded on both sides (3 of 3 elements)" in checked.notes
    assert "note: no episode ended in 30 steps" in str(checked)
    limited = check_env(Gymnasium(Endless, wrappers=[lambda env: TimeLimit(env, 500)]), steps=30)
    assert not any("time limit" in note for note in limited.notes)


def test_steps_and_seed_are_what_was_asked_for() -> None:
    seeds: list[Any] = []

    class Noting(Right):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed)

    short, long = check_env(Noting, steps=10, seed=41), check_env(Noting, steps=300, seed=41)
    assert long.env_steps - short.env_steps == 290
    assert {seed for seed in seeds if seed is not None} == {41, 42}
