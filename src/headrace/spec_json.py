"""A Spec as JSON and back, so that a network can be built again where the environment's package is not installed.

    {"observation": {"box": {"shape": [4], "dtype": "float32", "low": "-inf", "high": [4.8, "inf", 0.4, "inf"]}},
     "action": {"discrete": {"n": 2, "start": 0}}, "shortest_truncation": null, "frame_skip": 1,
     "stacked": null}

A bound of a box is one number where all elements have the same, else all of them in order; what JSON has no number for
is a word. A dict of spaces is a list of keys with spaces, since JSON's own keys are strings only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

import numpy as np
import torch

from headrace.errors import ConfigError
from headrace.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces, Spec

__all__ = ["spec_from_json", "spec_to_json"]

Json: TypeAlias = Any
_SPACES = ("observation", "action")
_OTHERS = tuple(field.name for field in dataclasses.fields(Spec) if field.name not in _SPACES)


def spec_to_json(spec: Spec) -> dict[str, Json]:
    """The spec as what `json.dumps` takes. Raises ConfigError for a dict of spaces whose keys JSON cannot hold."""
    return {name: _encode(getattr(spec, name), name) for name in _SPACES} | {
        name: getattr(spec, name) for name in _OTHERS
    }


def spec_from_json(held: Json) -> Spec:
    """The spec that `spec_to_json` wrote, equal to it. Raises ConfigError where it is none."""
    if not isinstance(held, dict) or held.keys() != {*_SPACES, *_OTHERS}:
        found = sorted(map(str, held)) if isinstance(held, dict) else f"a {type(held).__name__}"
        raise ConfigError(f"this is no spec: it has {found}, and {sorted({*_SPACES, *_OTHERS})} were expected.")
    for name in _OTHERS:
        if held[name] is not None and type(held[name]) is not int:
            raise ConfigError(f"this is no spec: {name} is {held[name]!r}; a number was expected.")
    return Spec(**{name: _decode(held[name], name) for name in _SPACES}, **{name: held[name] for name in _OTHERS})


def _encode(space: Spaces, path: str) -> Json:
    match space:
        case Box():
            shape, dtype = list(space.shape), str(space.dtype).removeprefix("torch.")
            return {"box": {"shape": shape, "dtype": dtype, "low": _bound(space.low), "high": _bound(space.high)}}
        case Discrete():
            return {"discrete": {"n": space.n, "start": space.start}}
        case MultiDiscrete():
            return {"multi_discrete": {"sizes": list(space.sizes), "starts": list(space.starts)}}
        case MultiBinary():
            return {"multi_binary": {"shape": list(space.shape)}}
        case dict():
            for key in space:
                if type(key) not in (str, int):
                    raise ConfigError(f"{path} has the key {key!r}: give strings or integers as keys of spaces.")
            return {"dict": [[key, _encode(inner, f"{path}[{key!r}]")] for key, inner in space.items()]}
        case tuple():
            return {"tuple": [_encode(inner, f"{path}[{place}]") for place, inner in enumerate(space)]}
    raise ConfigError(f"{path} is a {type(space).__name__}: expected a space, or a dict or tuple of spaces.")


def _decode(held: Json, path: str) -> Spaces:
    try:
        match held:
            case {"box": {"shape": list(shape), "dtype": str(name), "low": low, "high": high}}:
                dtype = getattr(torch, name)
                kind = torch.empty(0, dtype=dtype).numpy().dtype
                return Box(_array(low, shape, kind), _array(high, shape, kind), dtype)
            case {"discrete": {"n": int(n), "start": int(start)}}:
                return Discrete(n, start)
            case {"multi_discrete": {"sizes": list(sizes), "starts": list(starts)}}:
                return MultiDiscrete(tuple(sizes), tuple(starts))
            case {"multi_binary": {"shape": list(shape)}}:
                return MultiBinary(tuple(shape))
            case {"dict": list(pairs)}:
                return {key: _decode(inner, f"{path}[{key!r}]") for key, inner in pairs}
            case {"tuple": list(parts)}:
                return tuple(_decode(inner, f"{path}[{place}]") for place, inner in enumerate(parts))
    except ConfigError:
        raise
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"this is no spec: {path} cannot be read: {error}.") from error
    raise ConfigError(
        f"this is no spec: {path} is {str(held)[:100]}; expected one of box, discrete, multi_discrete, multi_binary, "
        "dict and tuple."
    )


def _bound(bound: np.ndarray[Any, Any]) -> Json:
    values = [_number(value) for value in bound.ravel().tolist()]
    return values[0] if len(set(values)) == 1 else values


def _number(value: float) -> float | str:
    """JSON has no infinities."""
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _array(bound: Json, shape: list[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    values = bound if isinstance(bound, list) else [bound] * math.prod(shape)
    # A float's words are "inf" and "-inf"; integers stay integers, since float64 does not hold all of 64 bits.
    return np.array([float(value) if isinstance(value, str) else value for value in values], dtype).reshape(shape)
