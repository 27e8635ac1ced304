"""replay: cycles a second of add 64 rows, draw 256 and, by priority, tell their errors; in a store that is full.

NumPy's and every peer's environment can import this: the harness is asked for only where the workload is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness import Workload

ROWS, BATCH, SEED = 64, 256, 1
CAPACITY = {"prioritised": 1_000_000, "atari": 20_000, "uniform": 1_000_000}
COUNTS = {"prioritised": 6000, "atari": 400, "uniform": 15_000}  # cycles that are measured
WARM_UPS = {"prioritised": 600, "atari": 40, "uniform": 1500}
TARGETS = {
    f"vs_{peer}_{task}": "≥ 1" for task, peer in (("prioritised", "cpprb"), ("atari", "cpprb"), ("uniform", "sb3"))
}
PEERS = {"prioritised": ("cpprb", "cpprb"), "atari": ("cpprb", "cpprb"), "uniform": ("sb3", "sb3_replay")}


def workload() -> Workload:
    from benchmarks.harness import Case, Workload
    from benchmarks.peers import python_with

    cases = []
    for task, (peer, module) in PEERS.items():
        cases.append(Case("headrace", "benchmarks.ours_replay", (task,)))
        if python := python_with(peer):
            cases.append(Case(peer, f"benchmarks.peers.{module}", (task,), python=python))
    return Workload("replay", "cycles/s", cases, ratios, TARGETS)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    return {
        f"vs_{peer}_{task}": medians[f"headrace_{task}"] / medians[f"{peer}_{task}"]
        for task, (peer, _) in PEERS.items()
        if f"{peer}_{task}" in medians
    }
