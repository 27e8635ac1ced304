"""An environment that hangs is found and named, on every placement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from headrace import A2C, Gymnasium, GymnasiumVector, RoleFailed
from headrace.errors import ConfigError

HANG = 4.0  # seconds
LIMIT = 1.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """Threads that a placement had to leave behind are over before the next test."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG + 10)
        assert not thread.is_alive()


@pytest.fixture
def Slow() -> Callable[..., Any]:
    """Slow(where, seconds): environment 3 takes so long there; the 2nd creation, the 3rd reset or the 25th step."""

    class Slow(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, index: int, where: str, seconds: float) -> None:
            self.pause = lambda now: time.sleep(seconds) if index == 3 and now == where else None
            self.resets = self.steps = 0
            self.pause("make")

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.resets += 1
            self.pause(f"reset {self.resets}")
            return np.zeros(2, np.float32), {}

        def step(self, action: Any) -> Any:
            self.steps += 1
            self.pause(f"step {self.steps}")
            return np.zeros(2, np.float32), 1.0, self.steps % 10 == 0, False, {}

    return Slow


MAKING, RESET = "making environments 2 to 3", r"stepping environment 3 \(episode 2, step 0, seed \d+\)"
STEP = r"stepping environment 3 \(episode 2, step 5, seed \d+\)"


@pytest.mark.parametrize(
    ("at", "where", "doing"),
    [
        ("processes", "make", MAKING),
        ("threads", "reset 3", RESET),
        *((at, "step 25", STEP) for at in ("inline", "threads", "processes")),
    ],
)
def test_a_hang_is_named(at: str, where: str, doing: str, places: Any, train: Any, Slow: Any) -> None:
    env = Gymnasium(Slow, where=where, seconds=HANG)
    assert env.spec  # made here, with index 0
    with pytest.raises(RoleFailed, match=rf"collect\[1\] has been {doing} for more than 1 s.*env_timeout") as caught:
        train(A2C(hidden=(4,)), env, places[at], num_envs=4, actors=2, env_timeout=LIMIT)
    assert (caught.value.role, caught.value.rank) == ("collect", 1)


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_slow_is_not_dead(timeout: float | None, train: Any, places: Any, Slow: Any) -> None:
    env = Gymnasium(Slow, where="step 25", seconds=1.5)
    run = train(A2C(hidden=(4,)), env, places["threads"], num_envs=4, actors=2, env_timeout=timeout)
    assert len(run.reports) == 5


def test_environments_that_step_as_one_are_named_together(places: Any, train: Any) -> None:
    class Whole(VectorEnv):  # type: ignore[type-arg]
        metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

        def __init__(self, num_envs: int) -> None:
            self.num_envs, self.steps = num_envs, 0
            self.single_observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
            self.single_action_space = gymnasium.spaces.Discrete(2)
            self.observation_space = batch_space(self.single_observation_space, num_envs)
            self.action_space = batch_space(self.single_action_space, num_envs)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros((self.num_envs, 2), np.float32), {}

        def step(self, actions: Any) -> Any:
            self.steps += 1
            if self.steps == 13:
                time.sleep(HANG)
            flags = np.zeros(self.num_envs, bool)
            return np.zeros((self.num_envs, 2), np.float32), np.ones(self.num_envs), flags, flags, {}

    doing = r"collect\[0\] has been stepping environments 0 to 3 \(row 4 of rollout 1\) for more than 1 s"
    with pytest.raises(RoleFailed, match=doing):
        train(A2C(hidden=(4,)), GymnasiumVector(Whole), places["processes"], num_envs=4, env_timeout=LIMIT)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(timeout: float, train: Any, places: Any, Slow: Any) -> None:
    with pytest.raises(ConfigError, match="env_timeout="):
        train(A2C(), Gymnasium(Slow, where="", seconds=0), places["inline"], env_timeout=timeout)
