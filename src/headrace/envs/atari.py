"""Atari games, on the vector environment of ale-py: emulators and preprocessing in C++."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
import torch

from headrace.envs.base import Array, CheckedVectorEnv, Env, Step, VectorEnv, environment_seed
from headrace.errors import ConfigError
from headrace.spaces import Box, Discrete, Spec
from headrace.struct import Tree

__all__ = ["Atari"]

_CLASSIC = "NoFrameskip-v4"


@dataclass(frozen=True)
class Atari(Env):
    """Games of the Atari 2600, with the preprocessing that is usual. Needs ale-py, which is GPL-2.0: `headrace[atari]`.

        Atari("Pong")                   # the same as "ALE/Pong-v5": sticky actions make it random
        Atari("PongNoFrameskip-v4")     # the classic settings: no-ops and FIRE at the start make it random

    An observation is uint8 [stack_num, screen_size, screen_size]: grey, the brighter of the last two frames at each
    point, scaled down; the newest picture last, and black ones before the first of an episode.
    Raises ConfigError for an unknown game, for a number out of range, and where ale-py is not installed.
    """

    game: str
    """"Pong", "ALE/Pong-v5" or "PongNoFrameskip-v4". What is kept is "Pong"; the name decides the defaults below."""
    frame_skip: int = 4
    """Frames for which an action is held: one environment step."""
    stack_num: int = 4
    """Pictures in an observation."""
    screen_size: int = 84
    """Height and width of a picture, in pixels."""
    repeat_action_probability: float | None = None
    """Probability, in each frame, that the action before is held on to (sticky actions). None: 0.25; classic: 0."""
    noop_max: int | None = None
    """An episode begins after 0 to so many frames without action, at random. None: 0; classic: 30."""
    fire_reset: bool | None = None
    """Whether FIRE is pressed in the first frame, in games that have it; some wait for it. None: no; classic: yes."""
    episodic_life: bool = False
    """Whether to lose a life ends an episode (`terminated`). The next one goes on in the same game, with no action
    in its first step, until the game is over."""
    reward_clipping: bool = False
    """Whether rewards are clipped to −1, 0 and 1. Returns that are reported are then those of clipped rewards."""
    full_action_space: bool = False
    """Whether there are all 18 actions, instead of those that do something in this game."""
    max_frames: int = 108_000
    """Frames after which a game is cut off (`truncated`): half an hour."""
    threads: int = 1
    """Threads that step the environments of one actor. More actors use more cores as well."""

    def __post_init__(self) -> None:
        name, classic = self.game, False
        if isinstance(name, str):
            classic = name.endswith(_CLASSIC)
            name = name.removesuffix(_CLASSIC) if classic else name.removeprefix("ALE/").removesuffix("-v5")
        games = _games(self.game)
        if name not in games:
            near = difflib.get_close_matches(str(name), games, n=3) or ["Pong", "Breakout"]
            raise ConfigError(
                f"Atari({self.game!r}): there is no such game. Nearest: {', '.join(near)}. Names are those of a game, "
                f"such as {near[0]!r}, 'ALE/{near[0]}-v5' or '{near[0]}{_CLASSIC}'."
            )
        settled = {"game": name, "repeat_action_probability": 0.0 if classic else 0.25}
        settled |= {"noop_max": 30 if classic else 0, "fire_reset": classic}
        for key, value in settled.items():
            if key == "game" or getattr(self, key) is None:
                object.__setattr__(self, key, value)
        for key, least in (*((key, 1) for key in _COUNTS), ("noop_max", 0)):
            given = getattr(self, key)
            if not isinstance(given, int) or given < least:
                raise ConfigError(f"Atari({key}={given!r}): give an integer from {least} on")
        given = self.repeat_action_probability
        if not isinstance(given, int | float) or not 0 <= given <= 1:
            raise ConfigError(f"Atari(repeat_action_probability={given!r}): give a probability, from 0 to 1")

    @cached_property
    def spec(self) -> Spec:
        """Read once, from an emulator that is started for it."""
        shape = (self.stack_num, self.screen_size, self.screen_size)
        return Spec(
            observation=Box(np.zeros(shape), np.full(shape, 255), torch.uint8),
            action=Discrete(int(self._emulators(1).single_action_space.n)),
            frame_skip=self.frame_skip,
            stacked=self.stack_num,
        )

    def make(self, indices: range) -> VectorEnv:
        return _Emulators(self, indices)

    def _emulators(self, count: int) -> Any:
        """An AtariVectorEnv of so many."""
        rom = _games(self.game)[self.game]
        settled: dict[str, Any] = vars(self)  # none of them is None any more
        from ale_py.vector_env import AtariVectorEnv

        return AtariVectorEnv(
            rom,
            count,
            num_threads=self.threads,
            max_num_frames_per_episode=self.max_frames,
            repeat_action_probability=settled["repeat_action_probability"],
            full_action_space=self.full_action_space,
            autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP,
            img_height=self.screen_size,
            img_width=self.screen_size,
            stack_num=self.stack_num,
            frameskip=self.frame_skip,
            noop_max=settled["noop_max"] + 1,  # it is the number of different lengths there
            # Its own episodic_life would begin a new game after each life.
            life_loss_info=self.episodic_life,
            reward_clipping=self.reward_clipping,
            use_fire_reset=settled["fire_reset"],
        )


_COUNTS = ("frame_skip", "stack_num", "screen_size", "max_frames", "threads")


class _Emulators(CheckedVectorEnv):
    """ale-py's vector environment, each emulator with a seed of its own, and an episode for each life if wanted."""

    def __init__(self, env: Atari, indices: range) -> None:
        super().__init__(len(indices), env.spec.action)
        self._indices = indices
        self._actions = env.spec.action.n
        self._lives = env.episodic_life
        self._stacked = env.stack_num
        self._ended = np.zeros(len(indices), np.bool_)  # in the step before
        self._pictures = np.zeros(len(indices), np.int64)  # of the running episode
        self._vector = env._emulators(len(indices))

    def _reset(self, seed: int) -> Tree:
        words = [environment_seed(seed, index).generate_state(1)[0] >> 1 for index in self._indices]  # 31 bits
        self._ended[:] = False
        self._pictures[:] = 1
        return self._vector.reset(seed=np.array(words, np.int64))[0]

    def _step(self, action: Array) -> Step:
        if not (action.view(np.uint64) < self._actions).all():  # ale-py would wait forever
            self._ready = True  # nothing has happened yet
            raise ConfigError(
                f"step(action): expected numbers from 0 to {self._actions - 1}, got {action.min()} to {action.max()}"
            )
        if self._lives:
            return self._live(action)
        observation, reward, terminated, truncated, _ = self._vector.step(action)
        return observation, reward.astype(np.float32), terminated, truncated

    def _live(self, action: Array) -> Step:
        """A step of episodes that end with a life. After such an end the emulator has nothing to reset."""
        begun = self._ended
        observation, reward, terminated, truncated, _ = self._vector.step(np.where(begun, 0, action))
        ended = terminated | truncated
        if (begun & ended).any():  # the one step without action was the last of a game: on to the next game
            observation, _ = self._vector.reset(options={"reset_mask": begun & ended})
        reward[begun] = terminated[begun] = truncated[begun] = 0
        self._ended = ended & ~begun
        self._pictures = np.where(begun, 1, self._pictures + 1)
        for row in np.flatnonzero(self._pictures < self._stacked):  # those before are of the life before
            observation[row, : self._stacked - self._pictures[row]] = 0
        return observation, reward.astype(np.float32), terminated, truncated

    def _close(self) -> None:
        self._vector = None  # its threads and emulators end with the object


def _games(name: object) -> dict[str, str]:
    """The file name of every game, by the name of the game. name: for what they are needed."""
    try:
        import ale_py  # noqa: F401  # it registers them with gymnasium
    except ModuleNotFoundError as error:
        if error.name != "ale_py":
            raise
        raise ConfigError(
            f'"{name}" needs ale-py, which is not installed. pip install "headrace[atari]" (ale-py is GPL-2.0; it is '
            "yours to accept, not part of Headrace.)"
        ) from error
    return {
        id.removeprefix("ALE/").removesuffix("-v5"): spec.kwargs["game"]
        for id, spec in gymnasium.registry.items()
        if id.startswith("ALE/") and id.endswith("-v5")
    }
