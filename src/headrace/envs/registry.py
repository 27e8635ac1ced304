"""What the id of an environment stands for, as on the command line."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from headrace.envs.atari import Atari
from headrace.envs.base import Env
from headrace.envs.envpool import EnvPool
from headrace.envs.gymnasium import Gymnasium
from headrace.errors import ConfigError

__all__ = ["environment", "identify"]


def environment(id: str, **kwargs: Any) -> Env:
    """The environments that an id names, with these arguments.

        environment("CartPole-v1")              # Gymnasium("CartPole-v1"), and so whatever follows no other rule
        environment("ALE/Pong-v5")              # Atari("Pong"), preprocessed
        environment("PongNoFrameskip-v4")       # Atari("PongNoFrameskip-v4"), the classic settings
        environment("envpool:Pong-v5")          # EnvPool("Pong-v5")

    Raises ConfigError for an unknown id or argument, and for a package that is not installed.
    """
    if id.startswith("envpool:"):
        return EnvPool(id.removeprefix("envpool:"), **kwargs)
    if id.startswith("ALE/") or id.endswith("NoFrameskip-v4"):
        known = [field.name for field in dataclasses.fields(Atari) if field.name != "game"]
        for key in kwargs:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=3, cutoff=0)
                raise ConfigError(f"Atari({id!r}) has no {key!r}. Nearest: {', '.join(near)}.")
        return Atari(id, **kwargs)
    return Gymnasium(id, **kwargs)


def identify(env: Env) -> tuple[str, dict[str, Any]] | None:
    """The id and the arguments of which `environment` makes this again; None where it cannot."""
    match env:
        case Atari():
            return f"ALE/{env.game}-v5", _fields(env, "game")
        case EnvPool():
            return f"envpool:{env.id}", {**_fields(env, "id", "kwargs"), **env.kwargs}
        case Gymnasium(id=str(id)):
            return id, {**_fields(env, "id", "kwargs", "source"), **env.kwargs}
    return None


def _fields(env: Any, *less: str) -> dict[str, Any]:
    return {field.name: getattr(env, field.name) for field in dataclasses.fields(env) if field.name not in less}
