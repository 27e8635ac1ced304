"""Who acts with the network that it learns with."""

from __future__ import annotations

from typing import Any, cast

from headrace.actor import Actor
from headrace.channel import Note, Weights
from headrace.data import Rollout
from headrace.tally import Told

__all__ = ["act_with", "told"]


class _Own:
    """In place of a store of weights: nothing is copied, since the actor's network is the learner's own."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def pull(self, target: Any, version: int | None = None, at_least: int | None = None) -> Note:
        return self._note


def act_with(actor: Actor, version: int, progress: float) -> None:
    """Act from now on as at this version and this share of the run, with what the network is by now."""
    actor.load(cast(Weights, _Own(Note(version, {"progress": progress}))))


def told(rollout: Rollout) -> dict[str, Any]:
    """The fields of `Told`, of this rollout."""
    return {name: getattr(rollout, name) for name in Told.__dataclass_fields__}
