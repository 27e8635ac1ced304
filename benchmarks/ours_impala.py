"""Headrace: IMPALA and APPO, whose actors and learner do not wait for each other, as processes."""

import json
import sys
import time
from collections import deque
from contextlib import closing
from importlib.metadata import version

import torch

from benchmarks.ours_ppo import measure_roof
from benchmarks.report import report
from headrace import APPO, IMPALA, AsyncBatches, Gymnasium, Learner, Processes, SyncBatches
from headrace.channel import Interval

METHODS = {"impala": IMPALA, "appo": APPO}


def main(
    how: str, *, env: str, num_envs: int, num_steps: int, hidden: list[int], learning_rate: float, gamma: float,
    ent_coef: float, vf_coef: float, max_grad_norm: float, warm_up: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    stepped = Gymnasium(env)
    settings = {
        "learning_rate": learning_rate, "anneal_lr": False, "gamma": gamma, "ent_coef": ent_coef, "vf_coef": vf_coef,
        "max_grad_norm": max_grad_norm, "hidden": tuple(hidden),
    }  # fmt: skip
    name, _, actors = ("impala_1" if how == "roof" else how).partition("_")
    once = {"update_epochs": 1, "num_minibatches": 1} if name == "appo" else {}
    method = METHODS[name](**settings, **once)
    learner = Learner(method, stepped.spec, seed=seed)
    if how == "roof":
        updates = (count // (num_envs * num_steps) for count in (warm_up, env_steps))
        plan = SyncBatches(num_envs=num_envs, num_steps=num_steps)
        measure_roof(learner, Learner(method, stepped.spec, seed=seed), plan, stepped, *updates)
        return
    count = int(actors)
    plan = AsyncBatches(actors=count, num_envs=num_envs, num_steps=num_steps, batch_rollouts=count, max_lag=4)
    returns: deque[float] = deque(maxlen=100)
    lag, began, before = 0, None, None
    with closing(plan.run(learner, stepped, Processes(), env_steps=warm_up + env_steps)) as reports:
        for update in reports:
            now = time.perf_counter()
            if began is None and update.env_steps >= warm_up:
                began, before = now, update.env_steps
                update.crew.timeline()
            returns.extend(update.episode_returns.tolist())
            lag = max(lag, update.lag.max)
            if update.env_steps >= warm_up + env_steps:
                busy = busy_share(update.crew.timeline())
    made, seconds = update.env_steps - before, now - began
    report(
        how, made / seconds, version("headrace"),
        place="Processes", actors=count, batch_rollouts=count, max_lag=4, measured_lag=lag,
        actors_busy=round(busy, 3),
        gymnasium=version("gymnasium"), torch=torch.__version__, threads=1,
        env_steps=made, mean_return=round(sum(returns) / len(returns), 1),
    )  # fmt: skip


def busy_share(interval: Interval) -> float:
    """The mean share of the time in which the actors did not wait."""
    shares = [
        each.busy / (each.busy + each.starved + each.blocked)
        for each in interval.activities
        if each.kind == "role" and each.name.startswith("collect")
    ]
    return sum(shares) / len(shares)


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
