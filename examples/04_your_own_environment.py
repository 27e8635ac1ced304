"""An environment of your own: a class written for gymnasium, which PPO learns to solve.

    python examples/04_your_own_environment.py --place inline|threads|processes

A probe falls from a random height; its motor is on or off. A soft landing is worth almost 1, each step costs 0.01.
"""

import argparse
from collections import deque

import gymnasium
import numpy as np

from headrace import PPO, Gymnasium, Inline, Learner, Processes, SyncBatches, Threads, evaluate


class Landing(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)  # height, speed
    action_space = gymnasium.spaces.Discrete(2)  # the motor: off, on

    def __init__(self, gravity=0.1):
        self.gravity = gravity

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # seeds self.np_random: the only source of chance
        self.height, self.speed, self.steps = self.np_random.uniform(5, 10), 0.0, 0
        return self.observe(), {}

    def step(self, action):
        self.speed += self.gravity if action == 1 else -self.gravity
        self.height += self.speed
        self.steps += 1
        landed = self.height <= 0  # the task has ended: nothing comes after this
        stopped = not landed and self.steps == 100  # we stop watching: it would have gone on
        return self.observe(), 1 - abs(self.speed) if landed else -0.01, landed, stopped, {}

    def observe(self):
        return np.array([self.height / 10, self.speed], np.float32)


def main(place, env_steps=30_000, seed=1):
    env = Gymnasium(Landing, gravity=0.1)  # the class and its arguments: every actor makes environments of its own
    learner = Learner(PPO(learning_rate=1e-3), env.spec, seed=seed)
    returns = deque(maxlen=100)
    for report in SyncBatches(num_steps=128).run(learner, env, place(), env_steps=env_steps):
        returns.extend(report.episode_returns)
        if report.version % 10 == 0:
            print(f"{report.env_steps:7,} steps   mean return {np.mean(returns):6.2f}", flush=True)
    print(f"greedy: {evaluate(learner.method, learner.net, env, episodes=20).mean():.2f}")


if __name__ == "__main__":
    places = {"inline": Inline, "threads": Threads, "processes": Processes}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", choices=places, default="processes")
    main(places[parser.parse_args().place])
