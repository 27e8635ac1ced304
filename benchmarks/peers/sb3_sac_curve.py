"""Stable-Baselines3: the episodes of a training run of SAC. Runs in Stable-Baselines3's own environment."""

import json
import sys
from importlib.metadata import version

import gymnasium
import stable_baselines3
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger


def main(
    *, env: str, hidden: list[int], learning_rate: float, gamma: float, tau: float, buffer_size: int, batch_size: int,
    learning_starts: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    stepped = make_vec_env(env, 1, seed=seed)
    model = SAC(
        "MlpPolicy",  # relu
        stepped,
        learning_rate=learning_rate,
        buffer_size=buffer_size,
        learning_starts=learning_starts,
        batch_size=batch_size,
        tau=tau,
        gamma=gamma,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": hidden},
        seed=seed,
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    model.learn(env_steps, log_interval=None)
    (monitor,) = stepped.envs
    result = {
        "versions": {
            "stable-baselines3": stable_baselines3.__version__,
            "gymnasium": gymnasium.__version__,
            "mujoco": version("mujoco"),
            "torch": torch.__version__,
        },
        "returns": monitor.get_episode_rewards(),
        "lengths": monitor.get_episode_lengths(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
