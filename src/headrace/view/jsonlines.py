"""JSON for a program that follows the run: one object a line, and nothing else on the stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, TextIO

from headrace.view.moment import Header, Moment

__all__ = ["JsonLines"]

EVERY = 1.0  # seconds from moment to moment


class JsonLines:
    """{"header": …}, then a `Moment.to_json()` each second, {"line": …} for what is said, and {"end": […]}."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._due = 0.0
        self._last: Moment | None = None

    def begin(self, header: Header) -> None:
        """Write the heading's fields."""
        self._write({"header": header.to_json()})

    def show(self, moment: Moment, returns: Sequence[float]) -> None:
        """Write the moment, if it is time."""
        self._last = moment
        if time.monotonic() >= self._due:
            self._draw()

    def say(self, line: str) -> None:
        """Write a line that a person would read."""
        self._write({"line": line})

    def end(self, lines: Sequence[str]) -> None:
        """Write the last moment, and these lines."""
        self.close()
        self._write({"end": list(lines)})

    def close(self) -> None:
        """Write the last moment, if that was not written."""
        if self._last is not None:
            self._draw()

    def _draw(self) -> None:
        moment, self._last = self._last, None
        assert moment is not None
        self._due = time.monotonic() + EVERY
        self._write(moment.to_json())

    def _write(self, found: dict[str, Any]) -> None:
        self._stream.write(json.dumps(found, allow_nan=False) + "\n")
        self._stream.flush()
