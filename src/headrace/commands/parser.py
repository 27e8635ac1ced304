"""The arguments of the smaller commands: what argparse does, with this library's errors and the nearest names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from headrace.errors import ConfigError
from headrace.settings import literal, nearest

__all__ = ["Parser", "count", "environment_arguments", "seed"]


class Parser(argparse.ArgumentParser):
    """Takes flags with dashes or underscores. Raises ConfigError, which says what came and what was expected."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"headrace {name}", description=description, allow_abbrev=False)
        self._name = name

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments by name."""
        known, unknown = self.parse_known_args([_dashed(word) for word in argv])
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        for word in unknown:
            name = word.partition("=")[0]
            near = f"; nearest: {', '.join(nearest(name, flags))}" if word.startswith("-") else ""
            self.error(f"{name} is an argument too many{near}")
        return known

    def add_policy(self, seed_of: str) -> None:
        """The arguments that say whose policy it is, and the seed, of what that is."""
        self.add_argument("run", metavar="RUN", help='the folder of a run, its name in runs/, or "latest"')
        self.add_argument(
            "--checkpoint", type=_checkpoint, default="last", metavar="WHICH", help='"last" (default), "best" or a step'
        )
        self.add_argument("--seed", type=seed, metavar="N", help=f"{seed_of} (default: the run's)")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self._name}: {message}. {self.prog} --help tells more.")


def environment_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words without `--env.KEY VALUE`, and those values by key, converted as they read: numbers, true, text."""
    rest, found = [], {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--env."):
            rest.append(word)
            continue
        given = value if equals else next(words, None)
        if given is None:
            raise ConfigError(f"{flag} came without a value: expected one after it, as in {flag} 5.")
        found[flag.removeprefix("--env.").replace("-", "_")] = literal(given)
    return rest, found


def count(text: str) -> int:
    """A number from 1 on, such as 20, 1e5 or 100_000."""
    return _whole(text, least=1)


def seed(text: str) -> int:
    """A number from 0 on."""
    return _whole(text, least=0)


def _checkpoint(text: str) -> Any:
    return text if text in ("last", "best") else seed(text)


def _whole(text: str, least: int) -> int:
    try:
        number = float(text)
        if number < least or number != int(number):
            raise ValueError
    except (OverflowError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on") from None
    return int(text) if text.isdecimal() else int(number)  # a float does not hold all digits of a long one


def _dashed(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word
