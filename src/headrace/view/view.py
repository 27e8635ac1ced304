"""What every view can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.view.moment import Header, Moment

__all__ = ["View"]


class View(Protocol):
    """Somebody who follows a run. A view changes nothing in it."""

    def begin(self, header: Header) -> None:
        """The run is about to start. Call it first, once."""

    def show(self, moment: Moment, returns: Sequence[float]) -> None:
        """How the run stands. Call it as often as you like: the view draws only so often, and else returns at once.

        returns: the curve of `return_mean100` so far, thinned as you like.
        """

    def say(self, line: str) -> None:
        """A line to print now, above whatever moves."""

    def end(self, lines: Sequence[str]) -> None:
        """The run is over: the last moment stays, and these lines follow."""

    def close(self) -> None:
        """Give the terminal back as it was. Call it always, in a `finally`; a second time it does nothing."""
