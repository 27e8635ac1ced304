"""Every error that Headrace raises on purpose.

    HeadraceError
    ├── ConfigError (ValueError)     an argument, a setting or an object handed in does not fit
    ├── ShapeError (ValueError)      a tensor has another shape, dtype or axis length than declared
    ├── Closed                       the channel was closed, or its other end has finished
    ├── Stalled (TimeoutError)       a wait ran out of time, or can never end (deadlock)
    └── RoleFailed                   a role raised, was killed, or was stopped for too long

A message says what came, what was expected and what to do.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["Closed", "ConfigError", "HeadraceError", "RoleFailed", "ShapeError", "Stalled"]


class HeadraceError(Exception):
    """The root of all errors that Headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """An argument, a setting or an object handed in does not fit."""


class ShapeError(HeadraceError, ValueError):
    """A tensor has another shape, dtype or axis length than declared."""


class Closed(HeadraceError):
    """The channel was closed, or the role at its other end has finished.

    A role that lets it pass has ended as it should: closing is how a peer or the crew says "enough".
    """


class Stalled(HeadraceError, TimeoutError):
    """A wait ran out of time, or can never end because every role waits for another one."""


class RoleFailed(HeadraceError):
    """A role raised an exception, was killed by a signal, left without returning, or was stopped for too long.

    role, rank, incarnation: which life of which role.
    signal: number of the signal that killed or stopped it, else None. exit_code: of its process, else None.
    traceback: the role's own traceback as text, empty where there is none. The exception itself is `__cause__`.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str,
        rank: int,
        incarnation: int = 0,
        signal: int | None = None,
        exit_code: int | None = None,
        traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.incarnation = incarnation
        self.signal = signal
        self.exit_code = exit_code
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self.__dict__), self.args
