"""What the tests of the views share: a heading, and a moment whose fields a test sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from headrace.view.moment import Evaluation, Header, Machine, Moment, Queue, Stage

HEADER = Header(
    method="ppo",
    env="CartPole-v1",
    plan="sync-batches actors 2 num_envs 8",
    place="processes",
    device="cpu",
    preset="ppo/CartPole-v1",
    folder="runs/CartPole-v1__ppo__sync-batches__s1__20300102-030405",
    seed=1,
    total_timesteps=10_000_000,
    threshold=475.0,
)

MOMENT = Moment(
    seconds=751.0,
    interval=1.0,
    env_steps=2_611_200,
    updates=2_550,
    gradient_steps=40_800,
    samples_learned=10_444_800,
    total_timesteps=10_000_000,
    steps_per_second=3_477.0,
    return_mean100=213.4,
    best_return=241.0,
    episodes_finished=12_345,
    running_return=17.0,
    running_length=17.0,
    evaluation=Evaluation(228.0, 31.0, 10, 2_400_000),
    lag_p50=0.0,
    lag_p95=1.0,
    lag_max=1,
    dropped={},
    replay_ratio=4.0,
    stages=(
        Stage("driver", 0, 3.4, 0.97, 0.03, 0.0),
        Stage("collect", 0, 3.4, 0.5, 0.2, 0.3),
        Stage("collect", 1, 3.4, 0.7, 0.1, 0.2),
    ),
    queues=(Queue("rollouts[0]", 3.4, 1.0, 1), Queue("rollouts[1]", 3.4, 0.5, 1)),
    machine=Machine(1.8, 2, 812.4, 31.0),
    restarts=0,
    verdict=None,
)


@pytest.fixture
def header() -> Header:
    return HEADER


@pytest.fixture
def moment() -> Callable[..., Moment]:
    """moment(restarts=1): one with these fields, and plain values in the others."""

    def make(**fields: Any) -> Moment:
        return dataclasses.replace(MOMENT, **fields)

    return make
