"""ppo-cartpole: PPO on CartPole-v1 from end to end, environment steps a second while it trains."""

from benchmarks import ppo
from benchmarks.harness import Workload

SETTINGS = {
    **ppo.SETTINGS,
    "num_envs": 16,
    "num_steps": 128,
    "num_epochs": 4,
    "minibatch_size": 512,
    "learning_rate": 1e-3,  # constant
    "warm_up": 5 * 16 * 128,
    "env_steps": 50 * 16 * 128,
}


def workload() -> Workload:
    # RLlib with 0 and with 2 environment runners: which is faster depends on the machine. 1 is between them.
    cases = ppo.cases(SETTINGS, ("inline", "lag1", "roof"), {"sb3": [("1",)], "rllib": [("0",), ("2",)]})
    targets = {"vs_sb3": "≥ 2.5", "vs_sb3_lag1": "≥ 4", "vs_rllib_lag1": "≥ 8", "roof_share": "≤ 1"}
    return Workload("ppo-cartpole", "env steps/s", cases, ratios, targets)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    found = ppo.ratios(medians)
    found["roof_share"] = medians["headrace_beside_roof"] / medians["roof"]
    if "rllib_0" in medians:
        found["vs_rllib_lag1"] = medians["headrace_lag1"] / max(medians["rllib_0"], medians["rllib_2"])
    return found
