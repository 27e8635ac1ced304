"""Unpickling that leaves alone the classes that this process has."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from cloudpickle import cloudpickle

__all__ = ["loads"]

_SKELETONS = {"_make_skeleton_class": 4, "_make_skeleton_enum": 5}  # where among the arguments the class's id stands


class _Unpickler(pickle.Unpickler):
    """Of what cloudpickle made.

    A class that travels by value has an id, and cloudpickle gives the class that has it already, but writes over its
    attributes: functions of its own become copies that know other globals and other closures. Here they stay.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known: list[type] = []

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == cloudpickle.__name__:
            if name in _SKELETONS:
                return partial(self._class, found, _SKELETONS[name])
            if name == "_class_setstate":
                return partial(self._fill, found)
        return found

    def _class(self, make: Callable[..., type], position: int, *args: Any) -> type:
        known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[position])
        if known is None:
            return make(*args)
        self._known.append(known)
        return known  # type: ignore[no-any-return]

    def _fill(self, fill: Callable[[type, Any], type], made: type, state: Any) -> type:
        return made if made in self._known else fill(made, state)


def loads(data: bytes | memoryview) -> Any:
    """The value that these bytes were made from; classes of ours in it are those that we have, as they are."""
    return _Unpickler(io.BytesIO(data)).load()
