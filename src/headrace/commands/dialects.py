"""What settings are called elsewhere: by Stable-Baselines3, RL Zoo, CleanRL and RLlib."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ALIASES", "AMBIGUOUS", "CHOICES", "KINDS"]

KINDS = ("method", "plan", "env", "place")

CHOICES: Mapping[str, str] = {
    **{"method": "method", "algo": "method", "method.name": "method"},
    **{"env": "env", "env_id": "env", "env.id": "env"},
    **{"plan": "plan", "plan.name": "plan", "place": "place", "place.name": "place"},
}
"""The names of the four choices themselves."""

ALIASES: Mapping[str, str] = {
    **{"num_envs": "plan.num_envs", "n_envs": "plan.num_envs", "num_env_runners": "plan.actors"},
    **{"num_steps": "plan.num_steps", "n_steps": "plan.num_steps"},
    **{name: f"plan.{name}" for name in ("batch_size", "buffer_size", "learning_starts")},
    **{"replay_ratio": "plan.ratio", "training_intensity": "plan.ratio"},
    **{"n_epochs": "update_epochs", "num_epochs": "update_epochs"},
    **{"clip_coef": "clip_range", "clip_param": "clip_range", "vf_clip_param": "clip_range_vf"},
    **{"lr": "learning_rate", "lambda": "gae_lambda", "lambda_": "gae_lambda", "norm_adv": "normalize_advantage"},
    **{"entropy_coeff": "ent_coef", "vf_loss_coeff": "vf_coef", "grad_clip": "max_grad_norm"},
    **{"n_timesteps": "total_timesteps", "eval_freq": "eval_every", "save_freq": "checkpoint_every"},
    **{"conf_file": "config"},
}
"""Words that mean the same here."""

_UPDATES = (
    "one of two numbers elsewhere that say how much is learned from replay. Say plan.ratio: samples for each "
    "environment step, gradient_steps × batch_size / train_freq; and plan.num_steps for the steps between two updates."
)

AMBIGUOUS: Mapping[str, str] = {
    "batch_size": "the minibatch in Stable-Baselines3, the whole rollout in CleanRL. Say num_minibatches for the first "
    "(a minibatch has plan.num_envs × plan.num_steps / num_minibatches samples), plan.num_steps for the second.",
    "minibatch_size": "what follows from the number of minibatches here. Say num_minibatches (a minibatch has "
    "plan.num_envs × plan.num_steps / num_minibatches samples).",
    **dict.fromkeys(("train_freq", "train_frequency", "gradient_steps"), _UPDATES),
    "clip_vloss": "a switch in CleanRL and a number here. Say clip_range_vf, such as 0.2, or none.",
}
"""Words that mean different things, and what to say."""
