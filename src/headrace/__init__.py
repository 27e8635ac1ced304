"""Headrace: distributed reinforcement learning, written once and run anywhere.

So far the ground floor: roles and the channels between them, on three placements.
"""

from headrace.channel import role, wait
from headrace.errors import Closed, ConfigError, HeadraceError, RoleFailed, ShapeError, Stalled
from headrace.place.inline import Inline
from headrace.place.processes import Processes
from headrace.place.threads import Threads
from headrace.struct import Struct, Tree, axes

__all__ = [
    "Closed",
    "ConfigError",
    "HeadraceError",
    "Inline",
    "Processes",
    "RoleFailed",
    "ShapeError",
    "Stalled",
    "Struct",
    "Threads",
    "Tree",
    "axes",
    "role",
    "wait",
]
