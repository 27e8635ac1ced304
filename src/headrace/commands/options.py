"""What belongs to a run of `headrace train` and neither to its method, plan, environment nor placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError

__all__ = ["SHORT", "SWITCHES", "Options"]

SWITCHES = ("help", "track")
"""Flags that take no value."""

SHORT = {"-n": "total_timesteps", "-h": "help"}


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    total_timesteps: int = 100_000
    """Environment steps to learn from. Also -n."""
    seed: int = 1
    """The same seed gives the same weights, on every placement."""
    seeds: int = 1
    """Runs, one after the other, with this seed and those that follow it."""
    config: str | None = None
    """A YAML file of settings, or the config.json of a run. Flags override it, and it overrides a preset."""
    device: str = "cpu"
    """Where the network learns: cpu, cuda or cuda:1; several with commas. auto is cpu."""
    threads: int = 1
    """Torch threads of the learner. More are faster for large networks; another number gives other bits."""
    non_finite: Literal["raise", "skip"] = "raise"
    """What becomes of an update with an infinite number or a NaN: an error, or it is left out and counted."""
    eval_every: int | None = None
    """Environment steps between evaluations; 0: none. None: a tenth of the run."""
    eval_episodes: int = 10
    """Episodes of each evaluation, played greedily."""
    checkpoint_every: int | None = None
    """Environment steps between checkpoints; 0: one at the end. None: a tenth of the run."""
    keep: int = 3
    """Newest checkpoints that are kept, beside the best one."""
    horizon: int | None = None
    """Environment steps after which schedules have ended. None: at the end of the run."""
    init_from: str | None = None
    """A run whose weights to begin with."""
    run: str | None = None
    """The folder of the run. None: a new one in runs/."""
    ui: Literal["live", "plain", "json", "off"] = "live"
    """How to follow it: a panel (plain where nothing can move), a line every 5 s, JSON lines, or not at all."""
    track: bool = False
    """Send metrics to Weights & Biases, too: pip install "headrace[track]"."""

    def __post_init__(self) -> None:
        for name, least in (
            *(
                ("total_timesteps", 1),
                ("seed", 0),
                ("seeds", 1),
                ("threads", 1),
                ("eval_every", 0),
                ("eval_episodes", 1),
            ),
            *(("checkpoint_every", 0), ("keep", 1), ("horizon", 1)),
        ):
            given = getattr(self, name)
            if given is not None and given < least:
                raise ConfigError(f"{name}={given}: give an integer from {least} on.")
