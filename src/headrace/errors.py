"""Every error that Headrace raises on purpose.

    HeadraceError
    ├── ConfigError (ValueError)     an argument, a setting or an object handed in does not fit
    ├── ShapeError (ValueError)      a tensor has another shape, dtype or axis length than declared
    ├── Closed                       the channel was closed, or its other end has finished
    ├── Stalled (TimeoutError)       a wait ran out of time, or can never end (deadlock)
    ├── RoleFailed                   a role raised, was killed, hung, or was stopped for too long
    ├── EnvironmentFault             an environment raised, or returned what cannot be used
    ├── NonFinite                    learning met an infinite number or a NaN
    └── CheckpointError              a checkpoint cannot be written, or is missing, damaged or of something else

A message says what came, what was expected and what to do.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = [
    "CheckpointError",
    "Closed",
    "ConfigError",
    "EnvironmentFault",
    "HeadraceError",
    "NonFinite",
    "RoleFailed",
    "ShapeError",
    "Stalled",
]


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
    """A role raised an exception, was killed by a signal, left without returning, hung, or was stopped for too long.

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


class EnvironmentFault(HeadraceError):
    """An environment raised an exception, which is `__cause__`, or returned what its spaces forbid or is not finite.

    environment: its index among all of the run, or a range where environments that step as one cannot be told apart.
    episode: from 0. step: of that episode, from 1; 0 is the reset. seed: what its reset was given; None before that.
    """

    def __init__(
        self, message: str, *, environment: int | range, episode: int = 0, step: int = 0, seed: int | None = None
    ) -> None:
        super().__init__(message)
        self.environment = environment
        self.episode = episode
        self.step = step
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self.__dict__), self.args


class NonFinite(HeadraceError):
    """What a learner was about to learn from, or a gradient of it, holds an infinite number or a NaN.

    It is raised before that reaches a weight, an optimizer's state or a running statistic.
    """


class CheckpointError(HeadraceError):
    """A checkpoint cannot be written, or what is read is missing, damaged, newer than this library, or of another run.

    Checkpoints that were saved before one that cannot be written are intact.
    """
