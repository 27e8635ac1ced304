"""What the names of methods, plans and placements stand for on the command line. Loads none until it is asked to."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.settings import nearest

__all__ = ["METHODS", "PLACES", "PLANS", "called", "find", "name_of", "summary"]

METHODS: Mapping[str, str] = {
    "a2c": "headrace.methods.a2c:A2C",
    "appo": "headrace.methods.appo:APPO",
    "ddpg": "headrace.methods.ddpg:DDPG",
    "dqn": "headrace.methods.dqn:DQN",
    "impala": "headrace.methods.impala:IMPALA",
    "ppo": "headrace.methods.ppo:PPO",
    "rainbow": "headrace.methods.rainbow:Rainbow",
    "sac": "headrace.methods.sac:SAC",
    "td3": "headrace.methods.td3:TD3",
}
PLANS: Mapping[str, str] = {
    "async-batches": "headrace.plans.async_batches:AsyncBatches",
    "async-gradients": "headrace.plans.async_gradients:AsyncGradients",
    "sync-batches": "headrace.plans.sync_batches:SyncBatches",
    "sync-gradients": "headrace.plans.sync_gradients:SyncGradients",
    "sync-replay": "headrace.plans.sync_replay:SyncReplay",
}
PLACES: Mapping[str, str] = {
    "inline": "headrace.place.inline:Inline",
    "threads": "headrace.place.threads:Threads",
    "processes": "headrace.place.processes:Processes",
}

_KINDS = {"method": METHODS, "plan": PLANS, "place": PLACES}
_SHORT = {"async": "async-batches", "replay": "sync-replay", "sync": "sync-batches"}
_PAPERS = {"a3c": "a2c --plan async-gradients", "dd-ppo": "ppo --plan sync-gradients"}
"""What is known by a name of its own, and is a method with another plan."""
_FUNCTIONS = {"method": "losses", "plan": "run", "place": "crew"}
"""What a class of each kind has to have."""


def find(kind: str, name: str) -> tuple[str, type[Any]]:
    """The full name and the class of a "method", "plan" or "place": a name of this catalog, or "package.module:Class".

    Raises ConfigError for a name that there is not, and for a module that cannot be imported.
    """
    known = _KINDS[kind]
    name = called(name)
    target = known.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        if kind == "method" and name in _PAPERS:
            raise ConfigError(f"no method {name!r}: it is {_PAPERS[name]}.")
        raise ConfigError(
            f"no {kind} {name!r}. Nearest: {', '.join(nearest(name, known))}. All: headrace list {kind}s, or give "
            "package.module:Class."
        )
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever the module does while it is imported
        raise ConfigError(f"{kind} {name!r}: module {module!r} could not be imported: {error!r}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{kind} {name!r}: module {module!r} has no class {attribute!r}.")
    if not hasattr(found, _FUNCTIONS[kind]):
        raise ConfigError(f"{name!r} is no {kind}: expected a class with a function {_FUNCTIONS[kind]}().")
    return name, found


def called(name: str) -> str:
    """A name without abbreviation."""
    return _SHORT.get(name, name)


def name_of(kind: str, found: type[Any]) -> str:
    """What a class is called on the command line: its name in this catalog, or "package.module:Class"."""
    full = f"{found.__module__}:{found.__qualname__}"
    return next((name for name, target in _KINDS[kind].items() if target == full), full)


def summary(kind: str, name: str) -> str:
    """The first line of a class's docstring, read from its file: nothing is imported."""
    module, _, attribute = _KINDS[kind][name].partition(":")
    file = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    raise ConfigError(f"{file} has no class {attribute!r}, which the catalog calls {name!r}.")
