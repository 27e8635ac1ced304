"""Lines for a log, a pipe or a terminal that is none: no escape codes, nothing that moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from headrace.view.moment import Header, Moment
from headrace.view.wording import STOP, count, dropped, episodes, eta, heading, score

__all__ = ["Plain"]

EVERY = 5.0  # seconds from line to line


class Plain:
    """A line each 5 s, and the verdict whenever it says something else."""

    def __init__(self, stream: TextIO, stop: str = STOP) -> None:
        self._stream, self._stop = stream, stop
        self._due = 0.0
        self._last: Moment | None = None
        self._said = ""

    def begin(self, header: Header) -> None:
        """Print the heading."""
        for line in heading(header, self._stop):
            self.say(line)

    def show(self, moment: Moment, returns: Sequence[float]) -> None:
        """Print how the run stands, if it is time."""
        self._last = moment
        if time.monotonic() >= self._due:
            self._draw()

    def say(self, line: str) -> None:
        """Print a line. What the stream's encoding lacks becomes a question mark."""
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def end(self, lines: Sequence[str]) -> None:
        """Print how the run stood last, and these lines."""
        self.close()
        for line in lines:
            self.say(line)

    def close(self) -> None:
        """Print how the run stood last, if that was not printed."""
        if self._last is not None:
            self._draw()

    def _draw(self) -> None:
        moment, self._last = self._last, None
        assert moment is not None
        self._due = time.monotonic() + EVERY
        self.say(summary(moment))
        opinion = (moment.verdict or "").partition(" (")[0]  # its numbers change all the time
        if moment.verdict is not None and opinion != self._said:
            self.say(f"verdict: {moment.verdict}")
            self._said = opinion


def summary(moment: Moment) -> str:
    """How a run stands, in one line."""
    share = min(1.0, moment.env_steps / max(1, moment.total_timesteps))
    evaluation = moment.evaluation
    parts = [
        f"{moment.seconds:6.1f} s",
        f"{count(moment.env_steps)} steps ({100 * share:.0f} %)",
        f"{count(moment.steps_per_second)}/s",
        f"return {episodes(moment)}",
    ]
    if evaluation is not None:
        parts.append(f"eval {score(evaluation.mean)} ± {score(evaluation.std, evaluation.mean)}")
    if any(moment.dropped.values()):
        parts.append(dropped(moment.dropped))
    if moment.restarts:
        parts.append(f"restarts {moment.restarts}")
    parts.append(f"ETA {eta(moment)}")
    return "  ".join(parts)
