"""The founding toy: actors and a learner, joined by channels (take, put), unchanged on every placement.

    python examples/01_take_put.py --place inline|threads|processes --actors N

The learner sends each actor its policy, a number; the actor acts, `action = policy + N(0, 1)`, and is rewarded when
the action lies between 2 and 3; the learner moves the policy towards rewarded actions. It ends near 2.5, and prints
the same digits on every placement.
"""

import argparse
import time

import numpy as np

from headrace import Inline, Processes, Threads, role

STEPS = 10_000
PLACES = {"inline": Inline, "threads": Threads, "processes": Processes}


def act(policies, rewards):
    me = role()
    generator = np.random.default_rng(me.seed)
    while True:
        done, policy = policies[me.rank].take()
        if done:
            break
        action = generator.normal() + policy
        rewards[me.rank].put((me.rank, action, float(2 < action < 3)))


def learn(policies, rewards, policy=0.0):
    for step in range(0, STEPS, len(policies)):
        asked = min(len(policies), STEPS - step)
        for rank in range(asked):
            policies[rank].put((False, policy))
        for rank in range(asked):
            _, action, reward = rewards[rank].take()
            policy += 0.01 * reward * (action - policy)
        if step == 0:
            began = time.perf_counter()  # every actor is up
    speed = (STEPS - len(policies)) / (time.perf_counter() - began)
    for lane in policies:
        lane.put((True, policy))
    return policy, speed


def main(place, actors):
    with PLACES[place]().crew(seed=1) as crew:
        policies = crew.lanes(actors, like=(False, 0.0), name="policies")
        rewards = crew.lanes(actors, like=(0, 0.0, 0.0), name="rewards")
        crew.start(act, policies, rewards, copies=actors)
        policy, speed = learn(policies, rewards)
        crew.join()
    print(f"policy {policy!r}   {speed:,.0f} round trips/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", choices=PLACES, default="processes")
    parser.add_argument("--actors", type=int, default=1)
    main(**vars(parser.parse_args()))
