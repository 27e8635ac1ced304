"""Headrace: cycles of adding 64 rows to a full replay, drawing 256 and, by priority, telling their errors."""

import sys
from importlib.metadata import version

import numpy as np
import torch

from benchmarks.replay import BATCH, CAPACITY, COUNTS, ROWS, SEED, WARM_UPS
from benchmarks.report import rate, report
from headrace import Rollout
from headrace.data import Sampling
from headrace.replay import Replay
from headrace.spaces import Box, Discrete, Spec

ATARI = (4, 84, 84)


def rollout(observation: np.ndarray) -> Rollout:
    """Of one environment, which goes round: the last observation is the first of the next one."""
    observation[-1] = observation[0]
    rows = {
        name: torch.zeros(ROWS, 1, dtype=dtype)
        for name, dtype in (
            *(("action", torch.int64), ("reward", torch.float32), ("terminated", torch.bool)),
            *(("truncated", torch.bool), ("version", torch.int32), ("episode_return", torch.float32)),
            ("episode_length", torch.int32),
        )
    }
    return Rollout(
        observation=torch.from_numpy(observation),
        **rows,
        valid=torch.ones(ROWS, 1, dtype=torch.bool),
        environment=torch.zeros(1, dtype=torch.int32),
        **{name: torch.zeros(1, dtype=torch.int64) for name in ("rank", "sequence", "env_steps")},
    ).check()


def made(task: str) -> tuple[Rollout, Spec]:
    rng = np.random.default_rng(SEED)
    if task != "atari":
        bound = np.full(8, 9.0)
        return rollout(rng.standard_normal((ROWS + 1, 1, 8), np.float32)), Spec(Box(-bound, bound), Discrete(2))
    frames = rng.integers(0, 256, (ROWS, *ATARI[1:]), np.uint8)
    stacks = frames[(np.arange(ROWS + 1)[:, None] + np.arange(4)) % ROWS]
    spec = Spec(Box(np.zeros(ATARI), np.full(ATARI, 255), torch.uint8), Discrete(6), stacked=4)
    return rollout(stacks[:, None]), spec


def main(task: str) -> None:
    torch.set_num_threads(1)
    item, spec = made(task)
    alpha = 0.0 if task == "uniform" else 0.6
    replay = Replay(item, 1, CAPACITY[task], Sampling(alpha=alpha, beta=0.4), spec, SEED)
    for _ in range(CAPACITY[task] // ROWS + 1):
        replay.add(0, item)
    errors = torch.rand(BATCH, generator=torch.Generator().manual_seed(SEED))

    def cycle(number: int) -> None:
        replay.add(0, item)
        batch = replay.sample(BATCH)
        if alpha:
            replay.update(batch.row, batch.generation, errors)

    figure = rate(cycle, COUNTS[task], WARM_UPS[task])
    settings = {"capacity": CAPACITY[task], "numpy": np.__version__, "mib": round(replay.nbytes / 2**20, 1)}
    report(f"headrace_{task}", figure, version("headrace"), **settings)


if __name__ == "__main__":
    main(sys.argv[1])
