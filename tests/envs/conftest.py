"""What every package of environments keeps, checked for one of them; and how its environments are played."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest

from headrace.envs.atari import Atari
from headrace.envs.base import Env
from headrace.envs.envpool import EnvPool
from headrace.errors import ConfigError, ShapeError
from headrace.spaces import Discrete, Spec


@pytest.fixture(scope="session")
def actions() -> Callable[..., Any]:
    """actions(env, num_steps, num_envs, seed=0): random actions [T, B, …] as the space says."""
    return _actions


@pytest.fixture(scope="session")
def play() -> Callable[..., list[np.ndarray]]:
    """play(env, indices, given, seed=1): [observation [T+1, B, …], reward, terminated, truncated [T, B]] of these
    environments under these actions."""
    return _play


@pytest.fixture(scope="session")
def parts_are_the_whole() -> Callable[..., None]:
    """parts_are_the_whole(env, num_envs, num_steps): one vector is two of half the size, bit for bit, over ends and
    resets; no two columns and no two seeds are equal."""

    def check(env: Env, num_envs: int, num_steps: int) -> None:
        given, half = _actions(env, num_steps, num_envs), num_envs // 2
        whole = _play(env, range(3, 3 + num_envs), given)
        assert (whole[2] | whole[3]).any()
        for start in (0, half):
            columns = slice(start, start + half)
            part = _play(env, range(3 + start, 3 + start + half), given[:, columns])
            assert _bits(part) == _bits([array[:, columns] for array in whole])
        assert len({whole[0][:, column].tobytes() for column in range(num_envs)}) == num_envs
        other = _play(env, range(3, 3 + num_envs), given, seed=2)
        for column in range(num_envs):
            assert whole[0][:, column].tobytes() != other[0][:, column].tobytes()

    return check


@pytest.fixture(scope="session")
def a_reset_repeats() -> Callable[[Env], None]:
    """Checks that a reset with the same seed repeats everything, and one with another does not."""

    def check(env: Env) -> None:
        given = _actions(env, 60, 1)
        vector = env.make(range(1))
        found = []
        for seed in (1, 2, 1):
            found.append([vector.reset(seed).tobytes()] + [vector.step(action)[0].tobytes() for action in given])
        vector.close()
        assert found[0] == found[2] != found[1]

    return check


@pytest.fixture(scope="session")
def an_end_is_followed_by_a_reset() -> Callable[[Env, str, int], None]:
    """Checks the step after each "terminated" or "truncated" end: its reward is 0, its flags are false and its action
    is ignored, since another one there changes nothing at all."""

    def check(env: Env, end: str, num_steps: int) -> None:
        given = _actions(env, num_steps, 1)
        observation, reward, *flags = _play(env, range(1), given)
        terminated, truncated = flags
        ended = terminated | truncated
        assert dict(zip(("terminated", "truncated"), flags, strict=True))[end].any()
        assert reward.dtype == np.float32
        assert not (terminated & truncated).any()
        resets = np.zeros_like(ended)
        resets[1:] = ended[:-1]
        assert resets.any()
        assert (reward[resets] == 0).all()
        assert not ended[resets].any()
        space, others = env.spec.action, given.copy()
        others[resets] = (given[resets] + 1) % space.n if isinstance(space, Discrete) else -given[resets]
        assert (others != given).any()
        assert _bits(_play(env, range(1), others)) == _bits([observation, reward, *flags])

    return check


@pytest.fixture(scope="session")
def a_mistaken_action_is_refused() -> Callable[[Env, int], None]:
    """Checks that the action `past`, out of range, and one of another dtype are refused and have changed nothing."""

    def check(env: Env, past: int) -> None:
        given, found = _actions(env, 8, 1), []
        for mistaken in (False, True):
            vector = env.make(range(1))
            vector.reset(1)
            for action in given:
                if mistaken:
                    expected = f"expected numbers from 0 to {env.spec.action.n - 1}, got {past} to {past}"
                    with pytest.raises(ConfigError, match=expected):
                        vector.step(np.array([past]))
                    with pytest.raises(ShapeError, match=r"expected an array int64 \(1,\)"):
                        vector.step(action.astype(np.int32))
                found.append(vector.step(action)[0].tobytes())
            vector.close()
        assert found[: len(given)] == found[len(given) :]

    return check


@pytest.fixture(scope="session")
def threads_are_counted() -> Callable[..., None]:
    """threads_are_counted(make, extra): make(threads) starts so many threads, and extra ones, until `close`."""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("counts threads as Linux lists them")

    def check(make: Callable[[int], Env], extra: int) -> None:
        make(1).make(range(2)).reset(1)  # whatever starts once a process
        before = len(os.listdir("/proc/self/task"))
        for threads in (1, 2):
            vector = make(threads).make(range(2))
            vector.reset(1)
            assert len(os.listdir("/proc/self/task")) == before + threads + extra
            vector.close()
            assert len(os.listdir("/proc/self/task")) == before

    return check


@pytest.fixture(scope="session")
def it_is_a_value() -> Callable[[Any], None]:
    """Checks that it travels, is equal to itself elsewhere, can be read from its `repr`, and cannot be changed."""

    def check(env: Any) -> None:
        found = cloudpickle.loads(cloudpickle.dumps(env))
        assert found == env
        assert isinstance(found.spec, Spec)
        assert found == env  # the spec that one of them has read changes nothing
        assert eval(repr(env), {"Atari": Atari, "EnvPool": EnvPool}) == env
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.threads = 2

    return check


def _actions(env: Env, num_steps: int, num_envs: int, seed: int = 0) -> Any:
    rng, space = np.random.default_rng(seed), env.spec.action
    if isinstance(space, Discrete):
        return rng.integers(space.start, space.start + space.n, (num_steps, num_envs))
    return rng.uniform(space.low, space.high, (num_steps, num_envs, *space.shape)).astype(space.low.dtype)


def _play(env: Any, indices: range, given: Any, seed: int = 1) -> list[np.ndarray]:
    vector = env.make(indices)
    observations = [vector.reset(seed).copy()]
    rows = []
    for action in given:
        observation, *row = vector.step(action)
        observations.append(observation.copy())
        rows.append([array.copy() for array in row])
    vector.close()
    return [np.stack(observations), *map(np.stack, zip(*rows, strict=True))]


def _bits(arrays: list[np.ndarray]) -> list[bytes]:
    return [array.tobytes() for array in arrays]
