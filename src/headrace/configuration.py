"""What a run was made of, as plain JSON: flat, and valid as a `--config` file of the program."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import Any

from headrace.catalog import name_of
from headrace.channel import Placement
from headrace.envs.base import Env
from headrace.envs.registry import identify
from headrace.method import Method

__all__ = ["NOTES", "configuration", "differences"]

NOTES = ("origins", "classes", "opaque", "frames")
"""Keys that tell of the settings, and are none."""

_FREE = ("total_timesteps", "horizon", "place", "device", "init_from")
"""Settings that may be others when a run goes on: they change how long it is, or where it runs."""

_FRAMES = "env_steps are steps of the agent; report.frames and frame skip count the environment's"


def configuration(
    method: Method, env: Env, plan: Any, place: Placement, origins: Mapping[str, str], **settings: Any
) -> dict[str, Any]:
    """All values, and where each came from.

    settings: of the run. origins: where a setting came from, for those that the caller knows; the others are "python".
    What is no JSON, such as a function that cannot be imported by a name, stands there as text, and in `opaque`.
    """
    opaque: list[str] = []
    values: dict[str, Any] = {}

    def tell(key: str, value: Any) -> None:
        try:
            values[key] = _plain(value)
        except _Opaque:
            values[key] = repr(value)
            opaque.append(key)

    classes = {"method": _name(type(method)), "env": _name(type(env)), "plan": _name(type(plan))}
    classes["place"] = _name(type(place))
    tell("method", name_of("method", type(method)))
    identified = identify(env)
    tell("env", identified[0] if identified else env)
    tell("plan", name_of("plan", type(plan)))
    tell("place", name_of("place", type(place)))
    for key, value in settings.items():
        tell(key, value)
    owners: tuple[tuple[str, Any], ...] = (("", method), ("plan.", plan), ("place.", place))
    for prefix, owner in owners:
        for field in dataclasses.fields(owner):
            if (prefix, field.name) != ("place.", "logs"):  # they lie in the run's folder
                tell(prefix + field.name, getattr(owner, field.name))
    for key, value in identified[1].items() if identified else ():
        tell(f"env.{key}", value)
    return {
        **values,
        "origins": {key: origins.get(key, "python") for key in values},
        "classes": classes,
        "opaque": opaque,
        "frames": _FRAMES,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How settings differ that make another run of it: "learning_rate was 0.001, and is 0.0003"."""
    now = json.loads(json.dumps(now))
    keys = [key for key in {**before, **now} if key not in (*NOTES, *_FREE) and not key.startswith("place.")]
    return [
        f"{key} was {before.get(key)!r}, and is {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)
    ]


class _Opaque(Exception):
    """A value that JSON cannot hold."""


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if callable(value):
        name = _name(value)
        module, _, qualified = name.partition(":")
        found: Any = importlib.import_module(module) if module not in ("", "__main__") else None
        for part in qualified.split("."):
            found = getattr(found, part, None)
        if found is value:
            return name
    raise _Opaque


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
