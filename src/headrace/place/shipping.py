"""Shipping: a function and its arguments as bytes that any process opens without importing the main script."""

from __future__ import annotations

import functools
import importlib.machinery
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import cloudpickle

from headrace.errors import ConfigError
from headrace.place.handle import Handle, shipped
from headrace.place.unpickling import loads

__all__ = ["ship", "unship"]

SMALL = 2000  # things looked at when an unpicklable one is searched


def ship(function: Callable[..., Any], args: tuple[Any, ...], name: str) -> tuple[bytes, list[Handle]]:
    """A role as bytes, and the handles that it was given. Raises ConfigError naming what cannot be shipped.

    Lambdas, closures and classes of `__main__` travel by value, and so does what was defined in a module that another
    process could not import.
    """
    shipped.handles = []
    try:
        return _dumps((function, args)), shipped.handles
    except Exception as error:
        path, culprit, reason = _culprit(
            {name: function, **{f"argument {k}": arg for k, arg in enumerate(args)}}, error
        )
        raise ConfigError(
            f"{name} cannot be shipped to a role: {path} is a {type(culprit).__qualname__}, which does not pickle "
            f"({reason}). Make it inside the role, or pass what it is made from."
        ) from error
    finally:
        shipped.handles = None


def unship(data: bytes | memoryview) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments, new copies each time, but for classes that this process has."""
    function, args = loads(data)
    return function, args


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    # cloudpickle blanks the file name; a role's traceback shall show the lines that its author wrote.
    build, args, *rest = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return build, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args), *rest


def _reduce_text_file(file: io.TextIOWrapper) -> Any:
    if file in (sys.stdout, sys.stderr):  # a role has its own
        return cloudpickle.Pickler.dispatch_table[io.TextIOWrapper](file)
    # cloudpickle would send a copy of what is left to read.
    raise pickle.PicklingError(f"cannot pickle the open file {file.name!r}")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes by value what another process could not import."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: _reduce_code, io.TextIOWrapper: _reduce_text_file}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            module = sys.modules.get(getattr(obj, "__module__", None) or "")
            if module is not None and not _importable(module.__name__):
                cloudpickle.register_pickle_by_value(module)
                try:
                    return super().reducer_override(obj)
                finally:
                    cloudpickle.unregister_pickle_by_value(module)
        return super().reducer_override(obj)


def _dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, protocol=5).dump(value)
        return file.getvalue()


@functools.cache
def _importable(name: str) -> bool:
    """Whether `import name` in a process with our path finds the module that we have under this name.

    It does not for what pytest or a notebook loaded from a file beside the path.
    """
    top = name.partition(".")[0]
    if top == "__main__" or top in sys.builtin_module_names:
        return True  # cloudpickle takes care of the one; the others are everywhere
    spec = importlib.machinery.PathFinder.find_spec(top)
    file = getattr(sys.modules[name], "__file__", None)
    if spec is None or file is None:
        return spec is not None
    return file == spec.origin or any(file.startswith(folder) for folder in spec.submodule_search_locations or ())


def _culprit(roots: dict[str, Any], error: Exception) -> tuple[str, Any, str]:
    """The deepest thing that does not pickle by itself: its path, itself, and what the pickler says of it."""
    path, thing, reason = "it", roots, str(error)
    children: Iterator[tuple[str, Any]] = iter(roots.items())
    seen: set[int] = set()
    while len(seen) < SMALL:
        for name, child in children:
            if id(child) in seen:
                continue
            seen.add(id(child))
            try:
                _dumps(child)
            except Exception as again:
                path = name if thing is roots else path + name
                thing, reason = child, str(again)
                children = _children(child)
                break
        else:
            break
    return path, thing, reason


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a thing holds, with how to get there."""
    if isinstance(thing, functools.partial):
        yield ".func", thing.func
        yield from ((f".args[{k}]", value) for k, value in enumerate(thing.args))
        yield from ((f".keywords[{key!r}]", value) for key, value in thing.keywords.items())
    if isinstance(thing, types.MethodType):
        yield ".__self__", thing.__self__
    if isinstance(thing, types.FunctionType):
        names = thing.__code__.co_freevars
        for name, cell in zip(names, thing.__closure__ or (), strict=True):
            try:
                yield f".<closure {name}>", cell.cell_contents
            except ValueError:  # an empty cell
                continue
        yield from ((f".<global {n}>", thing.__globals__[n]) for n in thing.__code__.co_names if n in thing.__globals__)
        yield from ((f".<default {k}>", value) for k, value in enumerate(thing.__defaults__ or ()))
    elif isinstance(thing, dict):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"[{k}]", value) for k, value in enumerate(thing))
    elif not isinstance(thing, types.ModuleType):
        yield from ((f".{key}", value) for key, value in getattr(thing, "__dict__", {}).items())
