"""What a learner is given of replay, and how much: so many samples for every environment step that is stored."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.data import Rollout
from headrace.errors import ConfigError, NonFinite
from headrace.finite import check_rollout
from headrace.learner import Learner
from headrace.plans.checks import check_replayed
from headrace.replay import Replay
from headrace.report import Report

if TYPE_CHECKING:
    from headrace.plans.sync_replay import SyncReplay

__all__ = ["Ration"]

GRAIN = 1000
"""Schedules are asked at so many places of a run: at each of thousands of updates a second it would take too long."""
_COUNTED = ("ratio", "learning_starts")
"""Settings by which it was counted what is due."""


class Ration:
    """A plan's store, and how much of it is to be learned: `ratio` samples for each step after the first ones.

    state: what another's `state()` returned, to go on from. like: a rollout of one lane. Raises ConfigError where there
    is no room for the store, and for a state of other settings.
    """

    def __init__(
        self, plan: SyncReplay, learner: Learner, seed: Sequence[int], state: Mapping[str, Any] | None
    ) -> None:
        self._plan, self._learner = plan, learner
        self._sampling = check_replayed(learner.method, plan)
        self.like = learner.example(plan.num_steps, plan.num_envs // plan.actors)
        seed = (*seed, zlib.crc32(b"replay"))
        self._store = Replay(self.like, plan.actors, plan.buffer_size, self._sampling, learner.spec, seed)
        self._added = self._drawn = 0  # environment steps, and samples
        self._part = -1
        if state is not None:
            for name in _COUNTED:
                if state[name] != (now := getattr(plan, name)):
                    raise ConfigError(
                        f"the replay of this state was counted with {name}={state[name]}, and this plan has {now}. "
                        'Give the same, or leave it out (state | {"replay": None}): the store is then filled anew.'
                    )
            self._store.load_state(state["store"])
            self._added, self._drawn = state["added"], state["drawn"]

    def add(self, lane: int, rollout: Rollout) -> None:
        """Hear a rollout and store it. One that is not finite is left out, if the learner skips such, and counted."""
        learner = self._learner
        steps = learner.hear(rollout)
        if learner.non_finite == "skip":
            try:
                check_rollout(rollout)
            except NonFinite:
                learner.dropped["non_finite"] = learner.dropped.get("non_finite", 0) + steps
                return
        self._store.add(lane, rollout)
        self._added += steps

    @property
    def due(self) -> bool:
        """Whether the learner is an update behind."""
        plan = self._plan
        return plan.ratio * (self._added - plan.learning_starts) - self._drawn >= plan.batch_size

    def updates(self, progress: float, quiet: bool = False) -> Iterator[Report]:
        """Make the updates that are due and report each; if there is none, what was heard, unless that is not asked.

        progress: where the schedules are, as a share of the run. quiet: nothing is reported without an update.
        """
        if not self.due and not quiet:
            yield replace(self._learner.report(), metrics=self._tell())
        news: Report | None = None
        while self.due:
            self._anneal(progress)
            batch = self._store.sample(self._plan.batch_size, self._sampling.beta)
            # Counted as they are drawn: an update that is left out, since it is not finite, is not tried for ever.
            self._drawn += self._plan.batch_size
            told = {"replay/age": self._store.age(batch)}
            report = self._learner.update(batch)
            if self._sampling.alpha and report.priorities is not None:
                self._store.update(batch.row, batch.generation, report.priorities)
            news = news or report
            yield replace(
                report,
                metrics={**report.metrics, **told, **self._tell()},
                lags=news.lags,  # what came in a round is told of at all its updates
                running_return=news.running_return,
                running_length=news.running_length,
                more=self.due,
            )

    def _anneal(self, progress: float) -> None:
        part = int(GRAIN * min(1.0, progress))
        if part != self._part:
            self._part = part
            self._learner.anneal(part / GRAIN)
            self._sampling = check_replayed(self._learner.method.anneal(part / GRAIN), self._plan)

    def _tell(self) -> dict[str, float]:
        """Rows that can be drawn, samples per step so far, and priorities that came too late."""
        ratio = self._drawn / max(1, self._added - self._plan.learning_starts)
        return {"replay/size": len(self._store), "replay/ratio": ratio, "replay/late": self._store.late}

    def state(self) -> dict[str, Any]:
        """All of it, to go on from; what the store holds as it is, without a copy."""
        counted = {name: getattr(self._plan, name) for name in _COUNTED}
        return {**counted, "store": self._store.state(), "added": self._added, "drawn": self._drawn}
