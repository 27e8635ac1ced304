"""Gymnasium's environments: registered ones, your own classes, and whatever makes a `gymnasium.Env`."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from headrace.envs.base import Array, CheckedVectorEnv, Env, Step, VectorEnv, environment_seed
from headrace.errors import ConfigError, ShapeError
from headrace.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces, Spec
from headrace.struct import Tree

__all__ = ["Gymnasium"]

One: TypeAlias = gymnasium.Env[Any, Any]

_NONE_YET = object()  # the observation of an environment that has not been reset
_CARTPOLE = (
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv",
)


@dataclass(frozen=True, init=False, repr=False)
class Gymnasium(Env):
    """Environments of gymnasium, or written for it.

        Gymnasium("CartPole-v1", sutton_barto_reward=True)   # a registered id
        Gymnasium("package.module:Maze", size=5)             # a class or function in a module
        Gymnasium(Maze, wrappers=[FlattenObservation])       # a class or function itself

    An id is looked up at once: what a script registered, or defined in its `__main__`, reaches actors in other
    processes. Raises ConfigError for an unknown id, a module that cannot be imported, and spaces unlike
    Box and Discrete.
    """

    id: str | Callable[..., One]
    """A registered id, "module:registered id", "module:class", or a callable that makes one environment."""
    wrappers: tuple[Callable[[One], One], ...]
    """Functions of an environment, applied to each in this order."""
    vectorize: bool
    """Whether to use a vectorised implementation where there is one (CartPole), instead of a loop. Not with wrappers.
    The same task, but other random numbers."""
    kwargs: dict[str, Any]
    """All other keyword arguments: they go to the environment."""
    source: EnvSpec | Callable[..., One] = dataclasses.field(init=False)
    """What the id was found to be."""

    def __init__(
        self,
        id: str | Callable[..., One],
        *,
        wrappers: Iterable[Callable[[One], One]] = (),
        vectorize: bool = True,
        **kwargs: Any,
    ) -> None:
        wrapped = tuple(wrappers) if isinstance(wrappers, Iterable) else (None,)
        if not all(map(callable, wrapped)):
            raise ConfigError(f"Gymnasium(wrappers={wrappers!r}): give a list of functions of an environment")
        values = {"id": id, "wrappers": wrapped, "vectorize": vectorize, "kwargs": kwargs, "source": _find(id)}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def spec(self) -> Spec:
        """Read once, from an environment that is made for it and closed."""
        env = self._one()
        try:
            return Spec(
                observation=_space(getattr(env, "observation_space", None), f"{self!r} observes"),
                action=_space(getattr(env, "action_space", None), f"{self!r} takes actions of"),
            )
        finally:
            env.close()

    def make(self, indices: range) -> VectorEnv:
        arguments = self._cartpole()
        return _Loop(self, indices) if arguments is None else _CartPole(self.spec, indices, arguments)

    def __repr__(self) -> str:
        words = [repr(self.id) if isinstance(self.id, str) else _name(self.id)]
        if self.wrappers:
            words.append(f"wrappers=[{', '.join(map(_name, self.wrappers))}]")
        if not self.vectorize:
            words.append("vectorize=False")
        words += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"Gymnasium({', '.join(words)})"

    def _one(self) -> One:
        """One environment with its wrappers."""
        try:
            if isinstance(self.source, EnvSpec):
                # Observations are checked here; gymnasium's checker would warn once in every process.
                env = gymnasium.make(self.source, **{"disable_env_checker": True, **self.kwargs})
            else:
                env = self.source(**self.kwargs)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"{self!r} could not be made: {error}") from error
        for wrapper in (None, *self.wrappers):
            env = wrapper(env) if wrapper else env
            if not isinstance(env, gymnasium.Env):
                maker = _name(wrapper) if wrapper else repr(self)
                raise ConfigError(f"{maker} made a {type(env).__name__}: expected a gymnasium.Env")
        return env

    def _cartpole(self) -> dict[str, Any] | None:
        """The arguments of a CartPoleVectorEnv that is the same task, or None if there is none."""
        source = self.source
        if not (self.vectorize and isinstance(source, EnvSpec)) or self.wrappers or source.additional_wrappers:
            return None
        arguments = {**source.kwargs, **self.kwargs}
        limit = arguments.pop("max_episode_steps", None) or source.max_episode_steps
        reward = arguments.pop("sutton_barto_reward", False)
        arguments.pop("disable_env_checker", None)
        if (source.entry_point, source.vector_entry_point) != _CARTPOLE or any(
            name != "render_mode" or value is not None for name, value in arguments.items()
        ):
            return None
        if limit in (None, -1):  # gymnasium's words for no limit
            limit = np.iinfo(np.int32).max
        return {"max_episode_steps": limit, "sutton_barto_reward": reward}


class _CartPole(CheckedVectorEnv):
    """gymnasium's vectorised CartPole, each environment with a generator of its own."""

    def __init__(self, spec: Spec, indices: range, arguments: dict[str, Any]) -> None:
        super().__init__(len(indices), spec.action)
        self._indices = indices
        self._vector = CartPoleVectorEnv(len(indices), **arguments)
        self._vector.action_space = _Below(2)  # type: ignore[assignment]

    def _reset(self, seed: int) -> Tree:
        generators = [np.random.default_rng(environment_seed(seed, index)) for index in self._indices]
        self._vector.np_random = _Columns(self._vector, generators)  # type: ignore[assignment]
        return self._vector.reset()[0]

    def _step(self, action: Array) -> Step:
        return self._vector.step(action)[:4]

    def _close(self) -> None:
        self._vector.close()


class _Below(NamedTuple):
    """Stands for the space of CartPole's actions: asking gymnasium's takes a quarter of the time of a step."""

    n: int

    def contains(self, action: Array) -> bool:
        """Whether all int64 are from 0 to n - 1; negative ones are large without their sign."""
        return bool((action.view(np.uint64) < self.n).all())


class _Columns:
    """Stands for the one generator of a CartPoleVectorEnv: what environment b needs is drawn by generator b."""

    def __init__(self, vector: CartPoleVectorEnv, generators: list[np.random.Generator]) -> None:
        self._vector = vector
        self._generators = generators

    def uniform(self, low: float, high: float, size: tuple[int, int]) -> Array:
        """Start states [4, n]: of all environments, or of the n whose episode ended in the step before."""
        states = np.empty(size)
        if size[1]:
            # A reset draws for all, whatever ended before it.
            every = size[1] == len(self._generators)
            fresh = np.arange(size[1]) if every else np.flatnonzero(self._vector.prev_done)
            for column, b in enumerate(fresh.tolist()):
                states[:, column] = self._generators[b].uniform(low, high, size[0])
        return states


class _Loop(CheckedVectorEnv):
    """gymnasium's SyncVectorEnv: one environment after the other."""

    def __init__(self, env: Gymnasium, indices: range) -> None:
        super().__init__(len(indices), env.spec.action)
        self._indices = indices
        self._expected = env.spec.observation
        self._seen = False
        # copy=False: every environment's observation is copied into one array, which the caller copies from.
        self._vector: SyncVectorEnv[Any, Any] = SyncVectorEnv(
            [env._one] * len(indices), copy=False, autoreset_mode=AutoresetMode.NEXT_STEP
        )

    def _reset(self, seed: int) -> Tree:
        # 31 bits: some environments hand their seed to a C library that takes no more.
        seeds: list[int | None] = [
            int(environment_seed(seed, index).generate_state(1)[0] >> 1) for index in self._indices
        ]
        self._seen = False
        self._vector._env_obs = [_NONE_YET] * self.num_envs  # type: ignore[list-item]
        try:
            observation = self._vector.reset(seed=seeds)[0]
        except (TypeError, ValueError):  # perhaps because the observations could not be stacked
            self._check()
            raise
        self._check()
        return observation

    def _step(self, action: Array) -> Step:
        try:
            observation, reward, terminated, truncated, _ = self._vector.step(action)
        except (TypeError, ValueError):
            self._check()
            raise
        if not self._seen:
            self._check()
            self._seen = True
        return observation, reward.astype(np.float32), terminated, truncated

    def _close(self) -> None:
        self._vector.close()

    def _check(self) -> None:
        """Raise ShapeError if an environment's last observation is not as its space says.

        Stacked they show it no more: NumPy converts silently.
        """
        for index, observation in zip(self._indices, self._vector._env_obs, strict=True):
            if observation is not _NONE_YET and (fault := _fault(self._expected, observation)):
                raise ShapeError(
                    f"environment {index} gave an observation that contradicts its space: {fault}. Correct its "
                    "observation_space, or what reset and step return."
                )


def _fault(spaces: Spaces, observation: object, path: str = "") -> str:
    """Where an observation differs from what was expected, or the empty string."""
    where = f"{path}: " if path else ""
    if isinstance(spaces, dict):
        if not isinstance(observation, dict) or observation.keys() != spaces.keys():
            given = sorted(observation) if isinstance(observation, dict) else f"a {type(observation).__name__}"
            return f"{where}expected a dict with the keys {sorted(spaces)}, got {given}"
        return next(
            filter(None, (_fault(spaces[key], observation[key], f"{path}[{key!r}]") for key in sorted(spaces))), ""
        )
    if isinstance(spaces, tuple):
        if not isinstance(observation, tuple) or len(observation) != len(spaces):
            given = f"a {type(observation).__name__}"
            given += f" of {len(observation)}" if isinstance(observation, tuple) else ""
            return f"{where}expected a tuple of {len(spaces)}, got {given}"
        pairs = enumerate(zip(spaces, observation, strict=True))
        return next(filter(None, (_fault(*pair, f"{path}[{place}]") for place, pair in pairs)), "")
    if isinstance(spaces, Discrete) and isinstance(observation, int | np.integer):
        return ""
    example = spaces.zeros().numpy()
    if isinstance(observation, np.ndarray):
        if observation.shape == example.shape and observation.dtype == example.dtype:
            return ""
        given = f"{observation.dtype} {observation.shape}"
    else:
        given = f"a {type(observation).__name__}"
    return f"{where}expected {example.dtype} {example.shape}, got {given}"


def _find(id: object) -> EnvSpec | Callable[..., One]:
    """What an id stands for: gymnasium's record of a registered environment, or whatever makes one."""
    if not isinstance(id, str):
        if not callable(id):
            raise ConfigError(
                f"Gymnasium(…) got a {type(id).__name__}: expected an id, or a class or function that makes one "
                "environment. Each actor makes its own."
            )
        return id
    module, colon, name = id.rpartition(":")
    if not colon or id in gymnasium.registry:
        return _registered(id, id)
    found = _import(module, id)
    if name in gymnasium.registry:
        return _registered(name, id)
    maker = _attribute(found, name)
    if maker is None:
        near = difflib.get_close_matches(name, [*vars(found), *gymnasium.registry], n=3)
        raise ConfigError(
            f"Gymnasium({id!r}): module {module!r} has no {name!r} and registers no such id.{_perhaps(near)}"
        )
    if not callable(maker):
        raise ConfigError(f"Gymnasium({id!r}) is a {type(maker).__name__}: expected a class or function")
    return maker  # type: ignore[no-any-return]


def _registered(name: str, id: str) -> EnvSpec:
    """A copy of gymnasium's record, which another process can use without having it registered."""
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(name, gymnasium.registry, n=3)
        raise ConfigError(f"Gymnasium({id!r}): {error}{_perhaps(near)}") from error
    entry_point = spec.entry_point
    if isinstance(entry_point, str) and entry_point.startswith("__main__:"):
        entry_point = _attribute(_import("__main__", id), entry_point.removeprefix("__main__:")) or entry_point
    return dataclasses.replace(spec, entry_point=entry_point, kwargs=dict(spec.kwargs))


def _import(module: str, id: str) -> object:
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever the module does while it is imported
        raise ConfigError(f"Gymnasium({id!r}): module {module!r} could not be imported: {error!r}") from error


def _attribute(module: object, name: str) -> Any:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        return None


def _perhaps(names: list[str]) -> str:
    return f" Nearest: {', '.join(names)}." if names else ""


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


def _space(space: object, who: str) -> Spaces:
    """Ours for gymnasium's."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, gymnasium.spaces.Box):
        try:
            dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        except TypeError as error:
            raise ConfigError(f"{who} {space}: PyTorch has no dtype {space.dtype}. Convert it in a wrapper.") from error
        return Box(space.low, space.high, dtype)
    if isinstance(space, gymnasium.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return MultiDiscrete(tuple(space.nvec.tolist()), tuple(space.start.tolist()))
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return MultiBinary(tuple(space.shape))
    if isinstance(space, gymnasium.spaces.Dict) and space.spaces:
        return {key: _space(inner, f"{who} key {key!r}") for key, inner in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple) and space.spaces:
        return tuple(_space(inner, f"{who} place {place}") for place, inner in enumerate(space.spaces))
    raise ConfigError(
        f"{who} {space}: supported are Box, Discrete, MultiDiscrete with one axis, MultiBinary, and Dict and Tuple of "
        "them. Turn it into one of them with a wrapper, such as gymnasium.wrappers.FlattenObservation."
    )
