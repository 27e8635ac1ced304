"""overlap: acting and learning that sleep for 100 ms each: what an update takes in lock-step, and at max_lag=1."""

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version

import torch

from benchmarks.harness import Case, Workload
from benchmarks.report import rate, report
from headrace import A2C, Env, Gymnasium, Learner, Processes, Spec, SyncBatches, VectorEnv

PART = 0.1  # seconds of sleep in a rollout, and in an update
STEPS = 10
UPDATES = 30
WARM_UP = 5


def workload() -> Workload:
    cases = [Case("headrace", "benchmarks.overlap", (max_lag,)) for max_lag in ("0", "1")]
    return Workload("overlap", "ms", cases, ratios, {"ms_per_update_lag0": "about 200", "ms_per_update_lag1": "≤ 130"})


def ratios(medians: dict[str, float]) -> dict[str, float]:
    return {f"ms_per_update_{name}": medians[name] for name in ("lag0", "lag1")}


@dataclass(frozen=True)
class SlowEnv(Env):
    """An environment whose rollouts take PART longer."""

    inner: Env

    @property
    def spec(self) -> Spec:
        return self.inner.spec

    def make(self, indices: range) -> VectorEnv:
        return SlowVector(self.inner.make(indices))


class SlowVector(VectorEnv):
    def __init__(self, inner):
        self.num_envs, self.inner = inner.num_envs, inner

    def reset(self, seed):
        return self.inner.reset(seed)

    def step(self, action):
        time.sleep(PART / STEPS)
        return self.inner.step(action)

    def close(self):
        self.inner.close()


@dataclass(frozen=True)
class SlowA2C(A2C):
    """A method whose updates take PART longer."""

    def prepare(self, net, rollout):
        time.sleep(PART)
        return super().prepare(net, rollout)


def main(max_lag: int) -> None:
    torch.set_num_threads(1)
    env = SlowEnv(Gymnasium("CartPole-v1"))
    learner = Learner(SlowA2C(), env.spec, seed=1)
    plan = SyncBatches(actors=1, num_envs=4, num_steps=STEPS, max_lag=max_lag)
    with closing(plan.run(learner, env, Processes(), env_steps=sys.maxsize)) as reports:
        speed = rate(lambda _: next(reports), UPDATES, WARM_UP)
    report(
        f"lag{max_lag}", 1e3 / speed, version("headrace"),
        place="Processes", actors=1, max_lag=max_lag, act_sleeps_ms=1e3 * PART, learn_sleeps_ms=1e3 * PART,
        updates=UPDATES,
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]))
