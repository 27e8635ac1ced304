"""Settings are the fields of frozen dataclasses: what they are called and mean, and their values from text or YAML.

Flags and configuration files go through the same conversion, and what is wrong is collected: `refuse` says it all in
one ConfigError.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from headrace.errors import ConfigError

__all__ = [
    "MISSING",
    "Flag",
    "Setting",
    "Unfit",
    "arguments",
    "convert",
    "fields",
    "made",
    "nearest",
    "refuse",
    "shown",
    "yaml_file",
]

T = TypeVar("T")

MISSING = dataclasses.MISSING
"""The default of a setting that has none."""

_NOTHING = ("none", "null")
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Unfit(ValueError):
    """A value is not what a setting takes. The text says what was expected."""


@dataclass(frozen=True)
class Setting:
    """A field of a dataclass, as a person meets it."""

    name: str
    type: Any
    default: Any
    help: str
    """The docstring under the field, on one line."""


@dataclass(frozen=True)
class Flag:
    """A flag of a command line."""

    typed: str
    """As it was written: "--learning-rate"."""
    key: str
    """What it stands for: "learning_rate", "plan.actors"."""
    value: str | None
    """None: nothing was given with it."""


def fields(cls: type[Any]) -> dict[str, Setting]:
    """The settings of a dataclass, by name, in its order. Raises ConfigError for another class."""
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"{cls.__name__} is no dataclass: expected one, whose fields are its settings.")
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # of a class whose types are imported for type checkers only
        hints = {}
    documented = _docstrings(cls)
    parameters = inspect.signature(cls).parameters
    found = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default: Any = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        elif default is MISSING and field.name in parameters:  # of a class with an __init__ of its own
            given = parameters[field.name].default
            default = MISSING if given is inspect.Parameter.empty else given
        found[field.name] = Setting(field.name, hints.get(field.name, Any), default, documented.get(field.name, ""))
    return found


def convert(value: object, kind: Any) -> Any:
    """The text of a flag, or a value of a YAML file, as this type. Raises Unfit.

    1e5 and 100_000 are integers, "none" is None where the type allows it, "64,64" a tuple, "package.module:name" a
    function.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, parts)
    if origin is Literal:
        text = value.strip() if isinstance(value, str) else value
        for choice in parts:
            if text == choice and type(text) is type(choice):
                return choice
        raise Unfit(expected(kind))
    if origin is tuple or origin is list or kind in (tuple, list):
        return _sequence(value, kind)
    if origin is collections.abc.Callable or kind is collections.abc.Callable:
        return value if callable(value) else _imported(value)
    if kind is bool:
        found = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
    elif kind is int:
        found = _integer(value)
    elif kind is float:
        found = _number(value)
    elif kind is str:
        found = value
    elif kind is Any or kind is object:
        return literal(value)
    elif kind is type(None):
        if value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING):
            return None
        raise Unfit(expected(kind))
    else:
        found = literal(value) if isinstance(kind, type) or origin else value
        kind = origin or kind
    if not isinstance(kind, type) or not isinstance(found, kind):
        raise Unfit(expected(kind))
    return found


def expected(kind: Any) -> str:
    """What a type takes, in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(expected, parts))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is tuple or origin is list:
        inner = expected(parts[0]).removeprefix("an ").removeprefix("a ") if parts else "value"
        return f"{inner}s with commas between them"
    if origin is collections.abc.Callable or kind is collections.abc.Callable:
        return "package.module:name"
    named = {int: "an integer", float: "a finite number", bool: "true or false", str: "text", type(None): "none"}
    return named.get(kind) or f"a {getattr(kind, '__name__', kind)}, which only a Python program can give"


def literal(value: object) -> Any:
    """What a text says by itself: a number, true, false, none, a list, a dictionary, or the text. Values stay."""
    if not isinstance(value, str):
        return value
    text, word = value.strip(), value.strip().lower()
    if word in _NOTHING:
        return None
    if word in ("true", "false"):
        return word == "true"
    if re.fullmatch(r"[+-]?[\d_.]+(e[+-]?\d+)?", word):
        is_whole = "." not in word and "e-" not in word
        number = _integer(text) if is_whole else _number(text)
        return value if number is None else number
    if text[:1] in ("[", "(", "{", "'", '"'):
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError) as error:
            raise Unfit("a list, dictionary or text as Python writes it") from error
    return value


def shown(value: object) -> str:
    """A value as it is written in a flag."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(shown, value)) or "()"
    if callable(value):
        return f"{value.__module__}:{getattr(value, '__qualname__', value)}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names that look most like this one, best first: those that are close, or else the least far ones."""
    names = list(known)
    return difflib.get_close_matches(name, names, count, 0.6) or difflib.get_close_matches(name, names, count, 0.0)


def made(make: Callable[..., T], base: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[T | None, list[str]]:
    """make(**base, **given), and every ConfigError of it: what caused one is left out, and the rest is tried.

    None with the errors that can be mended by no single one of the given values.
    """
    given = dict(given)
    left_out: list[str] = []
    problems: list[str] = []
    while True:
        try:
            return make(**{**base, **given}), problems
        except ConfigError as error:
            message = str(error)
        if not any(re.search(rf"\b{name}\b", message) for name in left_out):
            problems.append(message)  # else it speaks of a value that was refused already
        named = sorted(given, key=lambda name: (re.search(rf"\b{name}\b", message) is None, name))
        others = {name: _complaint(make, base, given, name) for name in named}
        culprit = next((name for name in named if not others[name]), None)
        culprit = culprit or next((name for name in named if others[name] != message), None)
        if culprit is None:
            return None, problems
        left_out.append(culprit)
        del given[culprit]


def refuse(problems: Sequence[str]) -> None:
    """Raise one ConfigError that says all problems, if there are any."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n".join([f"{len(problems)} problems:", *(f"  - {problem}" for problem in problems)]))


def arguments(argv: Sequence[str], switches: Collection[str], short: Mapping[str, str]) -> tuple[list[str], list[Flag]]:
    """The words and the flags of a command line. Dashes and underscores in flags are the same.

    The word after a flag is its value, unless it begins with a dash and is no number, or the flag is a switch.
    short: what flags with one dash stand for. Raises ConfigError for others.
    """
    words: list[str] = []
    flags: list[Flag] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            words.append(word)
            continue
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            key = name[2:].replace("-", "_")
        elif name in short:
            key = short[name]
        else:
            raise ConfigError(f"{name}: unknown. Flags have two dashes; short ones are {', '.join(short)}.")
        takes = key not in switches and rest and not _is_flag(rest[0])
        flags.append(Flag(name, key, value if equals else rest.pop(0) if takes else None))
    return words, flags


def yaml_file(path: str | Path) -> dict[str, Any]:
    """What a YAML or JSON file holds: names and values. Raises ConfigError for one that cannot be read."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config {path} holds {type(content).__name__}: expected names with values.")
    return {str(name): value for name, value in content.items()}


@functools.cache
def _docstrings(cls: type[Any]) -> Mapping[str, str]:
    """The string under each field, of the class and of those that it inherits from."""
    found = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # built in, or typed into a prompt
            continue
        (declared,) = tree.body
        body = declared.body if isinstance(declared, ast.ClassDef) else []
        for field, below in pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not re.match(r"-[\d.]", word)


def _complaint(make: Callable[..., object], base: Mapping[str, Any], given: Mapping[str, Any], without: str) -> str:
    """What is wrong without one of the values; empty: nothing."""
    try:
        make(**{**base, **{name: value for name, value in given.items() if name != without}})
    except ConfigError as error:
        return str(error)
    return ""


def _one_of(value: object, kinds: Sequence[Any]) -> Any:
    """A value as the first type that takes it. Text comes last, since it takes everything."""
    for kind in sorted(kinds, key=lambda kind: (kind is not type(None), kind is str)):
        try:
            return convert(value, kind)
        except Unfit:
            continue
    raise Unfit(" or ".join(map(expected, kinds)))


def _sequence(value: object, kind: Any) -> Any:
    parts = typing.get_args(kind)
    if isinstance(value, str):
        text = value.strip()
        if (text[:1], text[-1:]) in (("[", "]"), ("(", ")")):
            text = text[1:-1]
        value = [part.strip() for part in text.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise Unfit(expected(kind))
    if len(parts) == 2 and parts[1] is Ellipsis:
        parts = (parts[0],) * len(value)
    elif typing.get_origin(kind) is list:
        parts = parts * len(value)
    elif not parts:
        parts = (Any,) * len(value)
    if len(parts) != len(value):
        raise Unfit(f"{len(parts)} values with commas between them")
    try:
        items = [convert(item, part) for item, part in zip(value, parts, strict=True)]
    except Unfit as error:
        why = "" if str(error) == expected(parts[0]) else f": {error}"
        raise Unfit(expected(kind) + why) from error
    return items if (typing.get_origin(kind) or kind) is list else tuple(items)


def _integer(value: object) -> int | None:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = _number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _imported(value: object) -> Any:
    """The function or class that "package.module:name" names."""
    module, colon, name = value.strip().partition(":") if isinstance(value, str) else ("", "", "")
    if not colon:
        raise Unfit("package.module:name")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the module does while it is imported
        raise Unfit(f"package.module:name; {module} cannot be imported: {error!r}") from error
    if not callable(found):
        raise Unfit(f"package.module:name; {module} has no function or class {name!r}, or it cannot be called")
    return found
