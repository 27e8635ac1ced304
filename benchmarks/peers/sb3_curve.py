"""Stable-Baselines3: the episodes of a training run of PPO. Runs in Stable-Baselines3's own environment."""

import json
import sys
from importlib.metadata import version

import gymnasium
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecNormalize


def main(
    *, env: str, num_envs: int, num_steps: int, num_epochs: int, minibatch_size: int, hidden: list[int],
    learning_rate: float, gamma: float, gae_lambda: float, clip: float, ent_coef: float, vf_coef: float,
    max_grad_norm: float, env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    bare = make_vec_env(env, num_envs, seed=seed)
    model = PPO(
        "MlpPolicy",  # two towers, tanh
        VecNormalize(bare, clip_obs=10.0, clip_reward=10.0, gamma=gamma),
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
    model.set_logger(Logger(None, []))
    model.learn(env_steps, log_interval=None)
    (monitor,) = bare.envs  # one environment, below the normalisation: raw returns
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
