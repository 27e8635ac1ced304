"""Headrace: DQN in one process, and what its parts cost alone."""

import json
import sys
import time
from collections import deque
from contextlib import closing
from importlib.metadata import version

import torch

from benchmarks.report import report
from headrace import DQN, Actor, Env, Gymnasium, Inline, Learner, Replay, SyncReplay


def main(
    *, env: str, hidden: list[int], learning_rate: float, gamma: float, buffer_size: int, batch_size: int,
    learning_starts: int, train_every: int, target_update_steps: int, max_grad_norm: float, eps: float, warm_up: int,
    env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    stepped = Gymnasium(env)
    method = DQN(
        learning_rate=learning_rate,
        gamma=gamma,
        hidden=tuple(hidden),
        target_update_interval=target_update_steps // train_every,
        max_grad_norm=max_grad_norm,
        exploration_initial_eps=eps,
        exploration_final_eps=eps,
    )
    plan = SyncReplay(
        num_envs=1,
        num_steps=train_every,
        ratio=batch_size / train_every,
        batch_size=batch_size,
        buffer_size=buffer_size,
        learning_starts=learning_starts,
    )
    learner = Learner(method, stepped.spec, seed=seed)
    returns: deque[float] = deque(maxlen=100)
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


def measure_roof(
    learner: Learner, plan: SyncReplay, env: Env, warm_up: int, env_steps: int, settings: dict[str, object]
) -> None:
    """An actor's rollout, what replay does and a learner's update, one after the other, without a plan between them."""
    acting = storing = learning = 0.0
    like = learner.example(plan.num_steps, 1)
    store = Replay(like, 1, plan.buffer_size, learner.method.sampling, env.spec, learner.seed)
    with Actor(learner.method, learner.acting, env, range(1), plan.num_steps, (learner.seed,)) as actor:
        for made in range(0, warm_up + env_steps, plan.num_steps):
            if made == warm_up:
                acting = storing = learning = 0.0
            began = time.perf_counter()
            rollout = actor.rollout()
            acted = time.perf_counter()
            learner.hear(rollout)
            store.add(0, rollout)
            if made >= plan.learning_starts:
                batch = store.sample(plan.batch_size)
                stored = time.perf_counter()
                learner.update(batch)
                learning += time.perf_counter() - stored
                storing += stored - acted
            acting += acted - began
    rounds = env_steps // plan.num_steps
    parts = {"act_us": acting, "store_us": storing, "learn_us": learning}
    told = {name: round(1e6 * seconds / rounds, 1) for name, seconds in parts.items()}
    report("roof", env_steps / (acting + storing + learning), version("headrace"), **told, **settings)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
