"""ppo-pong: PPO on Pong with the Nature CNN in float32, overlapped and in turn, with one learner thread and two."""

from benchmarks import ppo
from benchmarks.harness import Workload

SETTINGS = {
    **ppo.SETTINGS,
    "env": "PongNoFrameskip-v4",
    "num_envs": 8,
    "num_steps": 128,
    "num_epochs": 4,
    "minibatch_size": 256,
    "hidden": [],  # behind the CNN
    "learning_rate": 0.00025,
    "clip": 0.1,
    "ent_coef": 0.01,
    "warm_up": 1024,
    "env_steps": 4 * 1024,
}


def workload() -> Workload:
    cases = ppo.cases(SETTINGS, ("lag1", "lag1_threads2", "threads2", "roof"), {"sb3": [("1",), ("2",)]})
    return Workload(
        "ppo-pong",
        "env steps/s",
        cases,
        ppo.ratios,
        {"vs_sb3_lag1_threads2": "≥ 1.6", "roof_share_lag1_threads2": "≥ 0.7"},
    )
