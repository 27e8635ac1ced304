"""Vector environments that are written for gymnasium: many environments that step as one, in any reset mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
import optree
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from headrace.envs.base import Array, CheckedVectorEnv, Env, Step, VectorEnv
from headrace.envs.guard import Bounds, Guard, NonFinite, Unfit, Whereabouts, check_policies, seed_of, shown
from headrace.envs.gymnasium import LARGEST, _find, _functions, _made, _name, _parts, _raised, _space
from headrace.errors import Closed, ConfigError, EnvironmentFault
from headrace.spaces import Spaces, Spec
from headrace.struct import NAMESPACE, Tree

__all__ = ["GymnasiumVector"]

Many: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]


@dataclass(frozen=True, init=False, repr=False)
class GymnasiumVector(Env):
    """Environments that step as one, written for gymnasium: a `gymnasium.vector.VectorEnv` for each actor.

        GymnasiumVector("CartPole-v1", seeding="together")      # a registered id with a vector implementation
        GymnasiumVector("Acrobot-v1", wrappers=[ClipReward])    # without: gymnasium's SyncVectorEnv of single ones
        GymnasiumVector("package.module:make", size=5)          # make(num_envs=4, size=5)

    They reset as `metadata["autoreset_mode"]` says: in the step after an end (NEXT_STEP), within it (SAME_STEP), or
    when they are asked to (DISABLED), which they are within it. Raises ConfigError where that is not declared, for an
    unknown id, and for spaces that `headrace.spaces` does not have.
    """

    id: str | Callable[..., Many]
    """A registered id, "module:registered id", "module:function", or a callable with a parameter `num_envs`."""
    wrappers: tuple[Callable[[Many], Many], ...]
    """Functions of a vector environment, such as those in `gymnasium.wrappers.vector`, applied in this order."""
    shortest_truncation: int
    """Where they reset within the step: no truncated episode is shorter than so many steps. Memory for what such an
    episode ended with is set aside by this; 1 is always right."""
    seeding: Literal["each", "together"]
    """Whether each environment is given a seed of its own, or one seed is given for all of an actor, by vector
    environments that take no list. What an environment draws then depends on the number of actors."""
    non_finite: NonFinite
    """What to do about NaN and infinities in observations and rewards: "raise" an EnvironmentFault in the step where
    they come, or let them "pass" to a learner that drops such batches."""
    bounds: Bounds
    """What to do about an observation outside of the bounds of its Box: "ignore" it, "raise" an EnvironmentFault, or
    "clip" it to them."""
    kwargs: dict[str, Any]
    """All other keyword arguments: they go to the environment."""
    source: EnvSpec | Callable[..., Many] = dataclasses.field(init=False)
    """What the id was found to be."""

    def __init__(
        self,
        id: str | Callable[..., Many],
        *,
        wrappers: Iterable[Callable[[Many], Many]] = (),
        shortest_truncation: int = 1,
        seeding: Literal["each", "together"] = "each",
        non_finite: NonFinite = "raise",
        bounds: Bounds = "ignore",
        **kwargs: Any,
    ) -> None:
        values = {
            "id": id,
            "wrappers": _functions(wrappers, "GymnasiumVector", "a vector environment"),
            "shortest_truncation": shortest_truncation,
            "seeding": seeding,
            "non_finite": non_finite,
            "bounds": bounds,
            "kwargs": kwargs,
            "source": _find(id, "GymnasiumVector"),
        }
        check_policies("GymnasiumVector", non_finite, bounds)
        if seeding not in ("each", "together"):
            raise ConfigError(f"GymnasiumVector(seeding={seeding!r}): give one of 'each', 'together'.")
        if type(shortest_truncation) is not int or shortest_truncation < 1:
            raise ConfigError(f"GymnasiumVector(shortest_truncation={shortest_truncation!r}): give a number from 1 on")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def spec(self) -> Spec:
        """Read once, from a vector of one environment that is made for it and closed."""
        vector = _made(partial(self._many, 1), self)
        try:
            return self._spec_of(vector)
        finally:
            vector.close()

    def make(self, indices: range) -> VectorEnv:
        return _Vector(self, indices)

    def __repr__(self) -> str:
        words = [repr(self.id) if isinstance(self.id, str) else _name(self.id)]
        if self.wrappers:
            words.append(f"wrappers=[{', '.join(map(_name, self.wrappers))}]")
        fields = (("shortest_truncation", 1), ("seeding", "each"), ("non_finite", "raise"), ("bounds", "ignore"))
        words += [f"{name}={getattr(self, name)!r}" for name, usual in fields if getattr(self, name) != usual]
        words += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"GymnasiumVector({', '.join(words)})"

    def _many(self, num_envs: int) -> Many:
        """So many environments with their wrappers. What is raised while they are made is let through."""
        source = self.source
        vector: Any
        if not isinstance(source, EnvSpec):
            vector = source(num_envs=num_envs, **self.kwargs)
        elif source.vector_entry_point is None:
            one = partial(gymnasium.make, source, disable_env_checker=True, **self.kwargs)
            vector = SyncVectorEnv([one] * num_envs, copy=False)
        else:
            entry = source.vector_entry_point
            given = {**source.kwargs, **self.kwargs}
            if source.max_episode_steps is not None:
                given.setdefault("max_episode_steps", source.max_episode_steps)
            vector = (entry if callable(entry) else load_env_creator(entry))(num_envs=num_envs, **given)
        for wrapper in (None, *self.wrappers):
            vector = wrapper(vector) if wrapper else vector
            if not isinstance(vector, gymnasium.vector.VectorEnv):
                maker = _name(wrapper) if wrapper else repr(self)
                raise ConfigError(f"{maker} made a {type(vector).__name__}: expected a gymnasium.vector.VectorEnv")
        if vector.num_envs != num_envs:
            raise ConfigError(f"{self!r} made {vector.num_envs} environments: expected num_envs={num_envs}")
        return vector  # type: ignore[no-any-return]

    def _mode_of(self, vector: Many) -> AutoresetMode:
        declared = vector.metadata.get("autoreset_mode")
        try:
            return AutoresetMode(declared)
        except ValueError as error:
            raise ConfigError(
                f"{self!r} has metadata['autoreset_mode'] = {declared!r}, so that nobody knows when it resets. Declare "
                "metadata = {'autoreset_mode': gymnasium.vector.AutoresetMode.NEXT_STEP} if the step after an end only "
                "resets, SAME_STEP if the step that ends an episode resets too, DISABLED if it waits for "
                "reset(options={'reset_mask': …})."
            ) from error

    def _spec_of(self, vector: Many) -> Spec:
        within = self._mode_of(vector) is not AutoresetMode.NEXT_STEP
        return Spec(
            observation=_space(getattr(vector, "single_observation_space", None), f"{self!r} observes"),
            action=_space(getattr(vector, "single_action_space", None), f"{self!r} takes actions of"),
            shortest_truncation=self.shortest_truncation if within else None,
            frame_skip=vector.metadata.get("frame_skip", 1),
        )


class _Vector(CheckedVectorEnv):
    """A vector environment of gymnasium. What it does wrong is an EnvironmentFault."""

    def __init__(self, env: GymnasiumVector, indices: range) -> None:
        super().__init__(len(indices), env.spec.action)
        self._env = env
        self._guard = Guard(env.spec.observation, len(indices), env.non_finite, env.bounds)
        self._finals: list[Array] = [held.copy() for held in self._guard.held]
        try:
            self._vector = env._many(len(indices))
        except ConfigError:
            raise
        except Exception as error:
            raise EnvironmentFault(
                f"environments {indices[0]} to {indices[-1]} could not be made: {_raised(error)}", environment=indices
            ) from error
        if env._spec_of(self._vector) != env.spec:
            given = env._spec_of(self._vector)
            self._vector.close()
            raise ConfigError(f"{len(indices)} of {env!r} have {given}: expected the same as one has, {env.spec}")
        self._mode = env._mode_of(self._vector)
        self._where = Whereabouts(indices, resets=self._mode is AutoresetMode.NEXT_STEP)
        self._ended = np.zeros(len(indices), bool)

    def _reset(self, seed: int) -> Tree:
        indices = self._where.indices
        self._ended = np.zeros(self.num_envs, bool)
        if self._env.seeding == "together":
            given = seed_of(seed, indices[0])
            self._where.restart([given] * self.num_envs)
            result = self._called("reset", seed=given)
        else:
            seeds = [seed_of(seed, index) for index in indices]
            self._where.restart(seeds)
            result = self._reset_each(seeds)
        arrays = self._first("reset", result)
        self._look("reset", arrays)
        return self._guard.joined(arrays)

    def _reset_each(self, seeds: list[int]) -> Any:
        """Reset with a seed for each, and find out whether the environments take them where they fail."""
        try:
            return self._called("reset", seed=seeds)
        except EnvironmentFault as fault:
            try:
                self._vector.reset(seed=seeds[0])
            except Exception:
                raise fault from fault.__cause__
            raise ConfigError(
                f"{self._env!r} takes no list of seeds, one for each environment: reset(seed=[…]) "
                f"raised {fault.__cause__!r}. Say seeding='together' to give it one seed for all of an actor; "
                "what an environment draws then depends on the number of actors."
            ) from fault.__cause__

    def _step(self, action: Array) -> Step:
        where = self._where
        where.calls += 1
        result = self._called("step", _copied(action))  # theirs to change
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
            raise where.fault_of_all(
                f"step() returned {_parts(result)}: expected a tuple of observation, reward, terminated, truncated and "
                "info, a dict."
            )
        observation, reward, terminated, truncated, info = result
        try:
            reward = _rewards(reward, self.num_envs)
            terminated, truncated = _flags(terminated, self.num_envs), _flags(truncated, self.num_envs)
            arrays = self._taken(observation)
        except Unfit as error:
            raise self._fault("step", error) from error.__cause__
        if self._mode is AutoresetMode.NEXT_STEP:
            fresh = self._ended
            if fresh.any():
                reward[fresh], terminated[fresh], truncated[fresh] = 0, False, False
                for row in np.flatnonzero(fresh).tolist():
                    where.begin(row)
            self._ended = terminated | truncated
        if self._env.non_finite == "raise" and not np.abs(reward).max() <= LARGEST:
            row = int(np.argmin(np.abs(reward) <= LARGEST))
            raise where.fault(row, f"step() gave as reward {reward[row]}: expected a finite float32.")
        if self._mode is not AutoresetMode.NEXT_STEP and (ended := terminated | truncated).any():
            arrays = self._next_episodes(ended, arrays, info)
        self._look("step", arrays)
        with np.errstate(over="ignore"):
            return self._guard.joined(arrays), reward.astype(np.float32), terminated, truncated

    def final_observation(self) -> Tree:
        if self._mode is AutoresetMode.NEXT_STEP:
            return super().final_observation()
        return self._guard.joined(self._finals)

    def _next_episodes(self, ended: Array, arrays: list[Array], info: dict[str, Any]) -> list[Array]:
        """Keep what these episodes ended with, and return the observations of all, the next episodes' first ones."""
        rows = np.flatnonzero(ended).tolist()
        try:
            if self._mode is AutoresetMode.SAME_STEP:
                if info.get("final_obs") is None:
                    raise Unfit(
                        f"gave no info['final_obs'], although episodes ended: info has {sorted(info)}.", rows[0]
                    )
                for row in rows:
                    self._guard.write(row, _of_row(self._guard.spaces, info["final_obs"], row))
                    for final, held in zip(self._finals, self._guard.held, strict=True):
                        final[row] = held[row]
            else:
                self._finals = [array.copy() for array in arrays]  # a reset may write into the same memory
                result = self._called("reset", options={"reset_mask": ended.copy()})
                fresh = self._first("reset", result)
                arrays = [array.copy() for array in self._finals]
                for array, first in zip(arrays, fresh, strict=True):
                    array[ended] = first[ended]
        except Unfit as error:
            raise self._fault("step", error) from error.__cause__
        endings = [final[ended] for final in self._finals]
        self._look("step", endings, rows)
        for final, ending in zip(self._finals, endings, strict=True):
            final[ended] = ending  # they may have been clipped
        for row in rows:
            self._where.begin(row)
        return arrays

    def _called(self, call: str, *args: Any, **kwargs: Any) -> Any:
        """What the vector environment returns."""
        try:
            return getattr(self._vector, call)(*args, **kwargs)
        except Closed:  # the crew says that it is enough
            raise
        except Exception as error:
            raise self._where.fault_of_all(f"{call}() raised {_raised(error)}") from error

    def _first(self, call: str, result: object) -> list[Array]:
        """The observations that a reset returned."""
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise self._where.fault_of_all(
                f"{call}() returned {_parts(result)}: expected a tuple of observation and info, a dict."
            )
        try:
            return self._taken(result[0])
        except Unfit as error:
            raise self._fault(call, error) from error.__cause__

    def _taken(self, observation: object) -> list[Array]:
        arrays = self._guard.take(observation)
        return [array.copy() for array in arrays] if self._env.bounds == "clip" else arrays

    def _look(self, call: str, arrays: list[Array], rows: list[int] | None = None) -> None:
        try:
            self._guard.look(arrays)
        except Unfit as error:
            if rows is not None and error.row is not None:
                error.row = rows[error.row]
            raise self._fault(call, error) from None

    def _fault(self, call: str, error: Unfit) -> EnvironmentFault:
        if error.row is None:
            return self._where.fault_of_all(f"{call}() {error}")
        return self._where.unfit(error.row, error)

    def _close(self) -> None:
        self._called("close")


def _copied(action: Tree) -> Tree:
    return action.copy() if isinstance(action, np.ndarray) else optree.tree_map(np.copy, action, namespace=NAMESPACE)


def _rewards(given: object, num_envs: int) -> Array:
    """Rewards [B], new, in float64."""
    array = np.asarray(given)
    if array.shape != (num_envs,) or array.dtype.kind not in "biuf":
        raise Unfit(f"gave as reward {shown(given)}: expected float32 ({num_envs},)")
    return array.astype(np.float64)


def _flags(given: object, num_envs: int) -> Array:
    """Ends [B], new, as bools."""
    array = np.asarray(given)
    if array.shape != (num_envs,) or array.dtype.kind not in "biu" or not np.isin(array, (0, 1)).all():
        raise Unfit(f"gave as terminated or truncated {shown(given)}: expected bool ({num_envs},)")
    return array.astype(bool)


def _of_row(spaces: Spaces, given: Any, row: int) -> Any:
    """One environment's part of final observations, which come as a tree of arrays or as an array of trees."""
    if isinstance(given, np.ndarray) and given.dtype == object:
        return given[row]
    if isinstance(spaces, dict) and isinstance(given, dict):
        return {key: _of_row(inner, given.get(key), row) for key, inner in spaces.items()}
    if isinstance(spaces, tuple) and isinstance(given, tuple) and len(given) == len(spaces):
        return tuple(_of_row(inner, part, row) for inner, part in zip(spaces, given, strict=True))
    return given[row] if isinstance(given, np.ndarray) else given
