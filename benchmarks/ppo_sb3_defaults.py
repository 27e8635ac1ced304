"""ppo-sb3-defaults: PPO on CartPole-v1 with Stable-Baselines3's own defaults, one environment and small minibatches."""

from benchmarks import ppo
from benchmarks.harness import Workload

SETTINGS = {
    **ppo.SETTINGS,
    "num_envs": 1,
    "num_steps": 2048,
    "num_epochs": 10,
    "minibatch_size": 64,
    "warm_up": 2 * 2048,
    "env_steps": 10 * 2048,
}


def workload() -> Workload:
    cases = ppo.cases(SETTINGS, ("inline", "lag1"), {"sb3": [("1",)]})
    return Workload("ppo-sb3-defaults", "env steps/s", cases, ppo.ratios, {"vs_sb3_lag1": "≥ 2.5"})
