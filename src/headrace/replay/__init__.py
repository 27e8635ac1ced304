"""Replay: what actors made, kept and drawn from again. No threads inside; docs/replay.md says what is never drawn."""

from headrace.replay.replay import Replay
from headrace.replay.room import Room
from headrace.replay.sequences import Sequences

__all__ = ["Replay", "Room", "Sequences"]
