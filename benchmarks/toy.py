"""toy: the founding toy in lock-step, one actor: round trips a second between two processes."""

import sys
from importlib.metadata import version

from benchmarks import peers
from benchmarks.founding import act, learn
from benchmarks.harness import Case, Workload
from benchmarks.report import report
from headrace import Processes

STEPS = 60_000
RAY_STEPS = 600

# Measured with Julia 1.5.3 on two cores: the range over several runs. The figure is its middle.
JULIA = [
    {
        "system": "julia-recorded",
        "version": "1.5.3",
        "settings": {"channel": "RemoteChannel", "workers": workers, "cores": 2, "recorded": span},
        "figure": sum(span) / 2,
    }
    for workers, span in ((1, [5_600, 9_300]), (2, [3_200, 5_400]))
]


def workload() -> Workload:
    ours = ("benchmarks.toy", (str(STEPS),))
    pipe = ("benchmarks.peers.pipe", ("toy", str(STEPS)))
    cases = [Case("headrace", *ours), Case("pipe", *pipe)]
    ray = peers.python_with("ray")
    if ray is not None:
        cases.append(Case("ray", "benchmarks.peers.ray", (str(RAY_STEPS),), python=ray))
    cases += [Case("headrace", *ours, one_core=True), Case("pipe", *pipe, one_core=True)]
    targets = {"vs_pipe": "≥ 1.5", "vs_pipe_one_core": "≥ 1.5", "vs_ray": "≥ 50"}
    return Workload("toy", "round trips/s", cases, ratios, targets, JULIA)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    ratios = {
        "vs_pipe": medians["headrace"] / medians["pipe"],
        "vs_pipe_one_core": medians["headrace_one_core"] / medians["pipe_one_core"],
    }
    if "ray" in medians:
        ratios["vs_ray"] = medians["headrace"] / medians["ray"]
    return ratios


def actor(policies, rewards):
    act(policies.take, rewards.put)


def main(steps: int) -> None:
    with Processes().crew() as crew:
        policies = crew.channel(like=(False, 0.0), name="policies")
        rewards = crew.channel(like=(0, 0.0, 0.0), name="rewards")
        crew.start(actor, policies, rewards)
        policy, speed = learn(policies.put, rewards.take, steps)
        crew.join(timeout=60)
    report("headrace", speed, version("headrace"), place="Processes", steps=steps, policy=policy)


if __name__ == "__main__":
    main(int(sys.argv[1]))
