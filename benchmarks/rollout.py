"""rollout: environment steps a second of one actor, and of its environments alone, in turn in one process."""

from benchmarks.harness import Case, Workload

TARGETS = {
    "vs_bare_cartpole": "≥ 0.35",
    "vs_bare_halfcheetah": "≥ 0.8",
    "vs_parts_pong": "≥ 0.9",
    "vs_loop_pong": "≥ 0.9",
}


def workload() -> Workload:
    cases = [Case("headrace", "benchmarks.ours_rollout", (task,)) for task in ("cartpole", "halfcheetah", "pong")]
    return Workload("rollout", "env steps/s", cases, ratios, TARGETS)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    found = {
        f"vs_bare_{task}": medians[f"actor_{task}"] / medians[f"bare_{task}"] for task in ("cartpole", "halfcheetah")
    }
    # Of Pong the network is the larger part: what the environments cost alone, and it alone; and both in one loop,
    # where each finds the caches full of the other's.
    for beside in ("parts", "loop"):
        found[f"vs_{beside}_pong"] = medians["actor_pong"] / medians[f"{beside}_pong"]
    return found
