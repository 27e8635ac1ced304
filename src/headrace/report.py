"""What an update tells: one schema of counters for every plan, and what the update's metrics were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.channel import Crew

__all__ = ["Lag", "Report"]


class Lag(NamedTuple):
    """Policy lag over the steps of a batch, in updates: the learner's version less the one that acted."""

    p50: float
    p95: float
    max: int


@dataclass(frozen=True)
class Report:
    """What an update did, and what the run has come to: plain numbers and arrays of them, nothing with a graph.

    A round of experience that no update came of has a report, too: its version is that of the report before.
    """

    version: int
    """Updates behind the weights as they are now."""
    env_steps: int
    """Environment steps learned from so far, counted where they happened."""
    frames: int
    """Frames behind them: an environment may let several pass in one step."""
    gradient_steps: int
    samples_learned: int
    """Rows that entered a loss so far; a row counts each time."""
    dropped: Mapping[str, int]
    """Environment steps that were never learned from, by reason."""
    episode_returns: np.ndarray[Any, np.dtype[np.float32]]
    """Raw returns of the episodes that ended in this batch."""
    episode_lengths: np.ndarray[Any, np.dtype[np.int32]]
    lags: np.ndarray[Any, np.dtype[np.int32]]
    """Policy lag of every step in the batch, in updates."""
    metrics: Mapping[str, float]
    """Means over this update, by CleanRL's names ("losses/policy_loss")."""
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Of each optimizer, in this update."""
    running_return: float | None = None
    """Mean raw return so far of the episodes that the batch leaves unfinished; None: there is none."""
    running_length: float | None = None
    """Mean number of environment steps of those so far."""
    more: bool = False
    """Whether another update follows before new experience is taken."""
    priorities: Tensor | None = field(default=None, repr=False, compare=False)
    """Of replayed rows, in the order in which they were learned [N]."""
    state: Callable[[], dict[str, Any]] | None = field(default=None, repr=False, compare=False)
    """Given by the plan: returns what the plan holds."""
    crew: Crew | None = field(default=None, repr=False, compare=False)
    """The plan's, for its timeline and its members."""

    @property
    def updates(self) -> int:
        """How many updates there have been: as many as the version says."""
        return self.version

    @property
    def replay_ratio(self) -> float:
        """Samples learned per environment step so far."""
        return self.samples_learned / max(1, self.env_steps)

    @property
    def lag(self) -> Lag:
        """Policy lag of this batch."""
        if not self.lags.size:
            return Lag(0.0, 0.0, 0)
        p50, p95 = np.percentile(self.lags, (50, 95))
        return Lag(float(p50), float(p95), int(self.lags.max()))

    def snapshot(self, copied: bool = True) -> dict[str, Any]:
        """All that the plan holds, to go on from with `run(…, state=…)`, while the plan waits at this report.

        copied: otherwise it is what the plan itself goes on with, good for no longer than it waits: replay is large.
        Raises ConfigError once the plan has gone on.
        """
        if self.state is None:
            raise ConfigError("this report came from a learner by itself; a plan's reports have snapshots.")
        state = self.state()
        return copy.deepcopy(state) if copied else state
