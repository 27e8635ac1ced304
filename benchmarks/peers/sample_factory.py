"""Sample Factory: its asynchronous PPO, with two workers. Runs in Sample Factory's own environment.

With GAE, as is its default: with V-trace version 2.1.1 fails without a recurrent network.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import gymnasium
import torch
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from benchmarks.report import report

WORKERS = 2


class Clock(AlgoObserver):
    """Notes when how many environment steps had been learned from."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.first, self.last = warm_up, None, None

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        steps, now = sum(runner.env_steps.values()), time.perf_counter()
        if self.first is None and steps >= self.warm_up:
            self.first = steps, now
        self.last = steps, now


def make(full_env_name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    return gymnasium.make(full_env_name, render_mode=render_mode)


def main(
    folder: str, *, env: str, num_envs: int, num_steps: int, hidden: list[int], learning_rate: float, gamma: float,
    ent_coef: float, vf_coef: float, max_grad_norm: float, warm_up: int, env_steps: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    register_env(env, make)
    batch = num_envs * num_steps
    settings = {
        "env": env, "algo": "APPO", "device": "cpu", "seed": seed, "async_rl": True, "serial_mode": False,
        "num_workers": WORKERS, "num_envs_per_worker": num_envs // WORKERS, "worker_num_splits": 2,
        "rollout": num_steps, "batch_size": batch, "num_batches_per_epoch": 1, "num_epochs": 1,
        "learning_rate": learning_rate, "gamma": gamma, "exploration_loss_coeff": ent_coef,
        "value_loss_coeff": vf_coef, "max_grad_norm": max_grad_norm, "use_rnn": False, "recurrence": 1,
        "nonlinearity": "tanh", "actor_critic_share_weights": False, "normalize_input": False,
        "normalize_returns": False, "with_vtrace": False, "train_for_env_steps": warm_up + env_steps,
        "train_dir": folder, "log_to_file": False, "save_every_sec": 10_000, "save_best_every_sec": 10_000,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    arguments += ["--encoder_mlp_layers", *map(str, hidden)]
    parser, _ = parse_sf_args(arguments)
    _, runner = make_runner(parse_full_cfg(parser, arguments))
    clock = Clock(warm_up)
    runner.register_observer(clock)
    runner.init()
    runner.run()
    made, seconds = (last - first for last, first in zip(clock.last, clock.first, strict=True))
    returns = [value for values in runner.policy_avg_stats["reward"] for value in values]
    report(
        "sample_factory", made / seconds, version("sample-factory"),
        workers=WORKERS, gymnasium=gymnasium.__version__, torch=torch.__version__, threads=1, env_steps=made,
        mean_return=round(sum(returns) / len(returns), 1) if returns else None,
    )  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="hr-sf-", ignore_cleanup_errors=True) as folder:
        with contextlib.suppress(AttributeError):
            os.setpgrp()
        main(folder, **json.loads(sys.argv[1]))
