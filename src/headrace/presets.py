"""Presets: settings with which a method learns in some environments, as Python values.

    preset = choose("ppo", "CartPole-v1")
    Run(preset.method, Gymnasium("CartPole-v1"), preset.plan, total_timesteps=preset.total_timesteps)

The program chooses one by itself, and says so. Those of CartPole-v1, Acrobot-v1, Pendulum-v1 and MiniGrid are tasks of
`benchmarks/learning.py`, whose scores over ten seeds are kept in `benchmarks/learned/`. Those of MuJoCo and Atari take
the numbers of CleanRL's `ppo_continuous_action.py` and `ppo_atari.py`, and of RL Zoo's A2C for Atari. CleanRL's value
loss has the factor ½; here that is half of its `vf_coef`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.method import Method
from headrace.methods.a2c import A2C
from headrace.methods.appo import APPO
from headrace.methods.dqn import DQN
from headrace.methods.impala import IMPALA
from headrace.methods.ppo import PPO
from headrace.methods.sac import SAC
from headrace.methods.td3 import TD3
from headrace.plan import Plan
from headrace.plans.async_batches import AsyncBatches
from headrace.plans.sync_batches import SyncBatches
from headrace.plans.sync_replay import SyncReplay

__all__ = ["PRESETS", "Preset", "choose"]


@dataclass(frozen=True)
class Preset:
    """What a method starts from in some environments."""

    name: str
    """The method and the environments: "ppo/CartPole-v1", "ppo/MuJoCo"."""
    ids: str
    """A regular expression that a whole id matches."""
    method: Method
    plan: Plan
    total_timesteps: int
    """Environment steps."""
    place: str = "inline"
    """A placement's name on the command line."""
    threads: int = 1
    """Of the learner."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Settings of the environment, as they are written on the command line after `--env.`"""


_MUJOCO = (
    "(Ant|HalfCheetah|Hopper|Humanoid|HumanoidStandup|InvertedDoublePendulum|InvertedPendulum|Pusher|Reacher|Swimmer"
    r"|Walker2d)-v\d+"
)
_PENDULUM = SyncReplay(num_envs=4, num_steps=2, ratio=128, batch_size=256, learning_starts=500, buffer_size=20_000)
_ATARI = r"ALE/.*|\w+NoFrameskip-v4"

PRESETS = (
    Preset(
        "ppo/CartPole-v1",
        "CartPole-v1",
        PPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, update_epochs=8, num_minibatches=4),
        SyncBatches(num_envs=16, num_steps=64, max_lag=1),
        total_timesteps=100_000,
    ),
    Preset(
        "a2c/CartPole-v1",
        "CartPole-v1",
        A2C(learning_rate=3e-3, gamma=0.98, gae_lambda=0.9),
        SyncBatches(num_envs=8, num_steps=8),
        total_timesteps=200_000,
    ),
    Preset(
        "impala/CartPole-v1",
        "CartPole-v1",
        IMPALA(learning_rate=2e-3, gamma=0.98, gae_lambda=0.9, max_grad_norm=0.5),
        AsyncBatches(actors=2, num_envs=16, num_steps=8, batch_rollouts=2, max_lag=2),
        total_timesteps=300_000,
        place="processes",
    ),
    Preset(
        "appo/CartPole-v1",
        "CartPole-v1",
        APPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, update_epochs=10, num_minibatches=2),
        AsyncBatches(actors=2, num_envs=8, num_steps=64, batch_rollouts=2, max_lag=2),
        total_timesteps=150_000,
        place="processes",
    ),
    Preset(
        "dqn/CartPole-v1",
        "CartPole-v1",
        DQN(
            learning_rate=2e-3,
            anneal_lr=True,
            gamma=0.98,
            n_step=3,
            double=True,
            tau=0.02,
            target_update_interval=1,
            exploration_fraction=0.16,
            exploration_final_eps=0.04,
        ),
        SyncReplay(num_envs=4, num_steps=4, ratio=16, batch_size=64),
        total_timesteps=100_000,
    ),
    Preset(
        "sac/CartPole-v1",
        "CartPole-v1",
        SAC(learning_rate=2e-3, anneal_lr=True, tau=0.02, n_step=10, ent_coef=0.02, reward_scale=0.1, hidden=(256,)),
        SyncReplay(num_envs=4, num_steps=4, ratio=64, batch_size=256, buffer_size=15_000),
        total_timesteps=50_000,
    ),
    Preset(
        "sac/Pendulum-v1",
        "Pendulum-v1",
        SAC(learning_rate=2e-3, gamma=0.98, tau=0.02, hidden=(64, 64)),
        _PENDULUM,
        total_timesteps=20_000,
    ),
    Preset(
        "td3/Pendulum-v1",
        "Pendulum-v1",
        TD3(learning_rate=2e-3, gamma=0.98, tau=0.02, hidden=(64, 64)),
        _PENDULUM,
        total_timesteps=20_000,
    ),
    Preset(
        "ppo/Acrobot-v1",
        "Acrobot-v1",
        PPO(learning_rate=1e-3, gae_lambda=0.94, num_minibatches=8, ent_coef=0.01, normalize_observation=True),
        SyncBatches(num_envs=16, num_steps=256),
        total_timesteps=300_000,
    ),
    Preset(
        "ppo/Pendulum-v1",
        "Pendulum-v1",
        PPO(
            learning_rate=1e-3,
            gamma=0.95,
            update_epochs=10,
            num_minibatches=32,
            normalize_observation=True,
            normalize_reward=True,
        ),
        SyncBatches(num_envs=16, num_steps=256),
        total_timesteps=300_000,
    ),
    Preset(
        "ppo/MiniGrid",
        "(MiniGrid|BabyAI)-.*",
        PPO(learning_rate=1e-3, ent_coef=0.01, num_minibatches=8),
        SyncBatches(num_envs=8, num_steps=128),
        total_timesteps=100_000,
        env={
            # What is seen, without the mission's text: one of so many kinds, colours and states in each cell.
            "wrappers": "minigrid.wrappers:OneHotPartialObsWrapper,minigrid.wrappers:ImgObsWrapper,"
            "gymnasium.wrappers:FlattenObservation"
        },
    ),
    Preset(
        "ppo/MuJoCo",
        _MUJOCO,
        PPO(
            learning_rate=3e-4,
            update_epochs=10,
            num_minibatches=32,
            clip_range_vf=0.2,
            vf_coef=0.25,
            normalize_observation=True,
            normalize_reward=True,
        ),
        SyncBatches(num_envs=1, num_steps=2048),
        total_timesteps=1_000_000,
    ),
    Preset(
        "ppo/Atari",
        _ATARI,
        PPO(learning_rate=2.5e-4, clip_range=0.1, clip_range_vf=0.1, ent_coef=0.01, vf_coef=0.25, reward_clip=1.0),
        # Of all ways to use two cores this is the fastest: `python -m benchmarks ppo-pong`.
        SyncBatches(num_envs=8, num_steps=128, max_lag=1),
        total_timesteps=10_000_000,
        place="processes",
        threads=2,
    ),
    Preset(
        "a2c/Atari",
        _ATARI,
        A2C(learning_rate=7e-4, ent_coef=0.01, vf_coef=0.25, reward_clip=1.0),
        SyncBatches(actors=2, num_envs=16, num_steps=5),
        total_timesteps=10_000_000,
        place="processes",
    ),
)
"""A life's end does not end an episode in Atari, unlike in the sources: set `--env.episodic-life true` for that."""


def choose(method: str, env: str) -> Preset | None:
    """The preset of a method, by its name on the command line, for an environment's id; None: there is none."""
    for preset in PRESETS:
        if preset.name.startswith(f"{method}/") and re.fullmatch(preset.ids, env):
            return preset
    return None
