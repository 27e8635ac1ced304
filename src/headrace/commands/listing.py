"""`headrace list`: what methods, plans, places and environments there are."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from headrace.catalog import METHODS, PLACES, PLANS, summary
from headrace.errors import ConfigError
from headrace.settings import nearest

__all__ = ["main"]

_KINDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "methods": ("method", METHODS),
    "plans": ("plan", PLANS),
    "places": ("place", PLACES),
}

HELP = """\
headrace list [methods|plans|places|envs] [PATTERN]

Without a word: methods, plans and places. `envs` lists the ids of the packages that are installed; a pattern such as
'CartPole*' picks some of them. Ids with a prefix need no list: envpool:ID, package.module:Class.
"""


def main(argv: list[str]) -> int:
    """Print them. Raises ConfigError for another word."""
    if "--help" in argv or "-h" in argv:
        print(HELP, end="")
        return 0
    kind, *patterns = argv or [""]
    if kind == "envs" and len(patterns) <= 1:
        return _list_envs(patterns[0] if patterns else "*")
    if patterns or kind not in ("", *_KINDS):
        near = ", ".join(nearest(kind, [*_KINDS, "envs"]))
        raise ConfigError(f"list {' '.join(argv)}: expected methods, plans, places or envs. Nearest: {near}.")
    for number, title in enumerate([kind] if kind else _KINDS):
        singular, names = _KINDS[title]
        width = max(map(len, names))
        print(("\n" if number else "") + title)
        for name in names:
            print(f"  {name:<{width}}  {summary(singular, name)}")
    if not kind:
        print("\nEnvironments: headrace list envs. Settings: headrace train METHOD --help.")
    return 0


def _list_envs(pattern: str) -> int:
    from headrace.envs.names import names  # imports packages of environments

    found = fnmatch.filter(names(), pattern)
    if not found:
        raise ConfigError(f"no environment matches {pattern!r}. Nearest: {', '.join(nearest(pattern, names()))}.")
    print("\n".join(found))
    return 0
