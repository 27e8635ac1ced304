"""Gymnasium's environments: registered ones, your own classes, and whatever makes a `gymnasium.Env`."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, cast

import gymnasium
import numpy as np
import optree
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from numpy import float64, ndarray

from headrace.envs.base import Array, CheckedVectorEnv, Env, Step, VectorEnv, environment_seed
from headrace.envs.guard import (
    Bounds,
    Guard,
    NonFinite,
    Unfit,
    Whereabouts,
    check_policies,
    flag,
    number,
    seed_of,
    shown,
)
from headrace.envs.names import UNUSABLE
from headrace.errors import Closed, ConfigError, EnvironmentFault
from headrace.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces, Spec
from headrace.struct import NAMESPACE, Tree

__all__ = ["Gymnasium"]

One: TypeAlias = gymnasium.Env[Any, Any]

LARGEST = float(np.finfo(np.float32).max)  # reward
AHEAD = 32  # episodes for which a CartPole's start states are drawn together

_CARTPOLE = (
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv",
)
_PACKAGES = (
    (("ALE/",), "ale_py", "ale-py", "headrace[atari]"),
    (("MiniGrid-", "BabyAI-"), "minigrid", "minigrid", "headrace[minigrid]"),
    (
        ("Fetch", "Hand", "AntMaze", "PointMaze", "Adroit", "FrankaKitchen"),
        *("gymnasium_robotics", "gymnasium-robotics", "gymnasium-robotics"),
    ),
)
"""Beginnings of ids, the module that registers them when it is imported, what it is called, and what to install."""


@dataclass(frozen=True, init=False, repr=False)
class Gymnasium(Env):
    """Environments of gymnasium, or written for it.

        Gymnasium("CartPole-v1", sutton_barto_reward=True)   # a registered id
        Gymnasium("package.module:Maze", size=5)             # a class or function in a module
        Gymnasium(Maze, wrappers=[FlattenObservation])       # a class or function itself

    An id is looked up at once: what a script registered, or defined in its `__main__`, reaches actors in other
    processes. Packages of environments are imported when an id of theirs is used. Raises ConfigError for an unknown id,
    a module that cannot be imported, and spaces that `headrace.spaces` does not have.
    """

    id: str | Callable[..., One]
    """A registered id, "module:registered id", "module:class", or a callable that makes one environment. A callable
    with a parameter `index` is given the environment's index among all of the run."""
    wrappers: tuple[Callable[[One], One], ...]
    """Functions of an environment, applied to each in this order."""
    vectorize: bool
    """Whether to use a vectorised implementation where there is one (CartPole), instead of a loop. Not with wrappers.
    The same task, but other random numbers."""
    max_episode_steps: int | None
    """A time limit, after which an episode is truncated, counted inside of the wrappers. None: that of the id's
    registration, or what the class does by itself; −1: none."""
    non_finite: NonFinite
    """What to do about NaN and infinities in observations and rewards: "raise" an EnvironmentFault in the step where
    they come, or let them "pass" to a learner that drops such batches."""
    bounds: Bounds
    """What to do about an observation outside of the bounds of its Box: "ignore" it, "raise" an EnvironmentFault, or
    "clip" it to them."""
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
        max_episode_steps: int | None = None,
        non_finite: NonFinite = "raise",
        bounds: Bounds = "ignore",
        **kwargs: Any,
    ) -> None:
        values = {
            "id": id,
            "wrappers": _functions(wrappers, "Gymnasium", "an environment"),
            "vectorize": vectorize,
            "max_episode_steps": max_episode_steps,
            "non_finite": non_finite,
            "bounds": bounds,
            "kwargs": kwargs,
            "source": _find(id, "Gymnasium"),
        }
        check_policies("Gymnasium", non_finite, bounds)
        limit = 1 if max_episode_steps is None else max_episode_steps
        if type(limit) is not int or limit < -1 or limit == 0:
            raise ConfigError(f"Gymnasium(max_episode_steps={max_episode_steps!r}): give a number from 1 on, or -1")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def spec(self) -> Spec:
        """Read once, from an environment (the one of index 0) that is made for it and closed."""
        env = _made(self._one, self)
        try:
            return self._spec_of(env)
        finally:
            env.close()

    @property
    def reward_threshold(self) -> float | None:
        """That of the id's registration, where no wrapper may have changed the rewards."""
        return self.source.reward_threshold if isinstance(self.source, EnvSpec) and not self.wrappers else None

    def make(self, indices: range) -> VectorEnv:
        arguments = self._cartpole()
        return _Loop(self, indices) if arguments is None else _CartPole(self.spec, indices, arguments)

    def __repr__(self) -> str:
        words = [repr(self.id) if isinstance(self.id, str) else _name(self.id)]
        if self.wrappers:
            words.append(f"wrappers=[{', '.join(map(_name, self.wrappers))}]")
        fields = (("vectorize", True), ("max_episode_steps", None), ("non_finite", "raise"), ("bounds", "ignore"))
        words += [f"{name}={getattr(self, name)!r}" for name, usual in fields if getattr(self, name) != usual]
        words += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"Gymnasium({', '.join(words)})"

    def _one(self, index: int = 0) -> One:
        """The environment of this index, with its wrappers. What it raises while it is made is let through."""
        given = dict(self.kwargs)
        limit = self.max_episode_steps
        if isinstance(self.source, EnvSpec):
            if limit is not None:
                given["max_episode_steps"] = limit
            # Observations are checked here; gymnasium's checker would warn once in every process.
            env = gymnasium.make(self.source, **{"disable_env_checker": True, **given})
        else:
            parameters = _parameters(self.source)
            if "index" in parameters:
                given.setdefault("index", index)
            if limit is not None and "max_episode_steps" in parameters:
                given["max_episode_steps"] = limit
                limit = None
            env = self.source(**given)
        limited = [self._limited] if limit not in (None, -1) and not isinstance(self.source, EnvSpec) else []
        for wrapper in (None, *limited, *self.wrappers):
            env = wrapper(env) if wrapper else env
            if not isinstance(env, gymnasium.Env):
                maker = _name(wrapper) if wrapper else repr(self)
                raise ConfigError(f"{maker} made a {type(env).__name__}: expected a gymnasium.Env")
        return env

    def _limited(self, env: One) -> One:
        assert self.max_episode_steps is not None
        return gymnasium.wrappers.TimeLimit(env, self.max_episode_steps)

    def _spec_of(self, env: One) -> Spec:
        return Spec(
            observation=_space(getattr(env, "observation_space", None), f"{self!r} observes"),
            action=_space(getattr(env, "action_space", None), f"{self!r} takes actions of"),
            frame_skip=(env.metadata or {}).get("frame_skip", 1),
            stacked=_stacked(env),
        )

    def _cartpole(self) -> dict[str, Any] | None:
        """The arguments of a CartPoleVectorEnv that is the same task, or None if there is none."""
        source = self.source
        if not (self.vectorize and isinstance(source, EnvSpec)) or self.wrappers or source.additional_wrappers:
            return None
        arguments = {**source.kwargs, **self.kwargs}
        limit = self.max_episode_steps or source.max_episode_steps
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
        self._ahead = np.empty((len(generators), AHEAD, 4))  # start states of each environment, drawn together
        self._used = np.full(len(generators), AHEAD)

    def uniform(self, low: float, high: float, size: tuple[int, int]) -> Array:
        """Start states [4, n]: of all environments, or of the n whose episode ended in the step before."""
        if not size[1]:
            return np.empty(size)
        # A reset draws for all, whatever ended before it.
        every = size[1] == len(self._generators)
        fresh = np.arange(size[1]) if every else np.flatnonzero(self._vector.prev_done)
        used = self._used[fresh]
        if (used == AHEAD).any():
            for b in fresh[used == AHEAD].tolist():
                self._ahead[b] = self._generators[b].uniform(low, high, self._ahead[b].shape)
                self._used[b] = 0
            used = self._used[fresh]
        self._used[fresh] += 1
        states: Array = self._ahead[fresh, used].T
        return states


class _Loop(CheckedVectorEnv):
    """One environment after the other, in this thread. What an environment does wrong is an EnvironmentFault."""

    apart = True

    def __init__(self, env: Gymnasium, indices: range) -> None:
        super().__init__(len(indices), env.spec.action)
        self._where = Whereabouts(indices)
        self._guard = Guard(env.spec.observation, len(indices), env.non_finite, env.bounds)
        self._strict = env.non_finite == "raise"
        self._envs: list[One] = []
        self._known: dict[int, int] = {}  # by the identity of an environment without its wrappers: its index
        try:
            for index in indices:
                self._envs.append(self._one(env, index))
        except BaseException:
            with suppress(EnvironmentFault):
                self._close()
            raise
        self._steps, self._limits = zip(*map(_unlimited, self._envs), strict=True)
        self._due = list(self._limits)  # the call in which an episode has taken all of its steps
        self._ended = [False] * len(indices)
        self._reward = np.zeros(len(indices))

    def _one(self, env: Gymnasium, index: int) -> One:
        try:
            one = env._one(index)
        except ConfigError:
            raise
        except Exception as error:
            raise EnvironmentFault(
                f"environment {index} could not be made: it raised {_raised(error)}", environment=index
            ) from error
        other = self._known.setdefault(id(one.unwrapped), index)
        if other != index:
            raise ConfigError(
                f"{env!r}: the factory returned the same object for environments {other} and {index}; it has to make a "
                "new one in every call."
            )
        spec = env._spec_of(one)
        if (spec.observation, spec.action) != (env.spec.observation, env.spec.action):
            raise ConfigError(f"environment {index} has {spec}: expected the spaces of environment 0, {env.spec}")
        return one

    def _reset(self, seed: int) -> Tree:
        self._where.restart([seed_of(seed, index) for index in self._where.indices])
        self._ended = [False] * self.num_envs
        self._due = list(self._limits)
        self._reward.fill(0.0)
        for row, given in enumerate(self._where.seeds):
            self._begin(row, seed=given)
        try:
            self._look()
        except Unfit as error:
            raise self._where.unfit(error.row or 0, error) from None
        return self._guard.tree

    def _begin(self, row: int, seed: int | None = None) -> None:
        """Reset one environment."""
        where = self._where
        if self.beat is not None:
            self.beat(*where.now(row))
        try:
            result = self._envs[row].reset() if seed is None else self._envs[row].reset(seed=seed)
        except Closed:  # the crew says that it is enough
            raise
        except Exception as error:
            raise where.fault(row, f"reset() raised {_raised(error)}") from error
        try:
            if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
                raise Unfit(f"returned {_parts(result)}: expected a tuple of observation and info, a dict.")
            self._guard.write(row, result[0])
        except Unfit as error:
            raise where.unfit(row, error) from error.__cause__

    def _step(self, action: Array) -> Step:
        where, guard, beat, ended, due = self._where, self._guard, self.beat, self._ended, self._due
        reward, terminated, truncated = self._reward, np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        held = guard.held[0]
        dtype, shape = (held.dtype, held.shape[1:]) if guard.plain else (None, None)
        where.calls += 1
        calls, row, soonest = where.calls, 0, min(due)
        try:
            for row, (step, given) in enumerate(zip(self._steps, _rows(action), strict=True)):
                if ended[row]:
                    ended[row] = False
                    reward[row] = 0.0
                    where.begin(row)
                    due[row] = calls + self._limits[row]
                    self._begin(row)
                    continue
                if beat is not None:
                    beat(*where.now(row))
                result = step(given)
                # What is as it should be passes without a call: this runs for every step of every environment.
                if result.__class__ is not tuple or len(result) != 5 or not isinstance(result[4], dict):
                    raise Unfit(
                        f"returned {_parts(result)}: expected a tuple of observation, reward, terminated, truncated "
                        "and info, a dict."
                    )
                observation, got, term, trunc, _ = result
                if observation.__class__ is ndarray and observation.dtype is dtype and observation.shape == shape:
                    held[row] = observation
                else:
                    guard.write(row, observation)
                reward[row] = got if got.__class__ is float or got.__class__ is float64 else number(got)
                if term is not False and flag(term, "terminated"):
                    terminated[row] = ended[row] = True
                if (trunc is not False or calls >= soonest) and (flag(trunc, "truncated") or calls >= due[row]):
                    truncated[row] = ended[row] = True
            looked_at = self._look()
        except (EnvironmentFault, Closed):
            raise
        except Unfit as error:
            raise where.unfit(row if error.row is None else error.row, error) from error.__cause__
        except Exception as error:
            raise where.fault(row, f"step() raised {_raised(error)}") from error
        return guard.tree, looked_at, terminated, truncated

    def _look(self) -> Array:
        """Look at the numbers of all environments together. Returns the rewards in float32."""
        with np.errstate(all="ignore"):
            self._guard.look_silently(self._guard.held)
            reward = self._reward.astype(np.float32)
            total = np.add.reduce(reward)  # tells for almost all: it is finite only if every reward is
        if self._strict and not math.isfinite(total) and not np.isfinite(reward).all():
            row = int(np.argmin(np.isfinite(reward)))
            raise Unfit(f"gave as reward {self._reward[row]}: expected a finite float32.", row)
        return reward

    def _close(self) -> None:
        failed: tuple[int, Exception] | None = None
        for row, env in enumerate(self._envs):
            try:
                env.close()
            except Exception as error:  # the others are closed all the same
                failed = failed or (row, error)
        if failed:
            index, cause = self._where.indices[failed[0]], failed[1]
            raise EnvironmentFault(
                f"environment {index}: close() raised {_raised(cause)}", environment=index
            ) from cause


def _unlimited(env: One) -> tuple[Callable[[Any], Any], float]:
    """The step of an environment without the outermost wrappers that only count or only watch, and its time limit.

    What they do the loop does by itself; each of them costs a call a step.
    """
    limit, inner = math.inf, cast(Any, env)
    while type(inner) in (gymnasium.wrappers.TimeLimit, gymnasium.wrappers.OrderEnforcing):
        if type(inner) is gymnasium.wrappers.TimeLimit:
            limit = min(limit, inner._max_episode_steps)
        inner = inner.env
    return inner.step, limit


def _rows(action: Tree) -> Iterator[Any]:
    """The action of each environment, its own to change."""
    if isinstance(action, np.ndarray):
        return iter(action.copy())
    leaves, structure = optree.tree_flatten(action, namespace=NAMESPACE)
    return (structure.unflatten(parts) for parts in zip(*(leaf.copy() for leaf in leaves), strict=True))


def _parts(result: object) -> str:
    """What something that is no proper result is, with what it holds."""
    if isinstance(result, tuple | list):
        return f"{shown(result)} ({', '.join(map(shown, result))})"
    return shown(result)


def _made(make: Callable[[], Any], env: Any) -> Any:
    """What make() makes for an Env. Raises ConfigError if it cannot be made so, EnvironmentFault if it fails itself."""
    try:
        return make()
    except ConfigError:
        raise
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        entry = getattr(env.source, "entry_point", None)
        mujoco = isinstance(entry, str) and entry.startswith("gymnasium.envs.mujoco")
        missing = isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled)
        install = '. pip install "headrace[mujoco]"' if mujoco and missing else ""
        raise ConfigError(f"{env!r} could not be made: {error}{install}") from error
    except Exception as error:
        raise EnvironmentFault(f"{env!r} could not be made: it raised {_raised(error)}", environment=0) from error


def _raised(error: Exception) -> str:
    """An exception as its name and text."""
    return f"{type(error).__name__}: {error}"


def _find(id: object, who: str) -> EnvSpec | Callable[..., Any]:
    """What an id stands for: gymnasium's record of a registered environment, or whatever makes one."""
    if not isinstance(id, str):
        if not callable(id):
            raise ConfigError(
                f"{who}(…) got a {type(id).__name__}: expected an id, or a class or function that makes one "
                "environment. Each actor makes its own."
            )
        return id
    module, colon, name = id.rpartition(":")
    if not colon or id in gymnasium.registry:
        _import_package(id)
        return _registered(id, f"{who}({id!r})")
    found = _import(module, f"{who}({id!r})")
    if name in gymnasium.registry:
        return _registered(name, f"{who}({id!r})")
    maker = _attribute(found, name)
    if maker is None:
        near = difflib.get_close_matches(name, [*vars(found), *gymnasium.registry], n=3)
        raise ConfigError(f"{who}({id!r}): module {module!r} has no {name!r} and registers no such id.{_perhaps(near)}")
    if not callable(maker):
        raise ConfigError(f"{who}({id!r}) is a {type(maker).__name__}: expected a class or function")
    return maker  # type: ignore[no-any-return]


def _import_package(id: str) -> None:
    """Import the package that registers this id, if it is one of those that are known here."""
    for beginnings, module, package, install in _PACKAGES:
        if id.startswith(beginnings):
            try:
                importlib.import_module(module)
            except ImportError as error:
                missing = getattr(error, "name", None) == module
                why = "which is not installed." if missing else f"which could not be imported: {error}."
                raise ConfigError(f'"{id}" needs {package}, {why} pip install "{install}"') from error


def _registered(name: str, who: str) -> EnvSpec:
    """A copy of gymnasium's record, which another process can use without having it registered."""
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error as error:
        usable = [known for known in gymnasium.registry if not known.startswith(UNUSABLE)]
        near = difflib.get_close_matches(name, usable, n=3)
        raise ConfigError(f"{who}: {error}{_perhaps(near)}") from error
    entry_point = spec.entry_point
    if isinstance(entry_point, str) and entry_point.startswith("__main__:"):
        entry_point = _attribute(_import("__main__", who), entry_point.removeprefix("__main__:")) or entry_point
    # Whether an environment was reset before its first step is seen to here, once for all of a vector.
    return dataclasses.replace(spec, entry_point=entry_point, kwargs=dict(spec.kwargs), order_enforce=False)


def _import(module: str, who: str) -> object:
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever the module does while it is imported
        raise ConfigError(f"{who}: module {module!r} could not be imported: {error!r}") from error


def _attribute(module: object, name: str) -> Any:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        return None


def _perhaps(names: list[str]) -> str:
    return f" Nearest: {', '.join(names)}." if names else ""


def _name(function: object) -> str:
    """What a function or class is called in a message."""
    return str(getattr(function, "__qualname__", None) or repr(function))


def _parameters(function: Callable[..., object]) -> set[str]:
    """The names of a function's, or class's, parameters."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of something built in
        return set()


def _functions(given: object, who: str, of: str) -> tuple[Callable[[Any], Any], ...]:
    """Wrappers as a tuple. Raises ConfigError for what are none."""
    found = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(map(callable, found)):
        raise ConfigError(f"{who}(wrappers={given!r}): give a list of functions of {of}")
    return found


def _stacked(env: One) -> int | None:
    """How many frames an observation is a stack of, where the outermost wrapper makes it one of a single array."""
    if not isinstance(env, gymnasium.wrappers.FrameStackObservation) or env.padding_type not in ("reset", "zero"):
        return None
    return int(env.stack_size) if isinstance(env.observation_space, gymnasium.spaces.Box) else None


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
        "them. Turn it into one of them with a wrapper, such as gymnasium.wrappers.FlattenObservation, or leave it out "
        "with FilterObservation."
    )
