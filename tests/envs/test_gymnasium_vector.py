"""Vector environments of gymnasium: their three reset modes, seeds, spaces, faults."""

from __future__ import annotations

from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import ClipReward, NormalizeObservation

from headrace.envs.base import environment_seed
from headrace.envs.gymnasium import Gymnasium
from headrace.envs.gymnasium_vector import GymnasiumVector
from headrace.errors import ConfigError, EnvironmentFault
from headrace.spaces import Discrete

MODES = list(AutoresetMode)
WITHIN = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
SPACES = {
    "box": spaces.Box(0, 1000, (2,), np.float32),
    "discrete": spaces.Discrete(10_000),
    "dict": spaces.Dict(b=spaces.Discrete(10_000), a=spaces.Box(0, 1000, (2,), np.float32)),
    "tuple": spaces.Tuple((spaces.Discrete(10_000), spaces.Box(0, 1000, (2,), np.float32))),
}


class Turns(gymnasium.Env[Any, Any]):
    """Episodes of given lengths, ended by termination and truncation in turn, that show (episode, step)."""

    action_space = spaces.Discrete(2)

    def __init__(self, lengths: tuple[int, ...] = (2, 3), kind: str = "box") -> None:
        self.lengths, self.kind, self.episode = lengths, kind, -1
        self.observation_space = SPACES[kind]

    def _show(self) -> Any:
        number, array = 100 * self.episode + self.count, np.array([self.episode, self.count], np.float32)
        return {"box": array, "discrete": number, "dict": {"a": array, "b": number}, "tuple": (number, array)}[
            self.kind
        ]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.count = -1 if seed is not None else self.episode, 0
        self.episode += 1
        return self._show(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        end = self.count >= self.lengths[self.episode % len(self.lengths)]
        odd = self.episode % 2 == 1
        return self._show(), float(self.count), end and not odd, end and odd, {}


def turns(mode: Any, **kwargs: Any) -> GymnasiumVector:
    given = {name: kwargs.pop(name) for name in ("lengths", "kind") if name in kwargs}

    def make(num_envs: int) -> Any:
        return SyncVectorEnv([lambda: Turns(**given)] * num_envs, autoreset_mode=mode)

    return GymnasiumVector(make, **kwargs)


def zeros(num_envs: int) -> Any:
    return np.zeros(num_envs, np.int64)


def number(tree: Any, kind: str) -> Any:
    """100 · episode + step of what is shown, after checking that all parts say the same."""
    if kind == "box":
        return tree[:, 0] * 100 + tree[:, 1]
    if kind == "discrete":
        return tree
    numbers, array = (tree["b"], tree["a"]) if kind == "dict" else tree
    assert (numbers == number(array, "box")).all()
    return numbers


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_shows_every_episode_to_its_end(mode: Any, kind: str) -> None:
    env = turns(mode, kind=kind)
    assert env.spec.shortest_truncation == (None if mode is AutoresetMode.NEXT_STEP else 1)
    assert env.spec == cloudpickle.loads(cloudpickle.dumps(env)).spec
    vector = env.make(range(3))
    assert (number(vector.reset(seed=1), kind) == 0).all()
    seen = []
    for _ in range(11):
        observation, reward, terminated, truncated = vector.step(zeros(3))
        assert reward.dtype == np.float32
        assert terminated.dtype == truncated.dtype == bool
        row = (number(observation, kind), reward, terminated, truncated)
        final = number(vector.final_observation(), kind) if mode in WITHIN and (terminated | truncated).all() else None
        assert all((array == array[0]).all() for array in row)
        seen.append((*(array[0].item() for array in row), None if final is None else final[0].item()))
        assert final is None or (final == final[0]).all()
    vector.close()
    expected: list[Any] = []
    for episode in range(5):
        length, odd = (2, 3)[episode % 2], episode % 2 == 1
        for step in range(1, length + 1):
            end, shown = step == length, 100 * episode + step
            if mode is AutoresetMode.NEXT_STEP:
                expected.append((shown, step, end and not odd, end and odd, None))
            else:
                first = 100 * (episode + 1)
                expected.append((first if end else shown, step, end and not odd, end and odd, shown if end else None))
        if mode is AutoresetMode.NEXT_STEP:
            expected.append((100 * (episode + 1), 0, False, False, None))
    assert seen == expected[:11]


def test_one_that_resets_in_the_next_step_has_no_final_observation_apart() -> None:
    vector = turns(AutoresetMode.NEXT_STEP).make(range(2))
    vector.reset(seed=1)
    with pytest.raises(ConfigError, match="reset in the step after an end"):
        vector.final_observation()


class Bare(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Does as little as a vector environment can, and what it is told."""

    single_observation_space = spaces.Box(-1, 1, (2,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs: int, mode: Any = AutoresetMode.NEXT_STEP, **results: Any) -> None:
        self.num_envs = num_envs
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.results = results
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

    def _zeros(self) -> Any:
        return np.zeros((self.num_envs, 2), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if "reset" in self.results:
            return self.results["reset"](seed)
        return self._zeros(), {}

    def step(self, action: Any) -> Any:
        no = np.zeros(self.num_envs, bool)
        plain = {"observation": self._zeros(), "reward": np.zeros(self.num_envs), "terminated": no, "truncated": no}
        given = {**plain, "info": {}, **self.results}
        if callable(given["reward"]):
            given["reward"] = given["reward"]()
        return tuple(given[name] for name in ("observation", "reward", "terminated", "truncated", "info"))


@pytest.mark.parametrize("declared", [None, "sometimes"])
def test_an_unknown_reset_mode_is_refused(declared: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"metadata\['autoreset_mode'\] = .* Declare .*NEXT_STEP.*SAME_STEP.*DISABLED"
    ):
        _ = GymnasiumVector(Bare, mode=declared).spec


def test_a_reset_mode_may_be_declared_by_its_name() -> None:
    assert GymnasiumVector(Bare, mode="SameStep", shortest_truncation=7).spec.shortest_truncation == 7


def test_the_row_that_resets_is_none_whatever_it_says() -> None:
    yes = np.ones(3, bool)
    vector = GymnasiumVector(Bare, reward=np.full(3, 9.0), truncated=yes).make(range(3))
    vector.reset(seed=1)
    rows = [vector.step(zeros(3)) for _ in range(4)]
    assert [reward.tolist() for _, reward, _, _ in rows] == [[9.0] * 3, [0.0] * 3] * 2
    assert [truncated.all() for *_, truncated in rows] == [True, False] * 2
    assert yes.all()


FINAL = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], np.float32)


@pytest.mark.parametrize("form", ["array", "objects"])
def test_final_observations_come_as_an_array_or_one_by_one(form: str) -> None:
    given: Any = FINAL
    if form == "objects":
        given = np.array([None, FINAL[1], FINAL[2]], object)
    ends = {"terminated": np.array([False, True, False]), "truncated": np.array([False, False, True])}
    vector = GymnasiumVector(Bare, mode=AutoresetMode.SAME_STEP, info={"final_obs": given}, **ends).make(range(3))
    vector.reset(seed=1)
    observation, *_ = vector.step(zeros(3))
    assert (observation == 0).all()
    assert vector.final_observation()[1:].tolist() == FINAL[1:].tolist()


def test_final_observations_may_be_trees_of_arrays() -> None:
    class Trees(Bare):
        single_observation_space = spaces.Dict(p=spaces.Tuple((Bare.single_observation_space, spaces.Discrete(9))))

        def _zeros(self) -> Any:
            return {"p": (super()._zeros(), zeros(self.num_envs))}

    ends = {"truncated": np.array([False, True, True])}
    final = {"p": (FINAL, np.array([1, 2, 3]))}
    vector = GymnasiumVector(Trees, mode=AutoresetMode.SAME_STEP, info={"final_obs": final}, **ends).make(range(3))
    vector.reset(seed=1)
    vector.step(zeros(3))
    left, right = vector.final_observation()["p"]
    assert left[1:].tolist() == FINAL[1:].tolist()
    assert right[1:].tolist() == [2, 3]


def test_a_reset_by_mask_says_nothing_of_the_others() -> None:
    shown = np.full((3, 2), 0.5, np.float32)
    ends = {"truncated": np.array([False, True, False])}
    vector = GymnasiumVector(Bare, mode=AutoresetMode.DISABLED, observation=shown, **ends).make(range(3))
    vector.reset(seed=1)
    observation, *_ = vector.step(zeros(3))
    assert observation.tolist() == [[0.5, 0.5], [0, 0], [0.5, 0.5]]  # all zeros is what Bare's reset returns
    assert vector.final_observation()[1].tolist() == [0.5, 0.5]
    assert (shown == 0.5).all()


# Seeds ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_has_its_own_seed_however_they_are_shared(mode: Any) -> None:
    def play(indices: range) -> Any:
        make = lambda num_envs: SyncVectorEnv([lambda: gymnasium.make("Acrobot-v1")] * num_envs, autoreset_mode=mode)  # noqa: E731
        vector = GymnasiumVector(make).make(indices)
        return np.stack([vector.reset(seed=7).copy(), *(vector.step(zeros(len(indices)))[0].copy() for _ in range(5))])

    whole = play(range(4))
    assert np.concatenate([play(range(1)), play(range(1, 4))], axis=1).tobytes() == whole.tobytes()
    loop = Gymnasium("Acrobot-v1").make(range(4))
    assert loop.reset(seed=7).tobytes() == whole[0].tobytes()


def test_one_that_takes_no_list_of_seeds_is_given_one_if_that_is_said() -> None:
    vector = GymnasiumVector("CartPole-v1").make(range(2, 5))
    with pytest.raises(ConfigError, match=r"takes no list of seeds, one for each .* Say seeding='together'"):
        vector.reset(seed=1)
    seen: list[Any] = []

    def reset(seed: Any) -> Any:
        seen.append(seed)
        return np.zeros((3, 2), np.float32), {}

    GymnasiumVector(Bare, seeding="together", reset=reset).make(range(2, 5)).reset(seed=1)
    assert seen == [int(environment_seed(1, 2).generate_state(1)[0] >> 1)]
    together = GymnasiumVector("CartPole-v1", seeding="together")
    assert together.make(range(3)).reset(seed=1).shape == (3, 4)


def test_a_reset_that_fails_whatever_the_seed_is_no_question_of_seeds() -> None:
    def reset(seed: Any) -> Any:
        raise ValueError("the map is empty")

    vector = GymnasiumVector(Bare, reset=reset).make(range(4, 6))
    with pytest.raises(EnvironmentFault, match=r"environments 4 to 5: reset\(\) raised ValueError: the map") as caught:
        vector.reset(seed=1)
    assert caught.value.environment == range(4, 6)
    assert isinstance(caught.value.__cause__, ValueError)


# Faults ---------------------------------------------------------------------------------------------------------------

NAN = float("nan")


def explode() -> Any:
    raise ZeroDivisionError("mass 0")


def row(value: float) -> Any:
    observation = np.zeros((3, 2), np.float32)
    observation[1, 1] = value
    return observation


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"reward": explode}, r"environments 4 to 6: step\(\) raised ZeroDivisionError: mass 0"),
        (
            {"reward": np.zeros(2)},
            r"environments 4 to 6: step\(\) gave as reward float64 \(2,\): expected float32 \(3,\)",
        ),
        ({"reward": np.array(["a"] * 3)}, "as reward <U1"),
        ({"reward": np.array([0, 0, NAN])}, r"environment 6 .* as reward nan: expected a finite float32"),
        ({"terminated": np.zeros(3)}, r"as terminated or truncated float64 \(3,\): expected bool \(3,\)"),
        ({"truncated": False}, "as terminated or truncated a bool"),
        ({"info": []}, r"step\(\) returned a tuple of 5 .*expected a tuple of observation"),
        ({"observation": row(NAN)}, r"environment 5 .*observation\[1\] = nan, expected finite"),
        ({"observation": np.zeros((3, 3))}, r"expected float32 \(3, 2\), got float64 \(3, 3\)"),
        (
            {"truncated": np.array([False, True, False]), "mode": AutoresetMode.SAME_STEP},
            r"gave no info\['final_obs'\]",
        ),
        (
            {
                "truncated": np.array([False, True, False]),
                "mode": AutoresetMode.SAME_STEP,
                "info": {"final_obs": row(NAN)},
            },
            r"environment 5 .*observation\[1\] = nan",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_what_a_step_does_wrong_is_named(results: Any, message: str) -> None:
    vector = GymnasiumVector(Bare, **results).make(range(4, 7))
    vector.reset(seed=1)
    with pytest.raises(EnvironmentFault, match=message):
        vector.step(zeros(3))


class Breaks(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """The second environment's reward is NaN in this call of step, counted from 1."""

    def __init__(self, env: Any, call: int) -> None:
        super().__init__(env)
        self.call_, self.calls = call, 0

    def step(self, actions: Any) -> Any:
        observation, reward, *rest = self.env.step(actions)
        self.calls += 1
        if self.calls == self.call_:
            reward[1] = NAN
        return observation, reward, *rest


@pytest.mark.parametrize(("mode", "call"), [(MODES[0], 9), (AutoresetMode.SAME_STEP, 7), (AutoresetMode.DISABLED, 7)])
def test_a_row_says_its_episode_and_step(mode: Any, call: int) -> None:
    assert MODES[0] is AutoresetMode.NEXT_STEP
    vector = turns(mode, wrappers=[lambda vector: Breaks(vector, call)]).make(range(4, 6))
    vector.reset(seed=1)
    for _ in range(call - 1):
        vector.step(zeros(2))
    with pytest.raises(EnvironmentFault, match=r"(?s)environment 5 .*step 7 in all") as caught:
        vector.step(zeros(2))
    # Steps 1 and 2, and 3 to 5, were episodes 0 and 1.
    assert (caught.value.environment, caught.value.episode, caught.value.step) == (5, 2, 2)


def test_policies_hold_for_them_too() -> None:
    vector = GymnasiumVector(Bare, observation=row(5), reward=np.array([0, NAN, 0]), bounds="clip", non_finite="pass")
    stepped = vector.make(range(3))
    stepped.reset(seed=1)
    observation, reward, *_ = stepped.step(zeros(3))
    assert observation.tolist() == row(1).tolist()
    assert np.isnan(reward).tolist() == [False, True, False]
    strict = GymnasiumVector(Bare, observation=row(5), bounds="raise").make(range(3))
    strict.reset(seed=1)
    with pytest.raises(EnvironmentFault, match=r"environment 1 .*\[1\] = 5.0, outside of its bounds \(low -1"):
        strict.step(zeros(3))


@pytest.mark.parametrize("mode", WITHIN)
def test_what_an_episode_ended_with_is_clipped_like_the_rest(mode: Any) -> None:
    final = {"info": {"final_obs": row(5)}, "observation": row(5), "truncated": np.array([False, True, False])}
    vector = GymnasiumVector(Bare, mode=mode, bounds="clip", **final).make(range(3))
    vector.reset(seed=1)
    vector.step(zeros(3))
    assert vector.final_observation()[1].tolist() == [0, 1]


# How they are named and wrapped ---------------------------------------------------------------------------------------


def test_wrappers_of_vector_environments_are_applied_in_order() -> None:
    env = turns(AutoresetMode.DISABLED, wrappers=[lambda vector: ClipReward(vector, 0, 1.5)])
    vector = env.make(range(2))
    vector.reset(seed=1)
    assert [vector.step(zeros(2))[1].tolist() for _ in range(2)] == [[1.0, 1.0], [1.5, 1.5]]
    env = GymnasiumVector("Acrobot-v1", wrappers=[NormalizeObservation])
    assert env.spec.observation.shape == (6,)
    assert np.abs(env.make(range(4)).reset(seed=1)).max() < 10


def test_a_registered_id_without_a_vector_implementation_is_a_loop() -> None:
    env = GymnasiumVector("Acrobot-v1", max_episode_steps=3)
    assert repr(env) == "GymnasiumVector('Acrobot-v1', max_episode_steps=3)"
    assert env.spec.action == Discrete(3)
    vector = env.make(range(2))
    vector.reset(seed=1)
    assert [vector.step(zeros(2))[3].all() for _ in range(4)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GymnasiumVector("CartPol-v1"), r"GymnasiumVector\('CartPol-v1'\): .* Nearest: CartPole-v1"),
        (lambda: GymnasiumVector("CartPole-v1", wrappers=ClipReward), "give a list of functions of a vector"),
        (lambda: GymnasiumVector("CartPole-v1", seeding="both"), "seeding='both'"),
        (lambda: GymnasiumVector("CartPole-v1", bounds="warn"), "bounds='warn'"),
        (lambda: GymnasiumVector(Turns).spec, "could not be made: .*num_envs"),
        (lambda: GymnasiumVector(lambda num_envs: Turns()).spec, "made a Turns: expected a gymnasium.vector.VectorEnv"),
        (lambda: GymnasiumVector(lambda num_envs: Bare(3)).spec, "made 3 environments: expected num_envs=1"),
        (lambda: GymnasiumVector(Bare, shortest_truncation=0, mode="SameStep").spec, "shortest_truncation=0"),
    ],
)
def test_what_is_no_vector_environment_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
