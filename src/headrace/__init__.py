"""Headrace: distributed reinforcement learning, written once and run anywhere.

A method learns, a plan says what moves and who waits, a placement says where it runs:

    run = Run(PPO(), Gymnasium("CartPole-v1"), SyncBatches(actors=2), Processes(), total_timesteps=100_000)
    with run.reports() as reports:
        for report in reports:
            ...

A name is loaded when it is first asked for: `import headrace` alone loads neither torch nor an environment's package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.actor import Actor, evaluate
    from headrace.channel import role, wait
    from headrace.checkpoint import Checkpoint, Checkpoints
    from headrace.data import Decision, Gradient, Loss, Rollout, Sampling, Transitions
    from headrace.envs.atari import Atari
    from headrace.envs.base import Env, VectorEnv
    from headrace.envs.check import Checked, Finding, check_env
    from headrace.envs.envpool import EnvPool
    from headrace.envs.gymnasium import Gymnasium
    from headrace.envs.gymnasium_vector import GymnasiumVector
    from headrace.envs.registry import environment
    from headrace.errors import (
        CheckpointError,
        Closed,
        ConfigError,
        EnvironmentFault,
        HeadraceError,
        NonFinite,
        RoleFailed,
        ShapeError,
        Stalled,
    )
    from headrace.learner import Learner
    from headrace.method import Method
    from headrace.methods.a2c import A2C
    from headrace.methods.appo import APPO
    from headrace.methods.ddpg import DDPG
    from headrace.methods.dqn import DQN
    from headrace.methods.impala import IMPALA
    from headrace.methods.ppo import PPO
    from headrace.methods.rainbow import Rainbow
    from headrace.methods.sac import SAC
    from headrace.methods.td3 import TD3
    from headrace.place.inline import Inline
    from headrace.place.processes import Processes
    from headrace.place.threads import Threads
    from headrace.plans.async_batches import AsyncBatches
    from headrace.plans.async_gradients import AsyncGradients
    from headrace.plans.schedule import Schedule
    from headrace.plans.sync_batches import SyncBatches
    from headrace.plans.sync_gradients import SyncGradients
    from headrace.plans.sync_replay import SyncReplay
    from headrace.policy import Policy, load
    from headrace.replay import Replay
    from headrace.report import Report
    from headrace.run import Result, Run
    from headrace.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spec
    from headrace.struct import Struct, Tree, axes

__all__ = [
    "A2C",
    "APPO",
    "DDPG",
    "DQN",
    "IMPALA",
    "PPO",
    "SAC",
    "TD3",
    "Actor",
    "AsyncBatches",
    "AsyncGradients",
    "Atari",
    "Box",
    "Checked",
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "Closed",
    "ConfigError",
    "Decision",
    "Discrete",
    "Env",
    "EnvPool",
    "EnvironmentFault",
    "Finding",
    "Gradient",
    "Gymnasium",
    "GymnasiumVector",
    "HeadraceError",
    "Inline",
    "Learner",
    "Loss",
    "Method",
    "MultiBinary",
    "MultiDiscrete",
    "NonFinite",
    "Policy",
    "Processes",
    "Rainbow",
    "Replay",
    "Report",
    "Result",
    "RoleFailed",
    "Rollout",
    "Run",
    "Sampling",
    "Schedule",
    "ShapeError",
    "Spec",
    "Stalled",
    "Struct",
    "SyncBatches",
    "SyncGradients",
    "SyncReplay",
    "Threads",
    "Transitions",
    "Tree",
    "VectorEnv",
    "axes",
    "check_env",
    "environment",
    "evaluate",
    "load",
    "role",
    "wait",
]

_HOMES = {
    "actor": ("Actor", "evaluate"),
    "channel": ("role", "wait"),
    "checkpoint": ("Checkpoint", "Checkpoints"),
    "data": ("Decision", "Gradient", "Loss", "Rollout", "Sampling", "Transitions"),
    "envs.atari": ("Atari",),
    "envs.base": ("Env", "VectorEnv"),
    "envs.check": ("Checked", "Finding", "check_env"),
    "envs.envpool": ("EnvPool",),
    "envs.gymnasium": ("Gymnasium",),
    "envs.gymnasium_vector": ("GymnasiumVector",),
    "envs.registry": ("environment",),
    "errors": (
        *("CheckpointError", "Closed", "ConfigError", "EnvironmentFault", "HeadraceError", "NonFinite", "RoleFailed"),
        *("ShapeError", "Stalled"),
    ),
    "learner": ("Learner",),
    "method": ("Method",),
    "methods.a2c": ("A2C",),
    "methods.appo": ("APPO",),
    "methods.ddpg": ("DDPG",),
    "methods.dqn": ("DQN",),
    "methods.impala": ("IMPALA",),
    "methods.ppo": ("PPO",),
    "methods.rainbow": ("Rainbow",),
    "methods.sac": ("SAC",),
    "methods.td3": ("TD3",),
    "place.inline": ("Inline",),
    "place.processes": ("Processes",),
    "place.threads": ("Threads",),
    "plans.async_batches": ("AsyncBatches",),
    "plans.async_gradients": ("AsyncGradients",),
    "plans.schedule": ("Schedule",),
    "plans.sync_batches": ("SyncBatches",),
    "plans.sync_gradients": ("SyncGradients",),
    "plans.sync_replay": ("SyncReplay",),
    "policy": ("Policy", "load"),
    "replay": ("Replay",),
    "report": ("Report",),
    "run": ("Result", "Run"),
    "spaces": ("Box", "Discrete", "MultiBinary", "MultiDiscrete", "Spec"),
    "struct": ("Struct", "Tree", "axes"),
}
"""The modules that define the public names; the imports above say the same to a type checker."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
