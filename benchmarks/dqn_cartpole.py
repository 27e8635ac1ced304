"""dqn-cartpole: DQN on CartPole-v1 from end to end, environment steps a second while it trains."""

import json
from typing import Any

from benchmarks import peers
from benchmarks.harness import Case, Workload

SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",  # one
    "hidden": [64, 64],  # relu
    "learning_rate": 1e-4,
    "gamma": 0.99,
    "buffer_size": 100_000,
    "batch_size": 64,
    "learning_starts": 1_000,
    "train_every": 4,  # environment steps from one update to the next
    "target_update_steps": 1_000,  # environment steps from one copy of the target network to the next
    "max_grad_norm": 10.0,
    "eps": 0.05,  # constant
    "seed": 1,
    "warm_up": 3_000,  # environment steps before the clock starts
    "env_steps": 20_000,
}
SLOW = {**SETTINGS, "warm_up": 1_500, "env_steps": 3_000}
"""Of a peer that takes ten times as long for a step."""


def workload() -> Workload:
    cases = [Case("headrace", "benchmarks.ours_dqn", (json.dumps(SETTINGS),))]
    for peer, settings in (("sb3", SETTINGS), ("rllib", SLOW)):
        python = peers.python_with(peer)
        if python is not None:
            cases.append(Case(peer, f"benchmarks.peers.{peer}_dqn", (json.dumps(settings),), python=python))
    return Workload(
        "dqn-cartpole", "env steps/s", cases, ratios, {"vs_sb3": "≥ 2.5", "vs_rllib": "≥ 20", "roof_share": "≤ 1"}
    )


def ratios(medians: dict[str, float]) -> dict[str, float]:
    found = {f"vs_{peer}": medians["headrace"] / medians[peer] for peer in ("sb3", "rllib") if peer in medians}
    return {**found, "roof_share": medians["headrace"] / medians["roof"]}
