"""cpprb: cycles of adding 64 rows to a full prioritised replay, drawing 256 and telling their errors, in C++."""

import sys
from importlib.metadata import version

import numpy as np
from cpprb import PrioritizedReplayBuffer

from benchmarks.replay import BATCH, CAPACITY, COUNTS, ROWS, SEED, WARM_UPS
from benchmarks.report import rate, report


def main(task: str) -> None:
    rng = np.random.default_rng(SEED)
    shape, dtype = ((4, 84, 84), np.uint8) if task == "atari" else ((8,), np.float32)
    seen = rng.integers(0, 256, (ROWS + 1, *shape)).astype(dtype)
    fields = {"obs": (shape, dtype), "act": ((1,), np.int64), "rew": ((1,), np.float32), "next_obs": (shape, dtype)}
    fields["done"] = ((1,), np.bool_)
    replay = PrioritizedReplayBuffer(
        CAPACITY[task], {name: {"shape": each, "dtype": kind} for name, (each, kind) in fields.items()}, alpha=0.6
    )
    zeros = {name: np.zeros((ROWS, *each), kind) for name, (each, kind) in fields.items()}
    item = zeros | {"obs": seen[:-1], "next_obs": seen[1:]}
    for _ in range(CAPACITY[task] // ROWS + 1):
        replay.add(**item)
    errors = rng.random(BATCH).astype(np.float32)

    def cycle(number: int) -> None:
        replay.add(**item)
        batch = replay.sample(BATCH, beta=0.4)
        replay.update_priorities(batch["indexes"], errors)

    figure = rate(cycle, COUNTS[task], WARM_UPS[task])
    report(f"cpprb_{task}", figure, version("cpprb"), capacity=CAPACITY[task], numpy=np.__version__)


if __name__ == "__main__":
    main(sys.argv[1])
