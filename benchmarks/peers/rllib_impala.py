"""RLlib: IMPALA and APPO, on its new API stack, with two environment runners. Runs in RLlib's own environment."""

import json
import os
import sys
import tempfile
import time

from benchmarks.report import report

RUNNERS = 2


def main(
    folder: str, method: str, *, env: str, num_envs: int, num_steps: int, hidden: list[int], learning_rate: float,
    gamma: float, ent_coef: float, vf_coef: float, max_grad_norm: float, warm_up: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    import gymnasium
    import ray
    import torch
    from ray.rllib.algorithms.appo import APPOConfig
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    torch.set_num_threads(1)
    config = (
        {"IMPALA": IMPALAConfig, "APPO": APPOConfig}[method]()
        .environment(env)
        .env_runners(
            num_env_runners=RUNNERS, num_envs_per_env_runner=num_envs // RUNNERS, rollout_fragment_length=num_steps
        )
        .learners(num_learners=0)  # in the driver
        .training(
            lr=learning_rate,
            train_batch_size_per_learner=num_envs * num_steps,
            gamma=gamma,
            vf_loss_coeff=vf_coef,
            entropy_coeff=ent_coef,
            grad_clip=max_grad_norm,
            grad_clip_by="global_norm",
        )
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=hidden, fcnet_activation="tanh", vf_share_layers=False)
        )
        .reporting(min_time_s_per_iteration=1)
        .debugging(seed=seed, log_level="ERROR", log_sys_usage=False)
    )
    with ray.init(
        address="local", num_cpus=RUNNERS + 1, include_dashboard=False, log_to_driver=False,
        object_store_memory=200 * 2**20, _temp_dir=folder,
    ):  # fmt: skip
        algorithm = config.build_algo()

        def train_until(steps: int) -> dict:
            while True:
                result = algorithm.train()["env_runners"]
                if result.get("num_env_steps_sampled_lifetime", 0) >= steps:
                    return result

        before = train_until(warm_up)["num_env_steps_sampled_lifetime"]
        began = time.perf_counter()
        last = train_until(before + env_steps)
        seconds = time.perf_counter() - began
        algorithm.stop()
    made = int(last["num_env_steps_sampled_lifetime"] - before)
    report(
        f"rllib_{method.lower()}", made / seconds, ray.__version__,
        env_runners=RUNNERS, gymnasium=gymnasium.__version__, torch=torch.__version__, threads=1, env_steps=made,
        mean_return=round(float(last["episode_return_mean"]), 1),
    )  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="hr-rllib-", ignore_cleanup_errors=True) as folder:
        os.environ |= {"HOME": folder, "RAY_USAGE_STATS_ENABLED": "0"}  # results are written below the home folder
        main(folder, sys.argv[1], **json.loads(sys.argv[2]))
