"""The founding toy over any two functions that put and take, the same for every system."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

SEED = 1
WARM_UP = 2_000

Put = Callable[[tuple[Any, ...]], object]
Take = Callable[[], tuple[Any, ...]]


class Actor:
    """Acts on a policy, a number: action = N(0, 1) + policy, rewarded between 2 and 3."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(SEED)

    def act(self, policy: float) -> tuple[int, float, float]:
        """(who, action, reward)"""
        action = self.generator.normal() + policy
        return 0, action, float(2 < action < 3)


def act(take: Take, put: Put) -> None:
    """Take a policy, put what it was worth, until told to stop."""
    actor = Actor()
    while True:
        done, policy = take()
        if done:
            break
        put(actor.act(policy))


def learn(put: Put, take: Take, steps: int, warm_up: int = WARM_UP) -> tuple[float, float]:
    """The policy after all steps, and the round trips a second without the warm-up."""
    policy, began = 0.0, 0.0
    for step in range(-warm_up, steps):
        if step == 0:
            began = time.perf_counter()
        put((False, policy))
        _, action, reward = take()
        policy += 0.01 * reward * (action - policy)
    speed = steps / (time.perf_counter() - began)
    put((True, policy))
    return policy, speed
