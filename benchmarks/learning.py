"""Whether methods learn: each task trained over several seeds, then played greedily with the last weights.

    python -m benchmarks.learning ppo-cartpole --seeds 101 110 --write

Tasks were tuned on seeds 1 to 5. Seeds 101 to 110 were run once; what came of them is in `benchmarks/learned/`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gymnasium.wrappers import FlattenObservation
from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper

from benchmarks.tasks import LENGTH, HighestAllowed, Ladder, Scales, Sign, Thermostat, WithoutVelocities
from headrace import (
    A2C,
    APPO,
    DQN,
    IMPALA,
    PPO,
    SAC,
    TD3,
    AsyncBatches,
    AsyncGradients,
    Env,
    Gymnasium,
    Inline,
    Learner,
    Method,
    Processes,
    SyncBatches,
    SyncGradients,
    SyncReplay,
    Threads,
    evaluate,
)
from headrace.channel import Placement
from headrace.envs.toy import Recall
from headrace.plan import Plan

LAST = 20
LEARNED = Path(__file__).parent / "learned"


@dataclass(frozen=True)
class Task:
    """What is trained, for how long, and what the mean return of so many fresh episodes must be."""

    method: Method
    env: Env
    plan: Plan
    env_steps: int
    threshold: float
    episodes: int = 50
    evaluations: int = field(default=1, repr=False)
    """Of so many, a twentieth of the run apart, the median counts; the last one is of the last weights."""
    place: Placement = field(default_factory=Inline, repr=False)
    """A synchronous plan gives the same weights on all; what an asynchronous one gives depends on time."""


CARTPOLE = Gymnasium("CartPole-v1")
RECALL = Recall(length=6)  # a cue at the first step has to be named at the last: without memory 0.5 is the best
RECALL_PLAN = SyncBatches(num_envs=16, num_steps=12)

HIDDEN = Gymnasium("CartPole-v1", wrappers=[WithoutVelocities])
SEEING = PPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.9, normalize_observation=True, normalize_reward=True)
SMALL = PPO(learning_rate=1e-3, update_epochs=10, num_minibatches=4)
SMALL_PLAN = SyncBatches(num_envs=8, num_steps=64)

CARTPOLE_REPLAY = SyncReplay(num_envs=4, num_steps=4, ratio=16, batch_size=64)
PENDULUM_REPLAY = SyncReplay(
    num_envs=4, num_steps=2, ratio=128, batch_size=256, learning_starts=500, buffer_size=20_000
)

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
    **{
        f"impala-cartpole-{name}": Task(
            IMPALA(learning_rate=2e-3, gamma=0.98, gae_lambda=0.9, max_grad_norm=0.5),
            CARTPOLE,
            AsyncBatches(actors=2, num_envs=16, num_steps=8, batch_rollouts=2, max_lag=2),
            env_steps=300_000,
            threshold=475,
            place=place,
        )
        for name, place in (("threads", Threads()), ("processes", Processes()))
    },
    **{
        f"appo-cartpole-{name}": Task(
            APPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, update_epochs=10, num_minibatches=2),
            CARTPOLE,
            AsyncBatches(actors=2, num_envs=8, num_steps=64, batch_rollouts=2, max_lag=2),
            env_steps=150_000,
            threshold=490,
            place=place,
        )
        for name, place in (("threads", Threads()), ("processes", Processes()))
    },
    "ppo-sync-gradients-cartpole": Task(
        PPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, update_epochs=8, num_minibatches=4),
        CARTPOLE,
        SyncGradients(workers=2, num_envs=16, num_steps=64),
        env_steps=150_000,
        threshold=490,
        place=Processes(),
    ),
    "a2c-async-gradients-2-cartpole": Task(
        A2C(learning_rate=3e-3, gamma=0.98, gae_lambda=0.9),
        CARTPOLE,
        AsyncGradients(workers=2, num_envs=16, num_steps=8),
        env_steps=300_000,
        threshold=475,
        place=Processes(),
    ),
    "a2c-async-gradients-4-cartpole": Task(
        A2C(learning_rate=2e-3, gamma=0.98, gae_lambda=0.9),
        CARTPOLE,
        AsyncGradients(workers=4, num_envs=32, num_steps=8, max_lag=1),
        env_steps=300_000,
        threshold=475,
        place=Processes(),
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

UNSCORED: Mapping[str, Task] = {
    "dqn-cartpole": Task(
        DQN(
            learning_rate=2e-3,
            anneal_lr=True,
            gamma=0.98,
            n_step=3,
            double=True,
            tau=0.02,
            target_update_interval=1,
            exploration_fraction=0.16,
            exploration_final_eps=0.04,
        ),
        CARTPOLE,
        CARTPOLE_REPLAY,
        env_steps=100_000,
        threshold=475,
        evaluations=5,
    ),
    "sac-cartpole": Task(
        SAC(learning_rate=2e-3, anneal_lr=True, tau=0.02, n_step=10, ent_coef=0.02, reward_scale=0.1, hidden=(256,)),
        CARTPOLE,
        SyncReplay(num_envs=4, num_steps=4, ratio=64, batch_size=256, buffer_size=15_000),
        env_steps=50_000,
        threshold=450,
    ),
    "sac-pendulum": Task(
        SAC(learning_rate=2e-3, gamma=0.98, tau=0.02, hidden=(64, 64)),
        Gymnasium("Pendulum-v1"),
        PENDULUM_REPLAY,
        env_steps=20_000,
        threshold=-190,
    ),
    "td3-pendulum": Task(
        TD3(learning_rate=2e-3, gamma=0.98, tau=0.02, hidden=(64, 64)),
        Gymnasium("Pendulum-v1"),
        PENDULUM_REPLAY,
        env_steps=20_000,
        threshold=-190,
    ),
}
"""Tasks that seeds 101 to 110 have not been run of."""


def train(task: Task, seed: int) -> dict[str, Any]:
    """Train and evaluate once; with `evaluations`, the score is the median of so many."""
    began = time.perf_counter()
    learner = Learner(task.method, task.env.spec, seed=seed)
    scores: list[float] = []
    first = LAST - task.evaluations + 1  # twentieths of the run after which it is played
    for report in task.plan.run(learner, task.env, task.place, env_steps=task.env_steps):
        if report.env_steps * LAST >= task.env_steps * (first + len(scores)) and len(scores) < task.evaluations - 1:
            scores.append(play(task, learner, seed))
    scores.append(play(task, learner, seed))
    return {
        "seed": seed,
        "score": round(statistics.median(scores), 3),
        "env_steps": report.env_steps,
        "seconds": round(time.perf_counter() - began, 1),
    }


def play(task: Task, learner: Learner, seed: int) -> float:
    """The mean return of greedy episodes."""
    return float(evaluate(learner.method, learner.acting, task.env, task.episodes, seed).mean())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=[*TASKS, *UNSCORED])
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 5), metavar=("FIRST", "LAST"))
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/learned/TASK.json")
    arguments = parser.parse_args()
    task = {**TASKS, **UNSCORED}[arguments.task]
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
