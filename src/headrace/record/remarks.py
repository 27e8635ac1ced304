"""What the library logs while a run goes on, for the run's own log and for whoever follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["Remarks"]

_LOGGER = logging.getLogger("headrace")


class Remarks(logging.Handler):
    """Gives `say` each line that is logged below "headrace", from INFO on, while the with-block lasts."""

    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self._say, self._before = say, _LOGGER.level

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))

    def __enter__(self) -> Self:
        _LOGGER.addHandler(self)
        _LOGGER.setLevel(logging.INFO)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LOGGER.removeHandler(self)
        _LOGGER.setLevel(self._before)
