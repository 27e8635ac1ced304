"""Headrace: PPO in one process, as two processes that overlap, and what its parts cost alone."""

import json
import os
import sys
import time
from collections import deque
from contextlib import closing
from importlib.metadata import version

import torch

from benchmarks.report import report
from headrace import PPO, Actor, Env, Gymnasium, Inline, Learner, Processes, SyncBatches
from headrace.envs.atari import Atari

# where, max_lag, the learner's threads
PLACES = {
    "inline": (Inline, 0, 1),
    "lag1": (Processes, 1, 1),
    "lag1_threads2": (Processes, 1, 2),
    "threads2": (Inline, 0, 2),
    "roof": (Inline, 0, 1),
}


def main(
    how: str, *, env: str, num_envs: int, num_steps: int, num_epochs: int, minibatch_size: int, hidden: list[int],
    learning_rate: float, gamma: float, gae_lambda: float, clip: float, ent_coef: float, vf_coef: float,
    max_grad_norm: float, warm_up: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    # With a life's end as an episode's, and clipped rewards, as Stable-Baselines3's wrapper has them.
    stepped = Atari(env, episodic_life=True, reward_clipping=True) if "NoFrameskip" in env else Gymnasium(env)
    method = PPO(
        learning_rate=learning_rate,
        anneal_lr=False,
        gamma=gamma,
        gae_lambda=gae_lambda,
        ent_coef=ent_coef,
        vf_coef=vf_coef,
        max_grad_norm=max_grad_norm,
        hidden=tuple(hidden),
        update_epochs=num_epochs,
        num_minibatches=num_envs * num_steps // minibatch_size,
        clip_range=clip,
    )
    place, max_lag, threads = PLACES[how]
    learner = Learner(method, stepped.spec, seed=seed, threads=threads)
    plan = SyncBatches(actors=1, num_envs=num_envs, num_steps=num_steps, max_lag=max_lag)
    if how == "roof":
        updates = tuple(count // (num_envs * num_steps) for count in (warm_up, env_steps))
        measure_roof(learner, Learner(method, stepped.spec, seed=seed), plan, stepped, *updates)
        return
    returns: deque[float] = deque(maxlen=100)
    began = before = None
    with closing(plan.run(learner, stepped, place(), env_steps=warm_up + env_steps)) as reports:
        for update in reports:
            now = time.perf_counter()
            if began is None and update.env_steps >= warm_up:
                began, before = now, update.env_steps
            returns.extend(update.episode_returns.tolist())
    made, seconds = update.env_steps - before, now - began
    report(
        "headrace" if how == "inline" else f"headrace_{how}", made / seconds, version("headrace"),
        place=place.__name__, max_lag=max_lag, actors=1, env=repr(stepped),
        gymnasium=version("gymnasium"), torch=torch.__version__, threads=threads,
        env_steps=made, mean_return=round(sum(returns) / len(returns), 1) if returns else None,
    )  # fmt: skip


def measure_roof(whole: Learner, parts: Learner, plan: SyncBatches, env: Env, warm_up: int, updates: int) -> None:
    """An update of the plan, an actor's rollout alone and a learner's update alone, in turn.

    The roof is the work of both parts, divided by the cores without a remainder and without a wait.
    """
    planned = acting = learning = 0.0
    with (
        closing(plan.run(whole, env, Inline(), env_steps=sys.maxsize)) as reports,
        Actor(parts.method, parts.acting, env, range(plan.num_envs), plan.num_steps, (parts.seed,)) as actor,
    ):
        for number in range(warm_up + updates):
            if number == warm_up:
                planned = acting = learning = 0.0
                before = whole.env_steps, parts.env_steps
            began = time.perf_counter()
            next(reports)
            reported = time.perf_counter()
            rollout = actor.rollout()
            acted = time.perf_counter()
            parts.update(parts.prepare(rollout))
            learned = time.perf_counter()
            planned += reported - began
            acting += acted - reported
            learning += learned - acted
        made = [learner.env_steps - count for learner, count in zip((whole, parts), before, strict=True)]
    cores = min(2, len(os.sched_getaffinity(0)))  # of an actor and a learner
    settings = {
        "torch": torch.__version__, "threads": 1, "updates": updates,
        "act_ms": round(1e3 * acting / updates, 2), "learn_ms": round(1e3 * learning / updates, 2),
    }  # fmt: skip
    report("headrace_beside_roof", made[0] / planned, version("headrace"), **settings)
    report("roof", made[1] / (acting + learning), version("headrace"), of_cores=1, **settings)
    report("roof_cores", cores * made[1] / (acting + learning), version("headrace"), of_cores=cores, **settings)


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
