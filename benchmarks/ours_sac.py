"""Headrace: SAC in one process, and what its parts cost alone."""

import json
import sys
import time
from collections import deque
from contextlib import closing
from importlib.metadata import version

import torch

from benchmarks.ours_dqn import measure_roof
from benchmarks.report import report
from headrace import SAC, Gymnasium, Inline, Learner, SyncReplay


def main(
    *, env: str, hidden: list[int], learning_rate: float, gamma: float, tau: float, buffer_size: int, batch_size: int,
    learning_starts: int, warm_up: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    stepped = Gymnasium(env)
    method = SAC(learning_rate=learning_rate, gamma=gamma, tau=tau, hidden=tuple(hidden))
    plan = SyncReplay(
        num_envs=1,
        num_steps=1,
        ratio=batch_size,  # one update a step
        batch_size=batch_size,
        buffer_size=buffer_size,
        learning_starts=learning_starts,
    )
    learner = Learner(method, stepped.spec, seed=seed)
    returns: deque[float] = deque(maxlen=5)
    began = before = None
    with closing(plan.run(learner, stepped, Inline(), env_steps=warm_up + env_steps)) as reports:
        for update in reports:
            now = time.perf_counter()
            if began is None and update.env_steps >= warm_up:
                began, before = now, update.env_steps
            returns.extend(update.episode_returns.tolist())
    made, seconds = update.env_steps - before, now - began
    settings = {
        "place": "Inline", "env": repr(stepped), "gymnasium": version("gymnasium"), "torch": torch.__version__,
        "threads": 1,
    }  # fmt: skip
    mean_return = round(sum(returns) / len(returns), 1) if returns else None
    report("headrace", made / seconds, version("headrace"), env_steps=made, mean_return=mean_return, **settings)
    measure_roof(Learner(method, stepped.spec, seed=seed), plan, stepped, warm_up, env_steps, settings)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
