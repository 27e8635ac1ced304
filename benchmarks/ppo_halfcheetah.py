"""ppo-halfcheetah: PPO on HalfCheetah-v5 with Stable-Baselines3's defaults."""

from benchmarks import ppo
from benchmarks.harness import Workload

SETTINGS = {
    **ppo.SETTINGS,
    "env": "HalfCheetah-v5",
    "num_envs": 1,
    "num_steps": 2048,
    "num_epochs": 10,
    "minibatch_size": 64,
    "warm_up": 2 * 2048,
    "env_steps": 10 * 2048,
}


def workload() -> Workload:
    cases = ppo.cases(SETTINGS, ("inline", "lag1"), {"sb3": [("1",)]})
    return Workload("ppo-halfcheetah", "env steps/s", cases, ppo.ratios, {"vs_sb3_lag1": "≥ 2.5"})
