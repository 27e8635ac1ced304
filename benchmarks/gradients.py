"""gradients: all-reduce between two processes, DD-PPO on two cores, A3C, and rollouts that are cut off, a second."""

import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise

import torch

from benchmarks.harness import Case, Workload
from benchmarks.peers import python_with
from benchmarks.reductions import COUNTS, ELEMENTS
from benchmarks.report import rate, report
from headrace import A2C, PPO, Env, Gymnasium, Learner, Processes, Spec, VectorEnv, role
from headrace.plans.async_gradients import AsyncGradients
from headrace.plans.sync_gradients import SyncGradients

STEP = 100e-6  # seconds that an environment step computes
CARTPOLE = Gymnasium("CartPole-v1")
SLEEP = 0.002  # seconds that a step of a sleeping environment takes
SLOW = 5.0


def workload() -> Workload:
    sizes = list(ELEMENTS)
    cases = [Case("headrace", "benchmarks.gradients", ("reduce", size)) for size in sizes]
    cases += [Case("gloo", "benchmarks.peers.gloo", (size,)) for size in sizes]
    cases += [Case("headrace", "benchmarks.gradients", ("ddppo", workers)) for workers in ("1", "2")]
    cases += [Case("headrace", "benchmarks.gradients", ("a3c",))]
    if python := python_with("rllib"):
        cases += [Case("ray", "benchmarks.peers.ray_a3c", python=python)]
    cases += [Case("headrace", "benchmarks.gradients", ("cut", kind)) for kind in ("equal", "slow", "cut")]
    targets = {
        "vs_gloo_6.75mb": "≥ 2",
        "vs_gloo_40kb": "≥ 5",
        "ddppo_two_workers_vs_one": "≥ 1.6",
        "a3c_vs_ray": "≥ 10",
        "cut_update_vs_equal": "≤ 1.5",
        "slow_update_vs_equal": "about 5",
    }
    return Workload("gradients", "1/s", cases, ratios, targets)


def ratios(medians: dict[str, float]) -> dict[str, float]:
    found = {f"vs_gloo_{size}": medians[f"reduce_{size}"] / medians[f"gloo_{size}"] for size in ELEMENTS}
    found["ddppo_two_workers_vs_one"] = medians["ddppo_2"] / medians["ddppo_1"]
    if "ray_a3c" in medians:
        found["a3c_vs_ray"] = medians["a3c"] / medians["ray_a3c"]
    for kind in ("cut", "slow"):
        found[f"{kind}_update_vs_equal"] = medians["updates_equal"] / medians[f"updates_{kind}"]
    return found


# All-reduce


def average(group, size, speeds):
    vector = torch.ones(ELEMENTS[size])

    def step(_):
        group.mean(vector, out=vector)

    speed = rate(step, COUNTS[size], COUNTS[size] // 5)
    if group.rank == 0:
        speeds.put(speed)


def reduce(size: str) -> None:
    with Processes().crew() as crew:
        group, speeds = crew.group(2, like=torch.zeros(ELEMENTS[size])), crew.channel()
        crew.start(average, group, size, speeds, copies=2)
        speed = speeds.take(120.0)
        crew.join(timeout=60)
    report(f"reduce_{size}", speed, version("headrace"), bytes=4 * ELEMENTS[size], processes=2, times=COUNTS[size])


# Environments that take their time


@dataclass(frozen=True)
class Lasting(Env):
    """CartPole of which every step lasts `seconds`, computing or asleep; in the worker of rank 0, times `slower`."""

    seconds: float
    sleeps: bool = False
    slower: float = 1.0

    @property
    def spec(self) -> Spec:
        return CARTPOLE.spec

    def make(self, indices: range) -> VectorEnv:
        return LastingVector(CARTPOLE.make(indices), self, self.slower if 0 in indices else 1.0)


class LastingVector(VectorEnv):
    def __init__(self, inner, env, slower):
        self.num_envs, self.inner, self.env = inner.num_envs, inner, env
        self.seconds = env.seconds * slower * (1 if env.sleeps else inner.num_envs)

    def reset(self, seed):
        return self.inner.reset(seed)

    def step(self, action):
        if self.env.sleeps:
            role().sleep(self.seconds)
        else:
            until = time.perf_counter() + self.seconds
            while time.perf_counter() < until:
                pass
        return self.inner.step(action)

    def close(self):
        self.inner.close()


def ddppo(workers: int) -> None:
    env, updates, warm_up = Lasting(STEP), 12, 3
    learner = Learner(PPO(learning_rate=1e-3), env.spec, seed=1)
    plan = SyncGradients(workers, num_envs=16, num_steps=128)
    with closing(plan.run(learner, env, Processes(), env_steps=sys.maxsize)) as reports:
        speed = rate(lambda _: next(reports), updates, warm_up) * 16 * 128
    report(
        f"ddppo_{workers}", speed, version("headrace"),
        workers=workers, num_envs=16, num_steps=128, step_us=1e6 * STEP, updates=updates,
    )  # fmt: skip


def a3c() -> None:
    learner = Learner(A2C(), CARTPOLE.spec, seed=1)
    plan = AsyncGradients(workers=2, num_envs=2, num_steps=5)
    with closing(plan.run(learner, CARTPOLE, Processes(), env_steps=sys.maxsize)) as reports:
        speed = rate(lambda _: next(reports), 1500, 200)
    report("a3c", speed, version("headrace"), workers=2, num_envs=2, num_steps=5, gradients=1500)


def cut(kind: str) -> None:
    env = Lasting(SLEEP, sleeps=True, slower=1.0 if kind == "equal" else SLOW)
    learner = Learner(A2C(), env.spec, seed=1)
    plan = SyncGradients(4, num_envs=4, num_steps=64, cut_off=0.6 if kind == "cut" else None)
    times = []
    with closing(plan.run(learner, env, Processes(), env_steps=sys.maxsize)) as reports:
        for _ in reports:
            times.append(time.perf_counter())
            if len(times) == 16:
                break
    seconds = [after - before for before, after in pairwise(times)]
    report(
        f"updates_{kind}", 1 / statistics.median(seconds), version("headrace"),
        workers=4, num_steps=64, sleep_ms=1e3 * SLEEP, slower=env.slower, cut_off=plan.cut_off,
    )  # fmt: skip


def main(what: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if what == "reduce":
        reduce(*arguments)
    elif what == "ddppo":
        ddppo(int(*arguments))
    elif what == "a3c":
        a3c()
    else:
        cut(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
