"""Which view a run has, by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from headrace.errors import ConfigError
from headrace.view.jsonlines import JsonLines
from headrace.view.moment import Header, Moment
from headrace.view.plain import Plain
from headrace.view.view import View
from headrace.view.wording import STOP

__all__ = ["NAMES", "choose"]

NAMES = ("live", "plain", "json", "off")


class Off:
    """Shows nothing."""

    def begin(self, header: Header) -> None:
        pass

    def show(self, moment: Moment, returns: Sequence[float]) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def end(self, lines: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


def choose(name: str, stream: TextIO | None = None, *, stop: str = STOP) -> View:
    """The view of that name on a stream (standard output): "live", "plain", "json" or "off".

    "live" where nothing can move (a pipe, a file, a dumb terminal, one without Unicode) is "plain". stop: what the
    heading says of how to end it. Raises ConfigError for another name.
    """
    stream = sys.stdout if stream is None else stream
    if name not in NAMES:
        raise ConfigError(f"no view {name!r}. There are {', '.join(NAMES)}.")
    if name == "off":
        return Off()
    if name == "json":
        return JsonLines(stream)
    if name == "plain" or not _can_move(stream):
        return Plain(stream, stop)
    from headrace.view.panel import Panel  # rich takes a tenth of a second to import

    return Panel(stream, stop)


def _can_move(stream: TextIO) -> bool:
    unicode = (stream.encoding or "").lower().replace("-", "").startswith("utf")
    return stream.isatty() and unicode and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
