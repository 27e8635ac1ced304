"""sac-pendulum: SAC on Pendulum-v1 from end to end, one update a step, environment steps a second while it trains."""

import json
from typing import Any

from benchmarks import peers
from benchmarks.harness import Case, Workload

SETTINGS: dict[str, Any] = {
    "env": "Pendulum-v1",  # one
    "hidden": [256, 256],  # of the policy and of each of the two action-values, relu
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "tau": 0.005,
    "buffer_size": 100_000,
    "batch_size": 256,
    "learning_starts": 300,
    "seed": 1,
    "warm_up": 500,  # environment steps before the clock starts
    "env_steps": 1_500,
}
SLOW = {**SETTINGS, "env_steps": 400}
"""Of a peer that takes ten times as long for a step."""


def workload() -> Workload:
    cases = [Case("headrace", "benchmarks.ours_sac", (json.dumps(SETTINGS),))]
    for peer, settings in (("sb3", SETTINGS), ("rllib", SLOW)):
        python = peers.python_with(peer)
        if python is not None:
            cases.append(Case(peer, f"benchmarks.peers.{peer}_sac", (json.dumps(settings),), python=python))
    return Workload(
        "sac-pendulum", "env steps/s", cases, ratios, {"vs_sb3": "≥ 1.5", "vs_rllib": "≥ 10", "roof_share": "≤ 1"}
    )


def ratios(medians: dict[str, float]) -> dict[str, float]:
    found = {f"vs_{peer}": medians["headrace"] / medians[peer] for peer in ("sb3", "rllib") if peer in medians}
    return {**found, "roof_share": medians["headrace"] / medians["roof"]}
