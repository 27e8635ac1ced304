"""RLlib: DQN, on its new API stack, stepping the environment in the learner's process. Runs in RLlib's environment."""

import json
import os
import sys
import tempfile
import time

from benchmarks.report import report


def main(
    folder: str, *, env: str, hidden: list[int], learning_rate: float, gamma: float, buffer_size: int, batch_size: int,
    learning_starts: int, train_every: int, target_update_steps: int, max_grad_norm: float, eps: float, warm_up: int,
    env_steps: int, seed: int,
) -> None:  # fmt: skip
    import gymnasium
    import ray
    import torch
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    torch.set_num_threads(1)
    config = (
        DQNConfig()
        .environment(env)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=1, rollout_fragment_length=train_every)
        .learners(num_learners=0)  # in the driver
        .training(
            lr=learning_rate,
            gamma=gamma,
            train_batch_size_per_learner=batch_size,
            training_intensity=batch_size / train_every,  # samples learned for each environment step
            num_steps_sampled_before_learning_starts=learning_starts,
            target_network_update_freq=target_update_steps,
            grad_clip=max_grad_norm,
            grad_clip_by="global_norm",
            epsilon=eps,
            double_q=False,
            dueling=False,
            n_step=1,
            replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": buffer_size},  # uniform
        )
        .reporting(min_sample_timesteps_per_iteration=500, min_time_s_per_iteration=0)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=hidden, fcnet_activation="relu"))
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
