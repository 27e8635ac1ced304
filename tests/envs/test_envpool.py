"""Tasks of EnvPool, as `EnvPool`: in the slow tier, which installs the package."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.envs.atari import Atari
from headrace.envs.envpool import EnvPool
from headrace.envs.gymnasium import Gymnasium
from headrace.envs.registry import environment
from headrace.errors import ConfigError
from headrace.spaces import Discrete, MultiBinary, Spec

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def _installed() -> None:
    """Asked for when a test runs: a module that is skipped shows up in the fast tier too, and one that is not imports
    EnvPool there. An `EnvPool` cannot be made without the package, so tests are given what it is made of."""
    pytest.importorskip("envpool")


@pytest.mark.parametrize(("id", "num_threads"), [("CartPole-v1", 2), ("Pendulum-v1", 1)])
def test_an_environment_s_episodes_are_its_own(
    id: str, num_threads: int, parts_are_the_whole: Callable[..., None]
) -> None:
    parts_are_the_whole(EnvPool(id, num_threads=num_threads), num_envs=2, num_steps=300)


@pytest.mark.parametrize(
    ("id", "kwargs", "num_steps"),
    [
        ("Pong-v5", {"num_threads": 3, "max_episode_steps": 70}, 100),
        ("FrozenLake-v1", {"num_threads": 3}, 300),
        ("HalfCheetah-v5", {"max_episode_steps": 100}, 300),
    ],
)
def test_8_environments_are_2_times_4(
    id: str, kwargs: dict[str, Any], num_steps: int, parts_are_the_whole: Callable[..., None]
) -> None:
    parts_are_the_whole(EnvPool(id, **kwargs), num_envs=8, num_steps=num_steps)


def test_a_reset_with_the_same_seed_repeats_everything(a_reset_repeats: Callable[..., None]) -> None:
    a_reset_repeats(EnvPool("CartPole-v1"))


@pytest.mark.parametrize(
    ("id", "kwargs", "end", "num_steps"),
    [
        ("CartPole-v1", {}, "terminated", 100),
        ("FrozenLake-v1", {}, "terminated", 100),
        ("Pendulum-v1", {"max_episode_steps": 20}, "truncated", 50),
        ("Pong-v5", {"max_episode_steps": 10}, "truncated", 25),
    ],
)
def test_the_step_after_an_end_only_resets(
    id: str, kwargs: dict[str, Any], end: str, num_steps: int, an_end_is_followed_by_a_reset: Callable[..., None]
) -> None:
    an_end_is_followed_by_a_reset(EnvPool(id, **kwargs), end, num_steps)


@pytest.mark.parametrize("past", [4, -1])
def test_an_action_out_of_range_is_refused(past: int, a_mistaken_action_is_refused: Callable[..., None]) -> None:
    a_mistaken_action_is_refused(EnvPool("FrozenLake-v1"), past)


def test_threads_are_as_many_as_asked_for_and_end_with_close(threads_are_counted: Callable[..., None]) -> None:
    threads_are_counted(lambda threads: EnvPool("CartPole-v1", num_threads=threads), extra=1)


def test_it_is_a_value(it_is_a_value: Callable[..., None]) -> None:
    it_is_a_value(EnvPool("CartPole-v1", num_threads=2, max_episode_steps=9))


def test_the_spec_of_a_pool() -> None:
    assert EnvPool("FrozenLake-v1").spec == Spec(observation=Discrete(16), action=Discrete(4))
    ours, theirs = EnvPool("CartPole-v1").spec, Gymnasium("CartPole-v1").spec
    assert ours.action == theirs.action
    np.testing.assert_allclose(ours.observation.high[[0, 2]], theirs.observation.high[[0, 2]], rtol=1e-6)
    assert EnvPool("Pong-v5", stack_num=2, frame_skip=3).spec == dataclasses.replace(
        Atari("Pong", stack_num=2).spec, frame_skip=3
    )
    assert EnvPool("HalfCheetah-v5").spec.observation.dtype == torch.float64
    nested = EnvPool("Connector-v2").spec.observation
    assert nested["step_count"] == Discrete(51)
    assert nested["action_mask"] == MultiBinary((10, 5))


def test_observations_are_as_the_spec_says(actions: Callable[..., Any]) -> None:
    for id in ("FrozenLake-v1", "HalfCheetah-v5", "MiniGrid-Empty-5x5-v0"):
        env = EnvPool(id)
        spaces, vector = env.spec.observation, env.make(range(3))
        for observation in (vector.reset(1), vector.step(actions(env, 1, 3)[0])[0]):
            pairs = [(spaces, observation)]
            if isinstance(spaces, dict):
                assert spaces.keys() == observation.keys()
                pairs = [(spaces[key], observation[key]) for key in spaces]
            for space, array in pairs:
                assert array.shape == (3, *space.shape)
                assert torch.from_numpy(array).dtype == space.dtype
        vector.close()


def test_the_last_observation_of_an_episode_is_shown(play: Callable[..., list[np.ndarray]]) -> None:
    """CartPole ends because the pole or the cart is beyond its limits, and begins anew close to 0."""
    observation, _, terminated, _ = play(EnvPool("CartPole-v1"), range(2), np.zeros((40, 2), np.int64))
    final, first = observation[1:][terminated], observation[2:][terminated[:-1]]
    assert len(final) > 2
    assert ((abs(final[:, 0]) > 2.4) | (abs(final[:, 2]) > 12 * np.pi / 180)).all()
    assert (abs(first) <= 0.05).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnvPool("CartPol-v1"), r"EnvPool\('CartPol-v1'\): there is no such environment. Nearest: CartPole-v1"),
        (lambda: EnvPool("xyzzy"), r"envpool.list_all_envs\(\) has the names"),
        (lambda: EnvPool("CartPole-v1", seed=3), r"EnvPool\(seed=…\): this is set from the run"),
        (lambda: EnvPool("CartPole-v1", num_threads=0), r"num_threads=0\): give an integer from 1 on"),
        (
            lambda: EnvPool("CartPole-v1", length=3).spec,
            r"EnvPool\('CartPole-v1', length=3\) could not be made: .*length",
        ),
    ],
)
def test_what_is_wrong_with_a_pool_is_said(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_id_stands_for_a_pool() -> None:
    assert environment("envpool:Pong-v5", stack_num=2) == EnvPool("Pong-v5", stack_num=2)
    with pytest.raises(ConfigError, match="Nearest: Pong-v5"):
        environment("envpool:Pon-v5")


def test_the_program_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "atari.md").read_text()
    _, program = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(program, {})
