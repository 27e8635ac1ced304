"""DQN learns: the median of its last five evaluations, of one seed."""

from __future__ import annotations

import statistics

import pytest

from headrace import DQN, Gymnasium, Inline, Learner, SyncReplay, evaluate

STEPS, EVERY = 100_000, 5_000


@pytest.mark.slow
def test_dqn_solves_cartpole() -> None:
    env = Gymnasium("CartPole-v1")
    method = DQN(
        learning_rate=2e-3,
        anneal_lr=True,
        gamma=0.98,
        n_step=3,
        double=True,
        tau=0.02,
        target_update_interval=1,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
    )
    learner = Learner(method, env.spec, seed=1)
    scores: list[float] = []
    plan = SyncReplay(num_envs=4, num_steps=4, ratio=16, batch_size=64)
    for report in plan.run(learner, env, Inline(), env_steps=STEPS):
        if report.env_steps >= EVERY * (len(scores) + 1):
            scores.append(float(evaluate(method, learner.acting, env, 10, seed=len(scores)).mean()))
    assert statistics.median(scores[-5:]) >= 475, scores
