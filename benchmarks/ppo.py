"""What the workloads that train PPO share: its settings, the programs that run it, and what is compared."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import peers
from benchmarks.harness import Case

SETTINGS: dict[str, Any] = {
    "env": "CartPole-v1",
    "hidden": [64, 64],  # of two separate towers, tanh
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip": 0.2,
    "ent_coef": 0.0,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "seed": 1,
    # num_envs, num_steps, num_epochs, minibatch_size: each workload's own. So are
    # warm_up: environment steps that are trained on before the clock starts, and env_steps: those that are counted.
}


def cases(
    settings: Mapping[str, Any], ours: Sequence[str], theirs: Mapping[str, Sequence[tuple[str, ...]]]
) -> list[Case]:
    """Ours in each of these ways, and each peer that can be installed in each of its forms."""
    words = json.dumps(settings)
    found = [Case("headrace", "benchmarks.ours_ppo", (how, words)) for how in ours]
    for peer, forms in theirs.items():
        python = peers.python_with(peer)
        if python is not None:
            found += [Case(peer, f"benchmarks.peers.{peer}", (*form, words), python=python) for form in forms]
    return found


def ratios(medians: Mapping[str, float]) -> dict[str, float]:
    """Each way of ours that was measured beside Stable-Baselines3 and beside the roof."""
    found = {}
    for suffix in ("", "_lag1", "_lag1_threads2", "_threads2"):
        name = f"headrace{suffix}"
        if name in medians:
            if "sb3" in medians:
                found[f"vs_sb3{suffix}"] = medians[name] / medians["sb3"]
            if "sb3_threads2" in medians:
                found[f"vs_sb3_of_two_threads{suffix}"] = medians[name] / medians["sb3_threads2"]
            if suffix and "roof_cores" in medians:
                found[f"roof_share{suffix}"] = medians[name] / medians["roof_cores"]
    return found
