"""RLlib: SAC, on its new API stack, stepping the environment in the learner's process. Runs in RLlib's environment."""

import json
import os
import sys
import tempfile
import time

from benchmarks.report import report


def main(
    folder: str, *, env: str, hidden: list[int], learning_rate: float, gamma: float, tau: float, buffer_size: int,
    batch_size: int, learning_starts: int, warm_up: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    import gymnasium
    import ray
    import torch
    from ray.rllib.algorithms.sac import SACConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    torch.set_num_threads(1)
    layers = {"fcnet_hiddens": hidden, "fcnet_activation": "relu"}
    heads = {"head_fcnet_hiddens": [], "head_fcnet_activation": None}
    config = (
        SACConfig()
        .environment(env)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=1, rollout_fragment_length=1)
        .learners(num_learners=0)  # in the driver
        .training(
            actor_lr=learning_rate,
            critic_lr=learning_rate,
            alpha_lr=learning_rate,
            gamma=gamma,
            tau=tau,
            twin_q=True,
            n_step=1,
            target_entropy="auto",
            train_batch_size_per_learner=batch_size,
            training_intensity=batch_size,  # samples learned for each environment step
            num_steps_sampled_before_learning_starts=learning_starts,
            replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": buffer_size},  # uniform
        )
        .reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
        .rl_module(model_config=DefaultModelConfig(**layers, **heads))
        .debugging(seed=seed, log_level="ERROR", log_sys_usage=False)
    )
    with ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20,
        _temp_dir=folder,
    ):  # fmt: skip
        algorithm = config.build_algo()

        def train_until(steps: int) -> tuple[int, float | None]:
            while True:
                result = algorithm.train()["env_runners"]
                if result["num_env_steps_sampled_lifetime"] >= steps:
                    return int(result["num_env_steps_sampled_lifetime"]), result.get("episode_return_mean")

        before, _ = train_until(warm_up)
        began = time.perf_counter()
        after, mean_return = train_until(before + env_steps)
        seconds = time.perf_counter() - began
        algorithm.stop()
    report(
        "rllib", (after - before) / seconds, ray.__version__,
        env_runners=0, gymnasium=gymnasium.__version__, torch=torch.__version__, threads=1, env_steps=after - before,
        mean_return=None if mean_return is None else round(float(mean_return), 1),
    )  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="hr-rllib-", ignore_cleanup_errors=True) as folder:
        os.environ |= {"HOME": folder, "RAY_USAGE_STATS_ENABLED": "0"}  # results are written below the home folder
        main(folder, **json.loads(sys.argv[1]))
