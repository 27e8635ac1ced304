"""PPO on CartPole-v1: the same weights, bit for bit, on every placement.

    python examples/02_ppo.py --place inline|threads|processes --actors N --max-lag L --env-steps N --seed S

It prints the mean return as it learns, then that of 20 episodes played greedily (500 is the most there is), then the
SHA-256 of the weights.
"""

import argparse
import hashlib
from collections import deque

import numpy as np

from headrace import PPO, Gymnasium, Inline, Learner, Processes, SyncBatches, Threads, evaluate

PLACES = {"inline": Inline, "threads": Threads, "processes": Processes}


def fingerprint(net):
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())).hexdigest()


def main(place, actors, max_lag, env_steps, seed):
    env = Gymnasium("CartPole-v1")
    method = PPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, update_epochs=10, num_minibatches=2)
    plan = SyncBatches(actors=actors, num_envs=8, num_steps=64, max_lag=max_lag)
    learner = Learner(method, env.spec, seed=seed)
    returns = deque(maxlen=50)
    for report in plan.run(learner, env, PLACES[place](), env_steps=env_steps):
        returns.extend(report.episode_returns)
        if report.version % 20 == 0 or report.env_steps >= env_steps:
            print(f"{report.env_steps:9,} steps   mean return {np.mean(returns):5.1f}", flush=True)
    print(f"greedy: {evaluate(method, learner.net, env, episodes=20).mean():.1f}")
    print(f"weights: {fingerprint(learner.net)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", choices=PLACES, default="processes")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--max-lag", type=int, default=0)
    parser.add_argument("--env-steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    main(**vars(parser.parse_args()))
