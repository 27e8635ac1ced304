"""Environments of EnvPool: many tasks in C++, stepped by its own threads."""

from __future__ import annotations

import difflib
import threading
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optree
import torch

from headrace.envs.base import Array, CheckedVectorEnv, Env, Step, VectorEnv, environment_seed
from headrace.errors import ConfigError
from headrace.spaces import Box, Discrete, MultiBinary, Space, Spaces, Spec
from headrace.struct import NAMESPACE, Tree

__all__ = ["EnvPool"]

_OURS = ("num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_num_players", "gym_reset_return_info")
_QUIET = threading.Lock()  # catch_warnings is not made for threads


@dataclass(frozen=True, init=False, repr=False)
class EnvPool(Env):
    """Environments of the package envpool: `headrace[envpool]`.

        EnvPool("CartPole-v1")
        EnvPool("Pong-v5", repeat_action_probability=0.25)

    Its implementations are its own: an id means nearly the task that it means in gymnasium, with other defaults.
    Raises ConfigError for an unknown id or argument, and where envpool is not installed.
    """

    id: str
    """One of `envpool.list_all_envs()`."""
    num_threads: int
    """Threads that step the environments of one actor. More actors use more cores as well."""
    kwargs: dict[str, Any]
    """All other keyword arguments: they go to the environment."""

    def __init__(self, id: str, *, num_threads: int = 1, **kwargs: Any) -> None:
        known = _envpool(id).list_all_envs()
        if id not in known:
            near = difflib.get_close_matches(str(id), known, n=3)
            perhaps = f" Nearest: {', '.join(near)}." if near else " envpool.list_all_envs() has the names."
            raise ConfigError(f"EnvPool({id!r}): there is no such environment.{perhaps}")
        if not isinstance(num_threads, int) or num_threads < 1:
            raise ConfigError(f"EnvPool(num_threads={num_threads!r}): give an integer from 1 on")
        for key in kwargs:
            if key in _OURS:
                raise ConfigError(f"EnvPool({key}=…): this is set from the run. Leave it out.")
        for key, value in {"id": id, "num_threads": num_threads, "kwargs": kwargs}.items():
            object.__setattr__(self, key, value)

    @cached_property
    def spec(self) -> Spec:
        try:
            found = _envpool(self.id).make_spec(self.id, **self.kwargs)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{self!r} could not be made: {error}") from error
        observed = {key: spec for key, spec in found.state_array_spec.items() if key.split(":")[0] == "obs"}
        actions = [spec for key, spec in found.action_array_spec.items() if not key.endswith("env_id")]
        if len(actions) != 1:
            raise ConfigError(f"{self!r} takes actions of {len(actions)} parts: supported is one")
        observation = _tree({key: _space(spec, f"{self!r} observes {key!r}") for key, spec in observed.items()})
        frames = getattr(found.config, "stack_num", None)
        return Spec(
            observation=observation,
            action=_space(actions[0], f"{self!r} takes actions"),
            frame_skip=getattr(found.config, "frame_skip", 1),
            # Frames in colour lie three to an image: then the first axis is none of frames.
            stacked=frames if isinstance(observation, Box) and observation.shape[:1] == (frames,) else None,
        )

    def make(self, indices: range) -> VectorEnv:
        return _Pool(self, indices)

    def __repr__(self) -> str:
        words = [repr(self.id)]
        if self.num_threads != 1:
            words.append(f"num_threads={self.num_threads}")
        words += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"EnvPool({', '.join(words)})"


class _Pool(CheckedVectorEnv):
    """A pool, made anew at each reset: EnvPool takes seeds when it is made, and only then."""

    def __init__(self, env: EnvPool, indices: range) -> None:
        super().__init__(len(indices), env.spec.action)
        self._env, self._indices = env, indices
        self._spec = env.spec
        self._pool: Any = None

    def _reset(self, seed: int) -> Tree:
        words = [int(environment_seed(seed, index).generate_state(1)[0] >> 1) for index in self._indices]  # 31 bits
        self._pool = _envpool(self._env.id).make_gymnasium(
            self._env.id,
            num_envs=self.num_envs,
            num_threads=min(self._env.num_threads, self.num_envs),
            seed=words,
            **self._env.kwargs,
        )
        with _QUIET, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it keeps bounds in float64, and gymnasium warns of the conversion
            _ = self._pool.observation_space  # read once, and kept there
        return self._observed(self._pool.reset()[0])

    def _step(self, action: Array) -> Step:
        space = self._spec.action
        if isinstance(space, Discrete) and not ((space.start <= action) & (action < space.start + space.n)).all():
            self._ready = True  # nothing has happened yet; there it would read what lies beside a table of actions
            raise ConfigError(
                f"step(action): expected numbers from {space.start} to {space.start + space.n - 1}, got {action.min()} "
                f"to {action.max()}"
            )
        observation, reward, terminated, truncated, _ = self._pool.step(action)
        return self._observed(observation), reward, terminated, truncated

    def _observed(self, observation: Tree) -> Tree:
        """As the spec says; EnvPool's numbers of a Discrete are int32, and its flags bool."""
        return optree.tree_map(
            lambda space, array: array.astype(_numpy(space.dtype), copy=False).reshape(-1, *space.shape),
            self._spec.observation,
            observation,
            namespace=NAMESPACE,
        )

    def _close(self) -> None:
        self._pool = None  # its threads end with the object


def _envpool(id: object) -> Any:
    try:
        import envpool
    except ModuleNotFoundError as error:
        if error.name != "envpool":
            raise
        raise ConfigError(
            f'"envpool:{id}" needs envpool, which is not installed. pip install "headrace[envpool]"'
        ) from error
    return envpool


def _tree(spaces: dict[str, Space]) -> Spaces:
    """A space alone under "obs", or the dict that "obs:a", "obs:b.c" spell."""
    if list(spaces) == ["obs"]:
        return spaces["obs"]
    tree: dict[str, Any] = {}
    for key, space in spaces.items():
        *path, last = key.removeprefix("obs:").replace(":", ".").split(".")
        inner = tree
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = space
    return tree


def _space(spec: Any, who: str) -> Space:
    """Ours for an ArraySpec of EnvPool's. An axis of −1 is that of players: there is one."""
    shape, dtype = tuple(size for size in spec.shape if size != -1), np.dtype(spec.dtype)
    if dtype == np.bool_ and shape:
        return MultiBinary(shape)
    if np.issubdtype(dtype, np.integer) and shape == ():
        return Discrete(int(spec.maximum) - int(spec.minimum) + 1, int(spec.minimum))
    try:
        found = torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as error:
        raise ConfigError(f"{who} of dtype {dtype}, which PyTorch does not have") from error
    return Box(np.broadcast_to(spec.minimum, shape), np.broadcast_to(spec.maximum, shape), found)


def _numpy(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype
