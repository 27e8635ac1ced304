"""Headrace: rollouts of one actor, beside its environments stepped without it, in turn."""

import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import gymnasium
import numpy as np
import torch

from benchmarks.report import report
from headrace import PPO, Actor, Gymnasium, Learner
from headrace.envs.atari import Atari

ENVIRONMENTS = {"cartpole": 64, "halfcheetah": 16, "pong": 8}
STEPS = {"cartpole": 128, "halfcheetah": 128, "pong": 64}  # of a rollout
TURNS = {"cartpole": 60, "halfcheetah": 8, "pong": 6}  # of each, one after the other
SEED = 1


def bare_cartpole(count: int) -> Callable[[], None]:
    """gymnasium's own vectorised CartPole."""
    vector = gymnasium.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point")
    vector.action_space.seed(SEED)
    vector.reset(seed=SEED)
    actions = [vector.action_space.sample() for _ in range(STEPS["cartpole"])]

    def turn() -> None:
        for action in actions:
            vector.step(action)

    return turn


def bare_halfcheetah(count: int) -> Callable[[], None]:
    """One environment after the other, each reset when its episode is over."""
    envs = [gymnasium.make("HalfCheetah-v5", disable_env_checker=True) for _ in range(count)]
    for env in envs:
        env.reset(seed=SEED)
        env.action_space.seed(SEED)
    actions = [[env.action_space.sample() for env in envs] for _ in range(STEPS["halfcheetah"])]

    def turn() -> None:
        for row in actions:
            for env, action in zip(envs, row, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

    return turn


def bare_pong(count: int) -> Callable[[], None]:
    """The vector of emulators, with the preprocessing that the actor's has."""
    env = Atari("Pong")
    vector = env.make(range(count))
    vector.reset(SEED)
    actions = np.random.default_rng(SEED).integers(0, env.spec.action.n, (STEPS["pong"], count))

    def turn() -> None:
        for action in actions:
            vector.step(action)

    return turn


def forward_pong(learner: Learner, count: int) -> Callable[[], None]:
    """The network's part in the choice of an action: features and logits of as many observations."""
    observations = torch.randint(0, 256, (STEPS["pong"], count, *learner.spec.observation.shape), dtype=torch.uint8)

    def turn() -> None:
        with torch.inference_mode():
            for observation in observations:
                learner.net.logits(learner.net.features(observation))

    return turn


def loop_pong(learner: Learner, count: int) -> Callable[[], None]:
    """Both in one loop, as anybody would write it: the network chooses nothing, but reads what the step showed."""
    env = Atari("Pong")
    vector = env.make(range(count))
    vector.reset(SEED)
    actions = np.random.default_rng(SEED).integers(0, env.spec.action.n, (STEPS["pong"], count))

    def turn() -> None:
        with torch.inference_mode():
            for action in actions:
                observation = torch.from_numpy(vector.step(action)[0])
                learner.net.logits(learner.net.features(observation))

    return turn


def seconds(turn: Callable[[], object]) -> float:
    began = time.perf_counter()
    turn()
    return time.perf_counter() - began


def main(task: str) -> None:
    torch.set_num_threads(1)
    count, steps = ENVIRONMENTS[task], STEPS[task]
    env = {"cartpole": Gymnasium("CartPole-v1"), "halfcheetah": Gymnasium("HalfCheetah-v5"), "pong": Atari("Pong")}[
        task
    ]
    bare = {"cartpole": bare_cartpole, "halfcheetah": bare_halfcheetah, "pong": bare_pong}[task](count)
    learner = Learner(PPO(), env.spec, seed=SEED)
    forward, loop = (forward_pong(learner, count), loop_pong(learner, count)) if task == "pong" else (None, None)
    with Actor(learner.method, learner.acting, env, range(count), steps, (SEED,)) as actor:
        times: dict[str, list[float]] = {"actor": [], "bare": [], "forward": [], "loop": []}
        for number in range(TURNS[task] + 2):
            found = {"actor": seconds(actor.rollout), "bare": seconds(bare)}
            if forward is not None and loop is not None:
                found |= {"forward": seconds(forward), "loop": seconds(loop)}
            if number >= 2:  # warm
                for name, value in found.items():
                    times[name].append(value)
    middle = {name: float(np.median(values)) for name, values in times.items() if values}
    settings = {"environments": count, "steps": steps, "turns": TURNS[task], "torch": torch.__version__, "threads": 1}
    ours = version("headrace")
    report(f"actor_{task}", count * steps / middle["actor"], ours, env=repr(env), **settings)
    report(f"bare_{task}", count * steps / middle["bare"], f"gymnasium {gymnasium.__version__}", **settings)
    if forward is not None:
        parts = middle["bare"] + middle["forward"]
        report(f"parts_{task}", count * steps / parts, ours, forward_ms=round(1e3 * middle["forward"], 1), **settings)
        report(f"loop_{task}", count * steps / middle["loop"], ours, **settings)


if __name__ == "__main__":
    main(sys.argv[1])
