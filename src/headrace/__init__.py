"""Headrace: distributed reinforcement learning, written once and run anywhere.

A method learns, a plan says what moves and who waits, a placement says where it runs:

    learner = Learner(PPO(), env.spec, seed=1)
    for report in SyncBatches(actors=2).run(learner, env, Processes(), env_steps=100_000):
        ...
"""

from headrace.actor import Actor, evaluate
from headrace.channel import role, wait
from headrace.checkpoint import Checkpoint, Checkpoints
from headrace.data import Decision, Gradient, Loss, Rollout
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
from headrace.methods.ppo import PPO
from headrace.place.inline import Inline
from headrace.place.processes import Processes
from headrace.place.threads import Threads
from headrace.plans.sync_batches import SyncBatches
from headrace.report import Report
from headrace.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spec
from headrace.struct import Struct, Tree, axes

__all__ = [
    "A2C",
    "PPO",
    "Actor",
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
    "Processes",
    "Report",
    "RoleFailed",
    "Rollout",
    "ShapeError",
    "Spec",
    "Stalled",
    "Struct",
    "SyncBatches",
    "Threads",
    "Tree",
    "VectorEnv",
    "axes",
    "check_env",
    "environment",
    "evaluate",
    "role",
    "wait",
]
