"""Stable-Baselines3: cycles of adding 64 rows to a full uniform replay and drawing 256."""

import numpy as np
import stable_baselines3
import torch
from gymnasium.spaces import Box, Discrete
from stable_baselines3.common.buffers import ReplayBuffer

from benchmarks.replay import BATCH, CAPACITY, COUNTS, ROWS, SEED, WARM_UPS
from benchmarks.report import rate, report


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(SEED)
    seen = rng.standard_normal((ROWS + 1, 8)).astype(np.float32)
    replay = ReplayBuffer(CAPACITY["uniform"], Box(-9, 9, (8,), np.float32), Discrete(2), "cpu", n_envs=ROWS)
    # One row of each of so many environments is all that it takes at once.
    item = (np.roll(seen[:-1], 1, 0), seen[:-1], np.zeros((ROWS, 1), np.int64), np.zeros(ROWS), np.zeros(ROWS, bool))
    infos: list[dict] = [{}] * ROWS
    for _ in range(CAPACITY["uniform"] // ROWS + 1):
        replay.add(*item, infos)

    def cycle(number: int) -> None:
        replay.add(*item, infos)
        replay.sample(BATCH)

    figure = rate(cycle, COUNTS["uniform"], WARM_UPS["uniform"])
    settings = {"capacity": CAPACITY["uniform"], "torch": torch.__version__, "numpy": np.__version__}
    report("sb3_uniform", figure, stable_baselines3.__version__, **settings)


if __name__ == "__main__":
    main()
