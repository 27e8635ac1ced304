"""What plans refuse before a role is started, each in the same words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headrace.data import Sampling
from headrace.envs.base import Env
from headrace.errors import ConfigError
from headrace.learner import Learner
from headrace.method import Method

__all__ = ["check_actors", "check_counts", "check_fresh", "check_replayed", "check_run"]


def check_counts(plan: Any, **least: int) -> None:
    """Raise ConfigError unless each of these settings of a plan is an integer from its least value on."""
    for name, low in least.items():
        given = getattr(plan, name)
        if not isinstance(given, int) or isinstance(given, bool) or given < low:
            raise ConfigError(f"{name}={given!r}: give an integer from {low} on.")


def check_actors(actors: int, num_envs: int, env_timeout: float | None, called: str = "actors") -> None:
    """Raise ConfigError unless they have equal shares of the environments, and a time limit that can pass."""
    if env_timeout is not None and not env_timeout > 0:
        raise ConfigError(f"env_timeout={env_timeout!r}: give seconds above 0, or None.")
    if num_envs % actors:
        below = num_envs // actors * actors
        fitting = [str(count) for count in (below, below + actors) if count]
        raise ConfigError(
            f"num_envs {num_envs} cannot be divided evenly among {actors} {called}. "
            f"Nearest: num_envs {' or '.join(fitting)}."
        )


def check_fresh(method: Method, plan: Any) -> None:
    """Raise ConfigError unless the method learns from fresh rollouts."""
    if method.sampling is not None:
        raise ConfigError(
            f"{type(method).__name__} learns from replayed transitions, and {type(plan).__name__} moves fresh batches. "
            "Use SyncReplay (--plan sync-replay), or a method that learns from fresh batches, such as PPO."
        )


def check_replayed(method: Method, plan: Any) -> Sampling:
    """What the method asks of replay. Raises ConfigError unless it learns from replayed transitions."""
    if method.sampling is None:
        raise ConfigError(
            f"{type(method).__name__} learns from fresh batches, and {type(plan).__name__} replays old experience. "
            "Use SyncBatches (--plan sync-batches), or a method that learns from replay, such as DQN or SAC."
        )
    return method.sampling


def check_run(
    learner: Learner,
    env: Env,
    env_steps: float,
    horizon: float | None,
    state: Mapping[str, Any] | None,
    holds: Collection[str],
) -> None:
    """Raise ConfigError unless what `run` was given fits together. holds: what a snapshot of the plan has at least."""
    if env.spec != learner.spec:
        raise ConfigError(f"the learner was built for {learner.spec}; this environment has {env.spec}.")
    if env_steps != env_steps:
        raise ConfigError(f"env_steps={env_steps}: give a number of environment steps.")
    if horizon is not None and not horizon > 0:
        raise ConfigError(f"horizon={horizon}: give a number of environment steps above 0.")
    if state is not None and not set(holds) <= set(state):
        raise ConfigError(f"state has {sorted(state) or 'nothing'}; give what a report's snapshot() returned.")
