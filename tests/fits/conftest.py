"""What the fits share: the files as modules, and random data of the shapes that actors and replay make."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headrace import Box, Decision, Discrete, Learner, Method, Rollout, Spec, Struct

HERE = Path(__file__).parent

CLASSES = {
    "a2c": "A2C",
    "ppo": "PPO",
    "vtrace": "VTrace",
    "dqn": "DQN",
    "sac": "SAC",
    "td3": "TD3",
    "r2d2": "R2D2",
}


def vectors(size: int, bound: float = np.inf) -> Box:
    return Box(np.full(size, -bound), np.full(size, bound), torch.float32)


LANDER = Spec(observation=vectors(8), action=Discrete(4))
CHEETAH = Spec(observation=vectors(17), action=vectors(6, 1))


@cache
def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fits_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fit(NamedTuple):
    """One of the files: its method, the spaces that it learns in, and a way to make what it learns from."""

    name: str
    method: Method
    spec: Spec
    path: Path

    def learner(self, **arguments: Any) -> Learner:
        arguments = {"seed": 1, **arguments}
        return Learner(arguments.pop("method", self.method), self.spec, **arguments)

    def batch(self, learner: Learner, seed: int = 0, rows: int = 32) -> Struct:
        """What one update learns from, of about `rows` random rows, reset rows among them."""
        rng = torch.Generator().manual_seed(seed)
        rollout = random_rollout(learner, 16, max(1, rows // 16), seed)
        module = load(self.name)
        if self.name in ("a2c", "ppo", "vtrace"):
            return learner.prepare(rollout)
        if self.name == "dqn":
            batch: Struct = learner.prepare(rollout)
            return batch.replace(weight=torch.rand(batch.size("B"), generator=rng))
        if self.name == "r2d2":
            rollout = random_rollout(learner, 24, rows, seed)
            names = {field.name for field in fields(module.Sequences)} - {"weight"}
            taken = {name: getattr(rollout, name) for name in names}
            taken["memory"] = torch.randn(rollout.memory.shape, generator=rng)
            return module.Sequences(**taken, weight=torch.rand(rows, generator=rng)).check()
        return module.Transitions(
            observation=torch.randn(2, rows, 17, generator=rng),
            action=torch.rand(rows, 6, generator=rng) * 2 - 1,
            reward=torch.randn(rows, generator=rng),
            terminated=torch.rand(rows, generator=rng) < 0.2,
        ).check()


def random_rollout(learner: Learner, num_steps: int, num_envs: int, seed: int = 0) -> Rollout:
    """A rollout as an actor might have made it: its policy's choices at random observations, episodes that end."""
    rng = torch.Generator().manual_seed(seed)
    method, net, rollout = learner.method, learner.acting, learner.example(num_steps, num_envs)
    observation = torch.randn(rollout.observation.shape, generator=rng)
    noise = method.noise(net, num_steps, num_envs, rng)
    steps = zip(*noise, strict=True) if isinstance(noise, tuple) else [None] * num_steps if noise is None else noise
    decisions: list[Decision] = []
    memory = rollout.memory
    with torch.no_grad():
        for step, drawn in enumerate(steps):
            decisions.append(method.act(net, observation[step], memory, drawn))
            memory = decisions[-1].memory
        log_probs = [
            method.log_prob(net, decision.logits, decision.action) if decision.log_prob is None else decision.log_prob
            for decision in decisions
        ]
    ended = torch.rand(num_steps, num_envs, generator=rng) < 0.15
    for step in range(1, num_steps):
        ended[step] &= ~ended[step - 1]  # that row only resets
    valid = torch.cat([torch.ones(1, num_envs, dtype=torch.bool), ~ended[:-1]])
    terminated = ended & (torch.rand(ended.shape, generator=rng) < 0.5)
    # Behaviour a few updates old: ratios near 1, but not 1.
    stale = 0.1 * torch.randn(num_steps, num_envs, generator=rng)
    return rollout.replace(
        observation=observation,
        action=torch.stack([decision.action for decision in decisions]),
        log_prob=torch.stack(log_probs) + stale,
        reward=torch.randn(num_steps, num_envs, generator=rng) * valid,
        terminated=terminated,
        truncated=ended & ~terminated,
        valid=valid,
        environment=torch.arange(num_envs, dtype=torch.int32),
        env_steps=valid.sum(0),
    ).check()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads for tensors this small only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(name="random_rollout")
def _random_rollout() -> Callable[..., Rollout]:
    return random_rollout


@pytest.fixture
def fits() -> Callable[[str], Fit]:
    """fits("dqn"): that file."""

    def fit(name: str) -> Fit:
        spec = CHEETAH if name in ("ppo", "sac", "td3") else LANDER
        return Fit(name, getattr(load(name), CLASSES[name])(), spec, HERE / f"{name}.py")

    return fit
