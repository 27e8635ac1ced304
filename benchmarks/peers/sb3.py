"""Stable-Baselines3: PPO. Runs in Stable-Baselines3's own environment."""

import json
import sys
import time

import gymnasium
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecFrameStack

from benchmarks.report import report


def main(
    threads: str, *, env: str, num_envs: int, num_steps: int, num_epochs: int, minibatch_size: int, hidden: list[int],
    learning_rate: float, gamma: float, gae_lambda: float, clip: float, ent_coef: float, vf_coef: float,
    max_grad_norm: float, warm_up: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(int(threads))
    if images := "NoFrameskip" in env:
        import ale_py

        gymnasium.register_envs(ale_py)
        stepped = VecFrameStack(make_atari_env(env, num_envs, seed=seed), 4)
    else:
        stepped = make_vec_env(env, num_envs, seed=seed)  # one process: its fastest for cheap environments
    model = PPO(
        "CnnPolicy" if images else "MlpPolicy",  # the Nature CNN; two towers, tanh
        stepped,
        learning_rate=learning_rate,
        n_steps=num_steps,
        batch_size=minibatch_size,
        n_epochs=num_epochs,
        gamma=gamma,
        gae_lambda=gae_lambda,
        clip_range=clip,
        ent_coef=ent_coef,
        vf_coef=vf_coef,
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
        "sb3" if threads == "1" else f"sb3_threads{threads}", made / seconds, stable_baselines3.__version__,
        vectorised="DummyVecEnv", gymnasium=gymnasium.__version__, torch=torch.__version__, threads=int(threads),
        env_steps=made, mean_return=round(sum(returns) / len(returns), 1) if returns else None,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
