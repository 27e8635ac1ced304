"""Small tasks whose best return is known, each about one thing that an environment may have."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

Observed = tuple[Any, dict[str, Any]]
Stepped = tuple[Any, float, bool, bool, dict[str, Any]]

LENGTH = 10  # steps of an episode


class Task(gymnasium.Env[Any, Any]):
    """An episode of LENGTH steps, then the end; each step is worth 1 at most."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Observed:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Stepped:
        reward = self.worth(action)
        self.steps += 1
        return self.observe(), reward, self.steps == LENGTH, False, {}

    def observe(self) -> Any:
        raise NotImplementedError

    def worth(self, action: Any) -> float:
        raise NotImplementedError


class Thermostat(Task):
    """Set the temperature that is shown: an action in Box(300, 500). Worth 1 less the distance in hundreds."""

    action_space = Box(300, 500, (1,), np.float32)
    observation_space = Box(-1, 1, (1,), np.float32)

    def observe(self) -> np.ndarray[Any, Any]:
        self.shown = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.shown

    def worth(self, action: np.ndarray[Any, Any]) -> float:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        return 1 - abs(float(action[0]) - 400 - 100 * float(self.shown[0])) / 100


class Sign(Task):
    """Say the sign that is shown: an action in Discrete(3, start=-1)."""

    action_space = Discrete(3, start=-1)
    observation_space = Box(-1, 1, (1,), np.float32)

    def observe(self) -> np.ndarray[Any, Any]:
        self.sign = int(self.np_random.integers(-1, 2))
        return np.array([self.sign], np.float32)

    def worth(self, action: int) -> float:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        return float(action == self.sign)


class HighestAllowed(Task):
    """Take the highest of five actions that the mask allows; to take a forbidden one is an error."""

    action_space = Discrete(5)
    observation_space = Dict({"allowed": Box(0, 1, (5,), np.float32), "action_mask": Box(0, 1, (5,), np.int8)})

    def observe(self) -> dict[str, np.ndarray[Any, Any]]:
        self.mask = self.np_random.integers(0, 2, 5).astype(np.int8)
        self.mask[self.np_random.integers(5)] = 1
        return {"allowed": self.mask.astype(np.float32), "action_mask": self.mask.copy()}

    def worth(self, action: int) -> float:
        if not self.mask[action]:
            raise ValueError(f"{action} is forbidden by {self.mask}")
        return float(action == np.flatnonzero(self.mask)[-1])


class Scales(Task):
    """Say which of two readings is the larger; one is a vector, the other a number of a Discrete space."""

    action_space = Discrete(2)
    observation_space = Dict({"left": Dict({"weight": Box(0, 5, (2,), np.float32)}), "right": Discrete(5)})

    def observe(self) -> dict[str, Any]:
        right = int(self.np_random.integers(5))
        left = (right + 0.5 + self.np_random.integers(-5, 5)) % 5  # never equal, and no larger one more often
        self.heavier = int(right > left)
        share = self.np_random.uniform(0, left)
        return {"left": {"weight": np.array([share, left - share], np.float32)}, "right": right}

    def worth(self, action: int) -> float:
        return float(action == self.heavier)


class Ladder(Task):
    """Climb three rungs for nothing, then be paid 1 a step: an episode is cut after LENGTH steps and never ends.

    To stay on a lower rung pays at once: 0.2, 0.4, 0.6. The best return is LENGTH - 3. Who takes the cut for an end
    underrates the top, which is worth 1 / (1 - gamma).
    """

    action_space = Discrete(2)
    observation_space = Discrete(4)
    PAY = (0.2, 0.4, 0.6, 1.0)
    BEST = LENGTH - 3

    def observe(self) -> int:
        if self.steps == 0:
            self.rung = 0
        return self.rung

    def worth(self, action: int) -> float:
        if action == 1 and self.rung < 3:
            self.rung += 1
            return 0.0
        return self.PAY[self.rung]

    def step(self, action: int) -> Stepped:
        observation, reward, ended, _, info = super().step(action)
        return observation, reward, False, ended, info


class WithoutVelocities(gymnasium.ObservationWrapper[Any, Any, Any]):
    """CartPole of which only the cart's position and the pole's angle are seen."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, Box)
        self.observation_space = Box(space.low[[0, 2]], space.high[[0, 2]])

    def observation(self, observation: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return observation[[0, 2]]
