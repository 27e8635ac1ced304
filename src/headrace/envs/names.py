"""The ids of registered environments, without loading torch."""

from __future__ import annotations

import importlib
import importlib.util
import re

import gymnasium

__all__ = ["UNUSABLE", "names"]


UNUSABLE = ("phys2d/", "tabular/", "GymV2")  # for JAX, and for packages of the past


def names() -> list[str]:
    """The ids that gymnasium and the installed packages of environments have registered, sorted, newest versions only.

    They are what `environment` takes, besides ids with a prefix and classes. Of Atari only the ids that `Atari` takes.
    """
    for package in ("ale_py", "minigrid", "gymnasium_robotics"):
        if importlib.util.find_spec(package):
            importlib.import_module(package)
    newest: dict[str, tuple[int, str]] = {}
    for spec in gymnasium.registry.values():
        is_atari = str(spec.entry_point).startswith("ale_py")
        is_other_atari = is_atari and not re.fullmatch(r"ALE/.*-v5|\w+NoFrameskip-v4", spec.id)
        if spec.id.startswith(UNUSABLE) or is_other_atari:
            continue
        base, found = f"{spec.namespace}/{spec.name}", (spec.version or 0, spec.id)
        newest[base] = max(newest.get(base, found), found)
    return sorted(id for _, id in newest.values())
