"""Small tasks in NumPy, for tests and first steps: each shows one thing that a method or a plan can get wrong."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from headrace.channel import role
from headrace.envs.base import Array, CheckedVectorEnv, Env, Step, VectorEnv, environment_seed
from headrace.errors import ConfigError
from headrace.spaces import Box, Discrete, Spec
from headrace.struct import Tree

__all__ = ["Episode", "Identity", "Recall", "Scripted", "Sleepy", "Target"]

Episode: TypeAlias = tuple[Sequence[float], Literal["terminated", "truncated"]]
"""The rewards of its steps, and how it ends."""


def _box(size: int, low: float = -np.inf, high: float = np.inf) -> Box:
    return Box(np.full(size, low), np.full(size, high), torch.float32)


class _Toy(CheckedVectorEnv):
    """Counts steps and episodes of each environment, and begins the next episode a step after the last has ended."""

    def __init__(self, spec: Spec, indices: range) -> None:
        super().__init__(len(indices), spec.action)
        self.indices = np.array(indices)
        self.rows = np.arange(len(indices))
        self.steps = np.zeros(len(indices), np.int64)  # of the current episode
        self.episodes = np.zeros(len(indices), np.int64)
        self._ended = np.zeros(len(indices), bool)

    def _reset(self, seed: int) -> Tree:
        self.generators = [np.random.default_rng(environment_seed(seed, int(index))) for index in self.indices]
        self.steps[:] = 0
        self.episodes[:] = 0
        self._ended = np.zeros_like(self._ended)
        for b in self.rows:
            self.begin(int(b))
        return self.observe()

    def _step(self, action: Array) -> Step:
        reward, terminated, truncated = self.play(action)
        self.steps += 1
        fresh = self._ended
        if fresh.any():
            self.steps[fresh] = 0
            self.episodes[fresh] += 1
            for b in np.flatnonzero(fresh):
                self.begin(int(b))
            reward[fresh], terminated[fresh], truncated[fresh] = 0, False, False
        self._ended = terminated | truncated
        return self.observe(), reward.astype(np.float32), terminated, truncated

    def begin(self, b: int) -> None:
        """Draw what the next episode of environment b needs."""

    @abstractmethod
    def observe(self) -> Array:
        """The observations [B, …], new, at `steps` of `episodes`."""

    @abstractmethod
    def play(self, action: Array) -> tuple[Array, Array, Array]:
        """Reward, terminated and truncated [B], new, of the actions taken at `steps`.

        What it says of an environment whose episode has ended already is ignored.
        """


@dataclass(frozen=True)
class Identity(Env):
    """Every observation says where it comes from: (rank of the actor, environment, episode, step), float32 [4].

    The action (one of two) is ignored. The reward of a step is the step number in the observation that follows:
    1, 2, …, length. Episode e of environment i has length lengths[(i + e) mod their number]; it is terminated if e is
    even and truncated if e is odd. Outside a role the rank is 0.
    """

    lengths: tuple[int, ...] = (3, 5)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.lengths or min(self.lengths) < 1:
            raise ConfigError(f"Identity(lengths={self.lengths}): give at least one length, all at least 1")

    @property
    def spec(self) -> Spec:
        return Spec(observation=_box(4, low=0), action=Discrete(2))

    def make(self, indices: range) -> VectorEnv:
        return _Identity(self, indices)


class _Identity(_Toy):
    def __init__(self, env: Identity, indices: range) -> None:
        super().__init__(env.spec, indices)
        self.lengths = np.array(env.lengths)
        try:
            self.rank = role().rank
        except ConfigError:  # not in a role
            self.rank = 0

    def observe(self) -> Array:
        rank = np.full_like(self.steps, self.rank)
        return np.stack((rank, self.indices, self.episodes, self.steps), axis=1).astype(np.float32)

    def play(self, action: Array) -> tuple[Array, Array, Array]:
        step = self.steps + 1
        end = step >= self.lengths[(self.indices + self.episodes) % len(self.lengths)]
        odd = self.episodes % 2 == 1
        return step, end & ~odd, end & odd


@dataclass(frozen=True)
class Scripted(Env):
    """Environments that play given episodes, over and over: Scripted([((0, 1), "terminated"), ((1,), "truncated")]).

    The observation is the step within the episode, float32 [1]; the action (one of two) is ignored. others: further
    scripts; of n scripts in all, environment i plays number i mod n.
    """

    script: Sequence[Episode]
    others: Sequence[Sequence[Episode]] = ()

    def __post_init__(self) -> None:
        scripts = [
            tuple((tuple(map(float, rewards)), end) for rewards, end in script)
            for script in (self.script, *self.others)
        ]
        for script in scripts:
            if not script:
                raise ConfigError("Scripted: a script has at least one episode")
            for rewards, end in script:
                if not rewards or end not in ("terminated", "truncated"):
                    raise ConfigError(
                        f"Scripted: an episode is ((reward, …), end) with at least one reward and an end that is "
                        f"'terminated' or 'truncated'; got ({rewards}, {end!r})"
                    )
        object.__setattr__(self, "script", scripts[0])
        object.__setattr__(self, "others", tuple(scripts[1:]))

    @property
    def spec(self) -> Spec:
        return Spec(observation=_box(1, low=0), action=Discrete(2))

    def make(self, indices: range) -> VectorEnv:
        return _Scripted(self, indices)


class _Scripted(_Toy):
    def __init__(self, env: Scripted, indices: range) -> None:
        super().__init__(env.spec, indices)
        scripts = (env.script, *env.others)
        self.scripts = [scripts[index % len(scripts)] for index in indices]
        self.playing = [script[0] for script in self.scripts]

    def begin(self, b: int) -> None:
        self.playing[b] = self.scripts[b][self.episodes[b] % len(self.scripts[b])]

    def observe(self) -> Array:
        return self.steps[:, None].astype(np.float32)

    def play(self, action: Array) -> tuple[Array, Array, Array]:
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        for b, (rewards, end) in enumerate(self.playing):
            step = self.steps[b]
            if step < len(rewards):
                reward[b] = rewards[step]
            last = step + 1 == len(rewards)
            terminated[b], truncated[b] = last and end == "terminated", last and end == "truncated"
        return reward, terminated, truncated


@dataclass(frozen=True)
class Recall(Env):
    """A task for memory: the first observation shows a cue, the last action must name it.

    observation: float32 [cues + 1], the cue as one-hot at step 0, then zeros; the last element is 1 at the last step,
    "go". action: one of `cues`, ignored until go. Reward 1 at the last step if the action is the cue, else 0; then
    terminated. The mean return of a policy without memory is 1/cues.
    """

    length: int = 6
    """Steps of an episode, at least 2."""
    cues: int = 2

    def __post_init__(self) -> None:
        if self.length < 2 or self.cues < 1:
            raise ConfigError(f"{self}: length must be at least 2, so that cue and go are apart, and cues at least 1")

    @property
    def spec(self) -> Spec:
        return Spec(observation=_box(self.cues + 1, low=0, high=1), action=Discrete(self.cues))

    def make(self, indices: range) -> VectorEnv:
        return _Recall(self, indices)


class _Recall(_Toy):
    def __init__(self, env: Recall, indices: range) -> None:
        super().__init__(env.spec, indices)
        self.env = env
        self.cue = np.zeros(len(indices), np.int64)

    def begin(self, b: int) -> None:
        self.cue[b] = self.generators[b].integers(self.env.cues)

    def observe(self) -> Array:
        observation = np.zeros((self.num_envs, self.env.cues + 1), np.float32)
        observation[self.rows, self.cue] = self.steps == 0
        observation[:, -1] = self.steps == self.env.length - 1
        return observation

    def play(self, action: Array) -> tuple[Array, Array, Array]:
        go = self.steps == self.env.length - 1
        return go & (action == self.cue), go, np.zeros(self.num_envs, bool)


@dataclass(frozen=True)
class Target(Env):
    """A task for continuous actions: say what you see. The best return is 0.

    observation: float32 [dimensions], uniform in [−1, 1], new at each step. action: a Box [dimensions] from low to
    high. reward = −mean((action − observation)²). Truncated after `length` steps.
    """

    dimensions: int = 1
    length: int = 16
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.dimensions < 1 or self.length < 1:
            raise ConfigError(f"{self}: dimensions and length must be at least 1")

    @property
    def spec(self) -> Spec:
        observation = _box(self.dimensions, low=-1, high=1)
        return Spec(observation=observation, action=_box(self.dimensions, self.low, self.high))

    def make(self, indices: range) -> VectorEnv:
        return _Target(self, indices)


class _Target(_Toy):
    def __init__(self, env: Target, indices: range) -> None:
        super().__init__(env.spec, indices)
        self.length = env.length
        # All of an episode, drawn at its start; the last one is its final observation.
        self.targets = np.zeros((len(indices), env.length + 1, env.dimensions), np.float32)

    def begin(self, b: int) -> None:
        self.targets[b] = self.generators[b].uniform(-1, 1, self.targets.shape[1:])

    def observe(self) -> Array:
        seen: Array = self.targets[self.rows, self.steps]
        return seen

    def play(self, action: Array) -> tuple[Array, Array, Array]:
        reward = -np.square(action - self.observe()).mean(axis=1)
        return reward, np.zeros(self.num_envs, bool), self.steps + 1 >= self.length


@dataclass(frozen=True)
class Sleepy(Env):
    """Another environment, whose every step takes a random time of up to `seconds`: roles come in another order.

    The time is not seeded, so that two runs differ in it, and is slept on the placement's clock: on Inline it reorders
    roles too. Steps only inside a role or an open crew.
    """

    env: Env
    seconds: float = 0.002

    @property
    def spec(self) -> Spec:
        return self.env.spec

    def make(self, indices: range) -> VectorEnv:
        return _Sleepy(self, indices)


class _Sleepy(CheckedVectorEnv):
    def __init__(self, env: Sleepy, indices: range) -> None:
        super().__init__(len(indices), env.spec.action)
        self._vector = env.env.make(indices)
        self._seconds = env.seconds
        self._random = random.SystemRandom()

    def _reset(self, seed: int) -> Tree:
        return self._vector.reset(seed)

    def _step(self, action: Array) -> Step:
        role().sleep(self._random.uniform(0, self._seconds))
        return self._vector.step(action)

    def _close(self) -> None:
        self._vector.close()
