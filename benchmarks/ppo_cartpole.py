"""ppo-cartpole: PPO on CartPole-v1 from end to end, environment steps a second while it trains."""

import json
from typing import Any

from benchmarks import peers
from benchmarks.harness import Case, Workload

SETTINGS: dict[str, Any] = {
    "num_envs": 16,
    "num_steps": 128,
    "num_epochs": 4,
    "minibatch_size": 512,
    "hidden": [64, 64],  # of two separate towers, tanh
    "learning_rate": 1e-3,  # constant; Adam
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip": 0.2,
    "ent_coef": 0.0,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "warm_up": 5 * 16 * 128,  # environment steps that are trained on before the clock starts
    "env_steps": 50 * 16 * 128,  # that are counted
    "seed": 1,
}


def workload() -> Workload:
    settings = json.dumps(SETTINGS)
    cases = [Case("headrace", "benchmarks.ours_ppo", (how, settings)) for how in ("inline", "lag1", "roof")]
    # RLlib with 0 and with 2 environment runners: which is faster depends on the machine. 1 is between them.
    for peer, forms in (("sb3", [()]), ("rllib", [("0",), ("2",)])):
        python = peers.python_with(peer)
        if python is not None:
            cases += [Case(peer, f"benchmarks.peers.{peer}", (*form, settings), python=python) for form in forms]
    targets = {"vs_sb3": "≥ 2.5", "vs_sb3_lag1": "≥ 4", "vs_rllib_lag1": "≥ 8", "roof_share": "≤ 1"}
    return Workload("ppo-cartpole", "env steps/s", cases, ratios, targets)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    inline, lag1 = medians["headrace"], medians["headrace_lag1"]
    ratios = {
        "roof_share": medians["headrace_beside_roof"] / medians["roof"],
        "roof_share_lag1": lag1 / medians["roof_lag1"],
    }
    if "sb3" in medians:
        ratios |= {"vs_sb3": inline / medians["sb3"], "vs_sb3_lag1": lag1 / medians["sb3"]}
    if "rllib_0" in medians:
        ratios["vs_rllib_lag1"] = lag1 / max(medians["rllib_0"], medians["rllib_2"])
    return ratios
