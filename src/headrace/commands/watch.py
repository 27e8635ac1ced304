"""`headrace watch [RUN]`: the panel of a run that goes on, or is over, from the files in its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.commands.parser import Parser
from headrace.view.choose import NAMES, choose
from headrace.view.moment import Moment
from headrace.view.wording import count, duration, score

__all__ = ["main"]

RETURN = "charts/return_mean100"
EVERY = 0.5  # seconds from look to look
QUIET = 15.0  # seconds without news after which that is said


def main(argv: list[str]) -> int:
    """Follow a run until it is over or Ctrl-C; the run knows nothing of it. A run that is over is shown once."""
    parser = Parser("watch", "The live panel of a run that goes on or is over. Changes no file; Ctrl-C leaves.")
    parser.add_argument(
        "run", nargs="?", default="latest", metavar="RUN", help="the run's folder or name (default: latest)"
    )
    parser.add_argument("--ui", choices=NAMES[:3], default="live", help="how to show it (default: live)")
    given = parser.parse(argv)

    from headrace.record.folder import RunFolder

    folder = RunFolder.find(given.run)
    timeline, metrics = Tail(folder.timeline_path), Tail(folder.metrics_path)
    returns: list[float] = []
    shown = choose(given.ui, stop="leave: Ctrl-C (the run goes on)")
    news, quiet = time.monotonic(), False
    try:
        shown.begin(folder.header())
        while True:
            result = folder.result()  # before the rest is read: it is written last
            returns += [row[RETURN] for row in metrics.rows() if row.get(RETURN) is not None]
            moments = timeline.rows()
            for row in moments[-1:]:
                shown.show(Moment.from_json(row), returns)
                news, quiet = time.monotonic(), False
            if result is not None:
                shown.end(closing(result))
                return 0
            if not quiet and time.monotonic() - news > QUIET:
                shown.say(f"no news for {QUIET:g} s: the run is busy with one update, or was killed")
                quiet = True
            time.sleep(EVERY)
    except KeyboardInterrupt:
        return 0
    finally:
        shown.close()


class Tail:
    """The rows of a file of JSON lines that somebody else writes: each time those that are new."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def rows(self) -> list[dict[str, Any]]:
        """The whole lines since the last call; half a line waits for its end. A file that shrank is read anew."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            if self._offset > self._path.stat().st_size:
                self._offset = 0
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


def closing(result: Mapping[str, Any]) -> list[str]:
    """How a run ended."""
    lines = [f"{result['status']} after {count(result['env_steps'])} steps in {duration(result['wall_seconds'])}"]
    if result["final_return"] is not None:
        lines[0] += f", final return {score(result['final_return'])}"
    if result["error"] is not None:
        lines.append(f"{result['error']['type']}: {result['error']['message']}")
    return lines
