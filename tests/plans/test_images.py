"""Images through the whole plan: kept as the environment shows them, up to the device that learns."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from headrace import PPO, Gymnasium, Inline, Processes
from headrace.spaces import MASK

pytestmark = pytest.mark.timeout(60)


class Screen(gymnasium.Env[Any, Any]):
    """A picture that is bright above or below, and pays for saying where; with a mask and a number beside it."""

    action_space = spaces.Discrete(2)

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        camera = spaces.Box(0, 255, (36, 36, 1), np.uint8)
        self.observation_space = camera
        if not alone:
            beside = {"camera": camera, "time": spaces.Box(0, 9, (1,), np.float32), MASK: spaces.MultiBinary(2)}
            self.observation_space = spaces.Dict(beside)

    def _show(self) -> Any:
        self.above = bool(self.np_random.integers(2))
        camera = self.np_random.integers(0, 50, (36, 36, 1), dtype=np.uint8)
        camera[slice(0, 18) if self.above else slice(18, 36)] += 200
        if self.alone:
            return camera
        return {"camera": camera, "time": np.float32([self.steps]), MASK: np.ones(2, np.int8)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        reward = float(action == self.above)
        self.steps += 1
        return self._show(), reward, self.steps == 5, False, {}


def test_LC_36_rollouts_and_batches_hold_uint8(train: Any) -> None:
    run = train(PPO(num_minibatches=1, update_epochs=1), Gymnasium(Screen, alone=True), Inline(), updates=1)
    (rollout,), (batch,), (report,) = run.rollouts, run.batches, run.reports
    for held in (rollout.observation, batch.observation):
        assert held.dtype == torch.uint8
        assert held.unique().numel() > 50
    assert run.learner.example(3, 2).observation.dtype == torch.uint8
    # Acting, with images as they come, and learning, with channels last in memory, see the same.
    assert abs(report.metrics["losses/approx_kl"]) <= 1e-6
    assert report.metrics["losses/clipfrac"] == 0


@pytest.mark.parametrize(
    ("alone", "memory", "fields"),
    [
        (False, "gru", {"normalize_observation": True, "hidden": (8,)}),
        pytest.param(True, None, {}, marks=pytest.mark.slow),
    ],
)
def test_one_hash_on_both_placements(alone: bool, memory: Any, fields: Any, train: Any, digest: Any) -> None:
    env = Gymnasium(Screen, alone=alone)
    method = PPO(num_minibatches=2, update_epochs=1, memory=memory, normalize_reward=True, **fields)
    runs = [train(method, env, place, updates=2, actors=2, num_envs=4) for place in (Inline(), Processes())]
    assert digest(runs[0].learner) == digest(runs[1].learner)
    moved = [(runs[0].weights[0][k] != v).any() for k, v in runs[0].weights[2].items() if "convolutions" in k]
    assert all(moved)
    assert abs(runs[0].reports[0].metrics["losses/clipfrac"]) < 0.5


@pytest.mark.slow
def test_what_a_picture_shows_is_learned(train: Any) -> None:
    env = Gymnasium(Screen, alone=True)
    run = train(PPO(learning_rate=1e-3, gamma=0.0), env, Inline(), updates=12, num_envs=8, num_steps=32)
    returns = np.concatenate([report.episode_returns for report in run.reports[-2:]])
    assert returns.mean() > 4.5, returns  # of 5; chance gives 2.5
