"""Whether methods learn: each task trained over several seeds, then played greedily with the last weights.

    python -m benchmarks.learning ppo-cartpole --seeds 101 110 --write

Tasks were tuned on seeds 1 to 5. Seeds 101 to 110 were run once; what came of them is in `benchmarks/learned/`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gymnasium.wrappers import FlattenObservation
from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper

from benchmarks.tasks import LENGTH, HighestAllowed, Ladder, Scales, Sign, Thermostat, WithoutVelocities
from headrace import A2C, PPO, Env, Gymnasium, Inline, Learner, Method, SyncBatches, evaluate
from headrace.envs.toy import Recall

LEARNED = Path(__file__).parent / "learned"


@dataclass(frozen=True)
class Task:
    """What is trained, for how long, and what the mean return of so many fresh episodes must be."""

    method: Method
    env: Env
    plan: SyncBatches
    env_steps: int
    threshold: float
    episodes: int = 50


CARTPOLE = Gymnasium("CartPole-v1")
RECALL = Recall(length=6)  # a cue at the first step has to be named at the last: without memory 0.5 is the best
RECALL_PLAN = SyncBatches(num_envs=16, num_steps=12)

HIDDEN = Gymnasium("CartPole-v1", wrappers=[WithoutVelocities])
SEEING = PPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.9, normalize_observation=True, normalize_reward=True)
SMALL = PPO(learning_rate=1e-3, update_epochs=10, num_minibatches=4)
SMALL_PLAN = SyncBatches(num_envs=8, num_steps=64)

TASKS: Mapping[str, Task] = {
    "ppo-cartpole": Task(
        PPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, update_epochs=8, num_minibatches=4),
        CARTPOLE,
        SyncBatches(num_envs=16, num_steps=64, max_lag=1),
        env_steps=100_000,
        threshold=490,
    ),
    "a2c-cartpole": Task(
        A2C(learning_rate=3e-3, gamma=0.98, gae_lambda=0.9),
        CARTPOLE,
        SyncBatches(num_envs=8, num_steps=8),
        env_steps=200_000,
        threshold=475,
    ),
    "a2c-recall-gru": Task(
        A2C(learning_rate=3e-3, ent_coef=0.01, memory="gru"), RECALL, RECALL_PLAN, env_steps=100_000, threshold=0.95
    ),
    "a2c-recall-forward": Task(
        A2C(learning_rate=3e-3, ent_coef=0.01), RECALL, RECALL_PLAN, env_steps=100_000, threshold=0.0
    ),
    "ppo-acrobot": Task(
        PPO(learning_rate=1e-3, gae_lambda=0.94, num_minibatches=8, ent_coef=0.01, normalize_observation=True),
        Gymnasium("Acrobot-v1"),
        SyncBatches(num_envs=16, num_steps=256),
        env_steps=300_000,
        threshold=-90,
    ),
    "ppo-pendulum": Task(
        PPO(
            learning_rate=1e-3,
            gamma=0.95,
            update_epochs=10,
            num_minibatches=32,
            normalize_observation=True,
            normalize_reward=True,
        ),
        Gymnasium("Pendulum-v1"),
        SyncBatches(num_envs=16, num_steps=256),
        env_steps=300_000,
        threshold=-200,
        episodes=100,
    ),
    "ppo-thermostat": Task(
        replace(SMALL, gamma=0.5), Gymnasium(Thermostat), SMALL_PLAN, env_steps=100_000, threshold=0.95 * LENGTH
    ),
    "ppo-sign": Task(SMALL, Gymnasium(Sign), SMALL_PLAN, env_steps=20_000, threshold=LENGTH),
    "ppo-highest-allowed": Task(SMALL, Gymnasium(HighestAllowed), SMALL_PLAN, env_steps=40_000, threshold=LENGTH),
    "ppo-scales": Task(SMALL, Gymnasium(Scales), SMALL_PLAN, env_steps=100_000, threshold=0.98 * LENGTH),
    "ppo-ladder": Task(SMALL, Gymnasium(Ladder), SMALL_PLAN, env_steps=40_000, threshold=Ladder.BEST),
    "ppo-hidden-gru": Task(
        replace(SEEING, memory="gru"), HIDDEN, SyncBatches(num_envs=16, num_steps=64), env_steps=60_000, threshold=450
    ),
    "ppo-hidden-forward": Task(
        SEEING, HIDDEN, SyncBatches(num_envs=16, num_steps=64), env_steps=200_000, threshold=0.0
    ),
    "ppo-minigrid": Task(
        PPO(learning_rate=1e-3, ent_coef=0.01, num_minibatches=8),
        Gymnasium("MiniGrid-Empty-5x5-v0", wrappers=[OneHotPartialObsWrapper, ImgObsWrapper, FlattenObservation]),
        SyncBatches(num_envs=8, num_steps=128),
        env_steps=100_000,
        threshold=0.95,
    ),
}


def train(task: Task, seed: int) -> dict[str, Any]:
    """Train and evaluate once, on Inline: every placement gives the same weights."""
    began = time.perf_counter()
    learner = Learner(task.method, task.env.spec, seed=seed)
    for report in task.plan.run(learner, task.env, Inline(), env_steps=task.env_steps):  # noqa: B007
        pass
    returns = evaluate(learner.method, learner.acting, task.env, task.episodes, seed)
    return {
        "seed": seed,
        "score": round(float(returns.mean()), 3),
        "env_steps": report.env_steps,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 5), metavar=("FIRST", "LAST"))
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/learned/TASK.json")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    results = []
    for seed in range(arguments.seeds[0], arguments.seeds[1] + 1):
        results.append(train(task, seed))
        print(json.dumps(results[-1]), flush=True)
    passed = sum(result["score"] >= task.threshold for result in results)
    print(f"{arguments.task}: {passed} of {len(results)} reach {task.threshold}")
    if arguments.write:
        LEARNED.mkdir(exist_ok=True)
        data = {"task": arguments.task, "setting": repr(task), "results": results}
        (LEARNED / f"{arguments.task}.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
