"""RLlib: PPO, on its new API stack. Runs in RLlib's own environment.

env_runners: actors that step the environments, in equal shares; with 0 of them the learner's process does.
"""

import json
import os
import sys
import tempfile
import time

from benchmarks.report import report


def main(
    folder: str, env_runners: int, *, env: str, num_envs: int, num_steps: int, num_epochs: int, minibatch_size: int,
    hidden: list[int], learning_rate: float, gamma: float, gae_lambda: float, clip: float, ent_coef: float,
    vf_coef: float, max_grad_norm: float, warm_up: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    import gymnasium
    import ray
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    torch.set_num_threads(1)
    config = (
        PPOConfig()
        .environment(env)
        .env_runners(num_env_runners=env_runners, num_envs_per_env_runner=num_envs // max(1, env_runners))
        .learners(num_learners=0)  # in the driver
        .training(
            lr=learning_rate,
            train_batch_size_per_learner=num_envs * num_steps,
            minibatch_size=minibatch_size,
            num_epochs=num_epochs,
            gamma=gamma,
            lambda_=gae_lambda,
            clip_param=clip,
            vf_clip_param=float("inf"),  # no clipping of values
            vf_loss_coeff=vf_coef,
            entropy_coeff=ent_coef,
            use_kl_loss=False,
            grad_clip=max_grad_norm,
            grad_clip_by="global_norm",
        )
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=hidden, fcnet_activation="tanh", vf_share_layers=False)
        )
        .debugging(seed=seed, log_level="ERROR", log_sys_usage=False)
    )
    with ray.init(
        address="local", num_cpus=env_runners + 1, include_dashboard=False, log_to_driver=False,
        object_store_memory=100 * 2**20, _temp_dir=folder,
    ):  # fmt: skip
        algorithm = config.build_algo()

        def train_until(steps: int) -> dict:
            while True:
                result = algorithm.train()["env_runners"]
                if result["num_env_steps_sampled_lifetime"] >= steps:
                    return result

        before = train_until(warm_up)["num_env_steps_sampled_lifetime"]
        began = time.perf_counter()
        last = train_until(before + env_steps)
        seconds = time.perf_counter() - began
        algorithm.stop()
    made = int(last["num_env_steps_sampled_lifetime"] - before)
    report(
        f"rllib_{env_runners}", made / seconds, ray.__version__,
        env_runners=env_runners, vectorised="sync", gymnasium=gymnasium.__version__, torch=torch.__version__,
        threads=1, env_steps=made, mean_return=round(float(last["episode_return_mean"]), 1),
    )  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="hr-rllib-", ignore_cleanup_errors=True) as folder:
        os.environ |= {"HOME": folder, "RAY_USAGE_STATS_ENABLED": "0"}  # results are written below the home folder
        main(folder, int(sys.argv[1]), **json.loads(sys.argv[2]))
