"""straggler: four actors, one of which is five times slower: what waiting for it costs, and not waiting.

Environments sleep, so that the figures are those of the plans, whatever else the machine does.
"""

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version

import torch

from benchmarks.harness import Case, Workload
from benchmarks.ours_impala import busy_share
from benchmarks.report import report
from headrace import IMPALA, AsyncBatches, Env, Gymnasium, Learner, Processes, Spec, SyncBatches, VectorEnv

ACTORS = 4
SLOWNESS = 5
STEP = 0.002  # seconds of sleep in a step of the others
STEPS = 16
BATCH_ROLLOUTS = 2
MAX_LAG = -(-(ACTORS - 1) * SLOWNESS // BATCH_ROLLOUTS)  # from where on nobody waits: docs/async-batches.md
SECONDS = 8.0
WARM_UP = 2.0

PLANS: dict[str, Callable[[], AsyncBatches | SyncBatches]] = {
    "async": lambda: AsyncBatches(
        actors=ACTORS, num_envs=ACTORS, num_steps=STEPS, batch_rollouts=BATCH_ROLLOUTS, max_lag=MAX_LAG
    ),
    "sync": lambda: SyncBatches(actors=ACTORS, num_envs=ACTORS, num_steps=STEPS),
    "sync_lag1": lambda: SyncBatches(actors=ACTORS, num_envs=ACTORS, num_steps=STEPS, max_lag=1),
}


def workload() -> Workload:
    cases = [Case("headrace", "benchmarks.straggler", (plan,)) for plan in PLANS]
    targets = {"async_vs_sync": "≥ 2", "async_vs_sync_lag1": "≥ 2", "actors_busy": "≥ 0.9", "roof_share": "≤ 1"}
    return Workload("straggler", "env steps/s", cases, ratios, targets)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    roof = (ACTORS - 1 + 1 / SLOWNESS) / STEP  # all actors step all the time, and a step takes no longer than its sleep
    return {
        "async_vs_sync": medians["async"] / medians["sync"],
        "async_vs_sync_lag1": medians["async"] / medians["sync_lag1"],
        "actors_busy": medians["async_busy"],
        "roof_share": medians["async"] / roof,
    }


@dataclass(frozen=True)
class Uneven(Env):
    """CartPole that sleeps in every step, in the last of the environments for longer."""

    inner: Env

    @property
    def spec(self) -> Spec:
        return self.inner.spec

    def make(self, indices: range) -> VectorEnv:
        return Sleeping(self.inner.make(indices), STEP * (SLOWNESS if ACTORS - 1 in indices else 1))


class Sleeping(VectorEnv):
    def __init__(self, inner: VectorEnv, seconds: float) -> None:
        self.num_envs, self.inner, self.seconds = inner.num_envs, inner, seconds

    def reset(self, seed):
        return self.inner.reset(seed)

    def step(self, action):
        time.sleep(self.seconds)
        return self.inner.step(action)

    def close(self):
        self.inner.close()


def main(name: str) -> None:
    torch.set_num_threads(1)
    env = Uneven(Gymnasium("CartPole-v1"))
    learner = Learner(IMPALA(), env.spec, seed=1)
    lag, began, before = 0, None, 0
    first = time.perf_counter()
    with closing(PLANS[name]().run(learner, env, Processes(), env_steps=sys.maxsize)) as reports:
        for update in reports:
            now = time.perf_counter()
            lag = max(lag, update.lag.max)
            if began is None and now - first > WARM_UP:
                began, before = now, update.env_steps
                update.crew.timeline()
            elif began is not None and now - began > SECONDS:
                busy = busy_share(update.crew.timeline())
                break
    settings = {
        "place": "Processes", "actors": ACTORS, "slowness": SLOWNESS, "step_ms": 1e3 * STEP, "num_steps": STEPS,
        "batch_rollouts": BATCH_ROLLOUTS, "max_lag": MAX_LAG, "measured_lag": lag,
    }  # fmt: skip
    report(name, (update.env_steps - before) / (now - began), version("headrace"), **settings)
    report(f"{name}_busy", busy, version("headrace"), **settings)


if __name__ == "__main__":
    main(sys.argv[1])
