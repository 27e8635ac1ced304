"""counting: put and take of a 59 kB item in one process, with the seconds counted and without."""

import statistics
import time
from importlib.metadata import version

import torch

from benchmarks.harness import Case, Workload
from benchmarks.report import report
from benchmarks.transport import Rollout
from headrace import Processes

BLOCKS = 150  # of each kind, in turn
ITEMS = 500  # a block


def workload() -> Workload:
    return Workload("counting", "ns", [Case("headrace", "benchmarks.counting")], ratios, {"counting_share": "< 0.05"})


def ratios(medians: dict[str, float]) -> dict[str, float]:
    return {"counting_share": 1 - medians["uncounted"] / medians["counted"]}


def block(channel, item) -> float:
    """Nanoseconds of one put and take."""
    began = time.perf_counter_ns()
    for _ in range(ITEMS):
        channel.put(item)
        channel.take()
    return (time.perf_counter_ns() - began) / ITEMS


def main() -> None:
    torch.set_num_threads(1)
    item = Rollout.example("59kb")
    spent: dict[bool, list[float]] = {True: [], False: []}
    with Processes().crew() as crew:
        channel = crew.channel(like=item, name="items")
        block(channel, item)
        for _ in range(BLOCKS):
            for counted in (True, False):
                # Items and bytes follow from the counters that move the items; a channel that does not time its
                # copies reads no clock and adds up nothing.
                channel._timed = counted
                busy = channel.statistics().busy
                spent[counted].append(block(channel, item))
                if (channel.statistics().busy > busy) is not counted:
                    raise RuntimeError(
                        "`_timed` no longer decides whether RingChannel.put counts: change this benchmark"
                    )
    for counted, name in ((True, "counted"), (False, "uncounted")):
        report(
            name,
            statistics.median(spent[counted]),
            version("headrace"),
            counted=counted,
            blocks=BLOCKS,
            items=ITEMS,
            threads=1,
        )


if __name__ == "__main__":
    main()
