"""transport: a Struct of eight fields from a role in a process of its own to the driver, items a second."""

import sys
from importlib.metadata import version

import torch
from torch import Tensor

from benchmarks.harness import Case, Workload
from benchmarks.item import COUNTS, FIELDS, SOURCES, WARM_UPS, arrays, item_bytes, look, stamp
from benchmarks.report import rate, report
from headrace import Processes, Struct, axes

CAPACITIES = {"59kb": 4, "58mb": 2}


class Rollout(Struct):
    observation: Tensor = axes("T+1 B 4", torch.float32)
    action: Tensor = axes("T B", torch.int32)
    reward: Tensor = axes("T B", torch.float32)
    log_prob: Tensor = axes("T B", torch.float32)
    terminated: Tensor = axes("T B", torch.bool)
    environment: Tensor = axes("B", torch.int32)
    env_steps: Tensor = axes("B", torch.int64)
    sequence: Tensor = axes("B", torch.int64)

    @classmethod
    def example(cls, size: str) -> "Rollout":
        """An item, every tensor allocated by itself."""
        # Copied into tensors that torch has allocated, on the pages that it asks for, as in a program and as in memcpy.
        tensors = [torch.from_numpy(array).clone() for array in arrays(size)]
        return cls(**dict(zip((name for name, _, _ in FIELDS), tensors, strict=True))).check()


def workload() -> Workload:
    pipe = [Case("pipe", "benchmarks.peers.pipe", ("transport", "59kb", form)) for form in ("tuple", "bytes")]
    cases = [
        Case("headrace", "benchmarks.transport", ("59kb", "put")),
        Case("memcpy", "benchmarks.peers.memcpy", ("59kb",)),
        *pipe,
        Case("headrace", "benchmarks.transport", ("59kb", "reserve")),
        Case("headrace", "benchmarks.transport", ("58mb", "put")),
        Case("memcpy", "benchmarks.peers.memcpy", ("58mb",)),
    ]
    targets = {"vs_memcpy_58mb": "≥ 0.8", "vs_memcpy_59kb": "≥ 0.6", "vs_pipe_59kb": "≥ 2"}
    return Workload("transport", "items/s", cases, ratios, targets)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    return {
        "vs_memcpy_59kb": medians["headrace_59kb"] / medians["memcpy_59kb"],
        "vs_memcpy_58mb": medians["headrace_58mb"] / medians["memcpy_58mb"],
        "vs_pipe_59kb": medians["headrace_59kb"] / max(medians["pipe_tuple_59kb"], medians["pipe_bytes_59kb"]),
    }


def put_items(items, size):
    """Stamp one of several sources and put it."""
    sources = [Rollout.example(size) for _ in range(SOURCES[size])]
    ends = [(source.observation.numpy(), source.sequence.numpy()) for source in sources]
    for number in range(1, WARM_UPS[size] + COUNTS[size] + 1):
        at = number % len(sources)
        stamp(*ends[at], number)
        items.put(sources[at])


def fill_items(items, size):
    """Stamp the slot itself: what is left is the cost of handing it over."""
    for number in range(1, WARM_UPS[size] + COUNTS[size] + 1):
        slot = items.reserve()
        stamp(slot.observation.numpy(), slot.sequence.numpy(), number)
        items.commit()


def main(size: str, how: str) -> None:
    torch.set_num_threads(1)
    with Processes().crew() as crew:
        items = crew.channel(CAPACITIES[size], like=Rollout.example(size), name="items")
        crew.start(put_items if how == "put" else fill_items, items, size)

        def take(number):
            item = items.take()
            look(item.observation.numpy(), item.sequence.numpy(), number)

        speed = rate(take, COUNTS[size], WARM_UPS[size])
        crew.join(timeout=60)
    report(
        f"headrace_{size}" if how == "put" else f"headrace_reserve_{size}", speed, version("headrace"),
        place="Processes", writer=how, bytes=item_bytes(size), items=COUNTS[size], capacity=CAPACITIES[size], threads=1,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
