"""Reports become rows of metrics: one an update, or as few more updates as it takes to have 10,000 rows a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.report import Report

__all__ = ["MAX_ROWS", "Metrics"]

MAX_ROWS = 10_000
EPISODES = 256  # of a row that are told one by one
CURVE = 256  # points of the curve, at most


class Metrics:
    """What the reports of a run come to. It knows no time: the same reports give the same rows and the same state.

    A row ends with the first update whose environment steps are in another of the 10,000 equal parts of the run than
    those of the row before. return_mean100: over the last 100 episodes, None before one has ended. best_return: its
    highest value. curve: its values over the run, thinned.
    """

    def __init__(self, total_timesteps: int) -> None:
        self.total_timesteps = total_timesteps
        self.episodes_finished = 0
        self.return_mean100: float | None = None
        self.best_return: float | None = None
        self.curve: list[float] = []
        self._stride = 1  # updates from one point of the curve to the next
        self._updates = 0  # with a return
        self._window: deque[float] = deque(maxlen=100)
        self._row_steps = 0  # where the last row ended
        self._latest: dict[str, Any] | None = None
        self._ended: list[Any] = []
        self._episodes: list[list[Any]] = []
        self._lags: dict[int, int] = {}
        self._sums: dict[str, list[Any]] = {}
        self._begin()

    def add(self, report: Report) -> dict[str, Any] | None:
        """Take in an update. Returns the row, if one ends here."""
        latest: dict[str, Any] = {
            "global_step": report.env_steps,
            "updates": report.updates,
            "gradient_steps": report.gradient_steps,
            "samples_learned": report.samples_learned,
            "dropped": dict(report.dropped),
            "running": (report.running_return, report.running_length),
            "replay_ratio": report.replay_ratio,
            "learning_rates": dict(report.learning_rates),
        }
        self._latest = latest
        if report.episode_returns.size:
            self._add_episodes(report.episode_returns.tolist(), report.episode_lengths.tolist())
        if report.lags.size:
            lowest, highest = int(report.lags.min()), int(report.lags.max())
            found = {lowest: report.lags.size}
            if lowest != highest:  # which is rare, and takes longer
                lags, counts = np.unique(report.lags, return_counts=True)
                found = dict(zip(lags.tolist(), counts.tolist(), strict=True))
            for lag, count in found.items():
                self._lags[lag] = self._lags.get(lag, 0) + count
        for name, value in report.metrics.items():
            told = self._sums.setdefault(name, [0.0, 0])
            told[0] += value
            told[1] += 1
        if self.return_mean100 is not None:
            self._draw()
        if self._part(report.env_steps) > self._part(self._row_steps):
            return self.flush()
        return None

    def flush(self) -> dict[str, Any] | None:
        """The row of the updates since the last one; None where there was none."""
        latest = self._latest
        if latest is None:
            return None
        row: dict[str, Any] = {
            name: latest[name] for name in ("global_step", "updates", "gradient_steps", "samples_learned", "dropped")
        }
        count, returns, lengths = self._ended
        if count:
            row["charts/episodic_return"] = returns / count
            row["charts/episodic_length"] = lengths / count
            row["episodes"] = self._episodes
        if self.return_mean100 is not None:
            row["charts/return_mean100"] = self.return_mean100
        row["charts/episodes_finished"] = self.episodes_finished
        for name, value in zip(("charts/running_return", "charts/running_length"), latest["running"], strict=True):
            if value is not None:
                row[name] = value
        for name, rate in latest["learning_rates"].items():
            row["charts/learning_rate" if len(latest["learning_rates"]) == 1 else f"charts/learning_rate/{name}"] = rate
        row |= {name: total / number for name, (total, number) in self._sums.items()}
        if self._lags:
            held = sorted(self._lags.items())
            row |= {"lag/versions_p50": _percentile(held, 50), "lag/versions_p95": _percentile(held, 95)}
            row["lag/versions_max"] = held[-1][0]
        row["perf/replay_ratio"] = latest["replay_ratio"]
        self._row_steps = latest["global_step"]
        self._begin()
        return row

    def state(self) -> dict[str, Any]:
        """All that rows to come depend on: plain values, for a checkpoint."""
        return {
            "episodes_finished": self.episodes_finished,
            "best_return": self.best_return,
            "curve": list(self.curve),
            "stride": self._stride,
            "updates": self._updates,
            "window": list(self._window),
            "row_steps": self._row_steps,
            "latest": self._latest,
            "ended": list(self._ended),
            "episodes": [list(episode) for episode in self._episodes],
            "lags": dict(self._lags),
            "sums": {name: list(told) for name, told in self._sums.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.episodes_finished, self.best_return = state["episodes_finished"], state["best_return"]
        self.curve, self._stride, self._updates = list(state["curve"]), state["stride"], state["updates"]
        self._window = deque(state["window"], maxlen=100)
        self.return_mean100 = self._mean()
        self._row_steps, self._latest = state["row_steps"], state["latest"]
        self._ended = list(state["ended"])
        self._episodes = [list(episode) for episode in state["episodes"]]
        self._lags = dict(state["lags"])
        self._sums = {name: list(told) for name, told in state["sums"].items()}

    def _begin(self) -> None:
        self._latest = None
        self._ended = [0, 0.0, 0]  # episodes, the sum of their returns and that of their lengths
        self._episodes, self._lags, self._sums = [], {}, {}

    def _part(self, env_steps: int) -> int:
        return env_steps * MAX_ROWS // self.total_timesteps

    def _add_episodes(self, returns: list[float], lengths: list[int]) -> None:
        self.episodes_finished += len(returns)
        self._ended[0] += len(returns)
        self._ended[1] += sum(returns)
        self._ended[2] += sum(lengths)
        room = EPISODES - len(self._episodes)
        self._episodes += [list(episode) for episode in zip(returns[:room], lengths[:room], strict=True)]
        self._window.extend(returns[-100:])
        mean = self.return_mean100 = self._mean()
        if mean is not None and (self.best_return is None or mean > self.best_return):
            self.best_return = mean

    def _mean(self) -> float | None:
        return sum(self._window) / len(self._window) if self._window else None

    def _draw(self) -> None:
        """Add a point to the curve, at every update first, then at every second one, and so on."""
        assert self.return_mean100 is not None
        if self._updates % self._stride == 0:
            if len(self.curve) == CURVE:
                del self.curve[1::2]
                self._stride *= 2
            if self._updates % self._stride == 0:
                self.curve.append(self.return_mean100)
        self._updates += 1


def _percentile(held: list[tuple[int, int]], percent: int) -> float:
    """That of numbers given as sorted pairs of a value and its count; between two of them, on the line."""
    place = (sum(count for _, count in held) - 1) * percent / 100
    low, below, seen = int(place), None, 0
    for value, count in held:
        seen += count
        if below is None and seen > low:
            below = value
        if seen > low + 1 or value == held[-1][0]:
            assert below is not None
            return below + (value - below) * (place - low)
    raise AssertionError("no numbers")
