"""A learner and an actor on a device. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from headrace import A2C, PPO, Actor, Gymnasium, Learner, Method, evaluate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS = [PPO(), PPO(memory="gru"), A2C(), A2C(shared=True, ent_coef=0.01)]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_update_on_a_device_is_that_of_the_cpu(method: Method) -> None:
    env = Gymnasium("CartPole-v1")
    here, there = Learner(method, env.spec, seed=1), Learner(method, env.spec, devices=("cuda:0",), seed=1)
    with Actor(method, here.acting, env, range(8), 16) as actor:
        rollout = actor.rollout().clone()
    for learner in (here, there):
        learner.update(learner.prepare(rollout))
    assert next(there.net.parameters()).is_cuda
    for ours, theirs in zip(here.net.parameters(), there.net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.cpu(), atol=1e-4, rtol=1e-3)


def test_gradient_steps_never_wait_for_the_device() -> None:
    env = Gymnasium("CartPole-v1")
    learner = Learner(PPO(), env.spec, devices=("cuda:0",), seed=1)
    with Actor(learner.method, Learner(PPO(), env.spec, seed=1).acting, env, range(8), 16) as actor:
        batch = learner.prepare(actor.rollout())
    learner.update(batch)  # whatever is made once
    minibatch = next(iter(PPO().minibatches(batch, torch.Generator(), lambda vector, weight: vector)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for loss in learner.method.losses(learner.net, minibatch, 0):
            loss.total.backward()
            learner._step(loss.group, loss.max_grad_norm)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_actor_on_a_device_makes_rollouts_of_the_host() -> None:
    env = Gymnasium("CartPole-v1")
    learner = Learner(PPO(memory="gru"), env.spec, devices=("cuda:0",), seed=1)
    with Actor(learner.method, learner.acting, env, range(4), 8) as actor:
        rollout = actor.rollout()
    assert not any(leaf.is_cuda for leaf in rollout.leaves())
    assert rollout.valid.any()
    assert len(evaluate(learner.method, learner.net, env, episodes=2)) == 2
