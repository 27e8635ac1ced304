"""Log-probabilities that the actor asks for once a rollout are those of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headrace import PPO, Learner
from headrace.actor import Actor
from headrace.envs.toy import Identity, Target
from headrace.method import Method

STEPS = 7


@dataclass(frozen=True)
class Telling(PPO):
    """Gives the log-probabilities of every step by itself."""

    def act(self, net: Any, observation: Any, memory: Any, noise: Any) -> Any:
        decision = super().act(net, observation, memory, noise)
        assert decision.log_prob is None
        log_prob = net.distribution.log_prob(decision.logits, decision.action)
        return decision.replace(logits=None, log_prob=log_prob)


@dataclass(frozen=True)
class Forgetful(PPO):
    """Gives logits, and does not say what is to be done with them."""

    log_prob = Method.log_prob


@pytest.mark.parametrize("env", [Identity(), Target(dimensions=3, length=4)], ids=["discrete", "continuous"])
def test_a_rollout_s_log_probs_are_those_of_its_steps(env: Any) -> None:
    def made(method: PPO) -> Any:
        learner = Learner(method, env.spec, seed=1)
        with Actor(method, learner.acting, env, range(5), STEPS, (1,)) as actor:
            return [actor.rollout(number).clone() for number in range(2)]

    for one, other in zip(made(PPO(hidden=(8,))), made(Telling(hidden=(8,))), strict=True):
        assert one.log_prob.shape == (STEPS, 5)
        assert one.log_prob.std() > 0.001
        torch.testing.assert_close(one.log_prob, other.log_prob, rtol=1e-6, atol=1e-6)
        assert one.replace(log_prob=other.log_prob).equal(other)


def test_logits_without_a_log_prob_are_refused() -> None:
    env = Identity()
    method = Forgetful(hidden=(8,))
    learner = Learner(method, env.spec, seed=1)
    refused = pytest.raises(NotImplementedError, match=r"Forgetful\.act gives logits: write log_prob")
    with Actor(method, learner.acting, env, range(2), STEPS) as actor, refused:
        actor.rollout()
