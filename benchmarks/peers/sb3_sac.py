"""Stable-Baselines3: SAC. Runs in Stable-Baselines3's own environment."""

import json
import sys
import time

import gymnasium
import stable_baselines3
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger

from benchmarks.report import report


def main(
    *, env: str, hidden: list[int], learning_rate: float, gamma: float, tau: float, buffer_size: int, batch_size: int,
    learning_starts: int, warm_up: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    model = SAC(
        "MlpPolicy",  # relu
        make_vec_env(env, 1, seed=seed),
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
    model.set_logger(Logger(None, []))  # or it would make a folder for every call of `learn`
    model.learn(warm_up, log_interval=None)
    before, began = model.num_timesteps, time.perf_counter()
    model.learn(env_steps, log_interval=None, reset_num_timesteps=False)
    made, seconds = model.num_timesteps - before, time.perf_counter() - began
    returns = [episode["r"] for episode in list(model.ep_info_buffer)[-5:]]
    report(
        "sb3", made / seconds, stable_baselines3.__version__,
        vectorised="DummyVecEnv", gymnasium=gymnasium.__version__, torch=torch.__version__, threads=1, env_steps=made,
        mean_return=round(sum(returns) / len(returns), 1) if returns else None,
    )  # fmt: skip


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
