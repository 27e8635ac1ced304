"""How much memory this process may still take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["Room", "available"]

TIGHT = 0.9
_CGROUPS = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""What a container may take and takes, its cached files included: version 2, 1."""


class Room(NamedTuple):
    """What something takes, and what there is, in bytes."""

    needed: int
    available: int

    @property
    def fits(self) -> bool:
        """Whether there is as much as it takes."""
        return self.needed <= self.available

    @property
    def tight(self) -> bool:
        """Whether it takes more than nine tenths of what there is."""
        return self.needed > TIGHT * self.available


def available(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process can take before the machine, or the container that it is in, has none left."""
    least: int = psutil.virtual_memory().available
    for folder in _folders(root, own):
        for limit, used in _FILES:
            with suppress(OSError, ValueError):  # "max" is no number: no limit
                free = int((folder / limit).read_text()) - int((folder / used).read_text()) + _cached(folder)
                least = min(least, max(0, free))
    return least


def _folders(root: Path, own: Path) -> list[Path]:
    """Of the groups that this process is in, up to the root: the limit of each holds."""
    found = [root, root / "memory"]
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            parts = Path(path.lstrip("/"))
            if controllers in ("", "memory"):
                found += [root / controllers / each for each in (parts, *parts.parents)]
    return list(dict.fromkeys(found))


def _cached(folder: Path) -> int:
    """Bytes of files that are counted as used and would be given back."""
    with suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
