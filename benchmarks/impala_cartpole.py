"""impala-cartpole: IMPALA and APPO on CartPole-v1 from end to end, environment steps a second while they train."""

import json
from typing import Any

from benchmarks import peers
from benchmarks.harness import Case, Workload

SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_envs": 16,  # of all actors together
    "num_steps": 64,  # of a rollout; a batch is one rollout of each environment, and is learned from once
    "hidden": [64, 64],  # of two separate towers, tanh
    "learning_rate": 1e-3,  # constant
    "gamma": 0.99,
    "ent_coef": 0.0,
    "vf_coef": 0.5,
    "max_grad_norm": 40.0,
    "warm_up": 10 * 16 * 64,
    "env_steps": 60 * 16 * 64,
    "seed": 1,
}
OURS = ("impala_1", "impala_2", "appo_1", "roof")  # method and actors
THEIRS = {"rllib_impala": ("rllib", [("IMPALA",), ("APPO",)]), "sample_factory": ("sample_factory", [()])}
"""Programs: the environment that each needs, and in which forms it is run."""


def workload() -> Workload:
    # Ours trains for longer: what peers take as long for is over in a second.
    longer = {**SETTINGS, "env_steps": 6 * SETTINGS["env_steps"]}
    cases = [Case("headrace", "benchmarks.ours_impala", (how, json.dumps(longer))) for how in OURS]
    for program, (peer, forms) in THEIRS.items():
        python = peers.python_with(peer)
        if python is not None:
            words = json.dumps(SETTINGS)
            cases += [Case(peer, f"benchmarks.peers.{program}", (*form, words), python=python) for form in forms]
    targets = {"vs_rllib_impala": "≥ 8", "vs_sample_factory": "≥ 8", "roof_share": "≤ 1"}
    return Workload("impala-cartpole", "env steps/s", cases, ratios, targets)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    found = {}
    impala = max(medians["impala_1"], medians["impala_2"])
    if "rllib_impala" in medians:
        found["vs_rllib_impala"] = impala / medians["rllib_impala"]
        found["appo_vs_rllib_appo"] = medians["appo_1"] / medians["rllib_appo"]
    if "sample_factory" in medians:
        found["vs_sample_factory"] = medians["appo_1"] / medians["sample_factory"]
    return {**found, "roof_share": impala / medians["roof_cores"]}
