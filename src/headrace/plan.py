"""What a plan is to the rest of the library: which roles there are, what moves between them, and who waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from headrace.channel import Placement
from headrace.envs.base import Env
from headrace.learner import Learner
from headrace.report import Report

__all__ = ["Plan"]


class Plan(Protocol):
    """A frozen dataclass whose fields are its settings, with the one function `run`."""

    def run(
        self,
        learner: Learner,
        env: Env,
        place: Placement,
        *,
        env_steps: int,
        horizon: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Iterator[Report]:
        """A generator of reports, of every update at least, until so many environment steps were learned from.

        It raises ConfigError at once for what does not fit, and starts roles when the first report is asked for; they
        live as long as the generator. horizon: the environment steps at which schedules end, if not at the last one.
        state: what the `snapshot()` of one of its reports returned, to go on from. Its reports name their `crew`.
        """
