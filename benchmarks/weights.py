"""weights: versions of a network to two reader processes, each of which pulls and answers before the next, a second."""

from importlib.metadata import version as version_of
from itertools import pairwise

import torch
from torch import nn

from benchmarks.harness import Case, Workload
from benchmarks.report import rate, report
from benchmarks.versions import PARAMETERS, READERS, VERSIONS, WARM_UP, WIDTHS
from headrace import Processes, role


def workload() -> Workload:
    cases = [
        Case("headrace", "benchmarks.weights"),
        Case("shared copy", "benchmarks.peers.shared", ("semaphore",)),
        Case("shared copy", "benchmarks.peers.shared", ("pipe",)),
    ]
    return Workload("weights", "versions/s", cases, ratios, {"vs_shared_copy": "≥ 0.8"})


def ratios(medians: dict[str, float]) -> dict[str, float]:
    return {"vs_shared_copy": medians["headrace"] / max(medians["shared_semaphore"], medians["shared_pipe"])}


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(into, out) for into, out in pairwise(WIDTHS))).requires_grad_(False)


def ends(net):
    """The first and the last parameter, as arrays."""
    parameters = list(net.parameters())
    return parameters[0].numpy().reshape(-1), parameters[-1].numpy().reshape(-1)


def read(weights, answers):
    net, mine = network(), answers[role().rank]
    first, last = ends(net)
    for version in range(1, WARM_UP + VERSIONS + 1):
        weights.pull(net, version)
        if first[0] != version or last[-1] != version:
            raise RuntimeError(f"version {version} came as {first[0]}, {last[-1]}")
        mine.put((version,))


def main() -> None:
    torch.set_num_threads(1)
    net = network()
    first, last = ends(net)
    with Processes().crew() as crew:
        weights = crew.weights(net, name="weights")
        answers = crew.lanes(READERS, like=(0,), name="answers")
        crew.start(read, weights, answers, copies=READERS)

        def publish(version):
            first[0] = last[-1] = version
            weights.publish(net, version)
            for lane in answers:
                lane.take()

        speed = rate(publish, VERSIONS, WARM_UP)
        crew.join(timeout=60)
    report(
        "headrace", speed, version_of("headrace"),
        place="Processes", bytes=PARAMETERS * 4, tensors=len([*net.parameters()]),
        readers=READERS, versions=VERSIONS, threads=1,
    )  # fmt: skip


if __name__ == "__main__":
    main()
