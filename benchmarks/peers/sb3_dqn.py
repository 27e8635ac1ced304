"""Stable-Baselines3: DQN. Runs in Stable-Baselines3's own environment."""

import json
import sys
import time

import gymnasium
import stable_baselines3
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger

from benchmarks.report import report


def main(
    *, env: str, hidden: list[int], learning_rate: float, gamma: float, buffer_size: int, batch_size: int,
    learning_starts: int, train_every: int, target_update_steps: int, max_grad_norm: float, eps: float, warm_up: int,
    env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    model = DQN(
        "MlpPolicy",
        make_vec_env(env, 1, seed=seed),
        learning_rate=learning_rate,
        buffer_size=buffer_size,
        learning_starts=learning_starts,
        batch_size=batch_size,
        gamma=gamma,
        train_freq=train_every,
        gradient_steps=1,
        target_update_interval=target_update_steps,
        exploration_initial_eps=eps,
        exploration_final_eps=eps,
        max_grad_norm=max_grad_norm,
        policy_kwargs={"net_arch": hidden},
        seed=seed,
        device="cpu",
    )
    model.set_logger(Logger(None, []))  # or it would make a folder for every call of `learn`
    model.learn(warm_up, log_interval=None)
    before, began = model.num_timesteps, time.perf_counter()
    model.learn(env_steps, log_interval=None, reset_num_timesteps=False)
    made, seconds = model.num_timesteps - before, time.perf_counter() - began
    returns = [episode["r"] for episode in model.ep_info_buffer]
    report(
        "sb3", made / seconds, stable_baselines3.__version__,
        vectorised="DummyVecEnv", gymnasium=gymnasium.__version__, torch=torch.__version__, threads=1, env_steps=made,
        mean_return=round(sum(returns) / len(returns), 1) if returns else None,
    )  # fmt: skip


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
