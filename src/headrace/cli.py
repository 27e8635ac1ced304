"""The program `headrace`: a verb, then what it is done to.

Loads only what the verb needs: its help, `list` and what is mistyped answer without torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from headrace.errors import CheckpointError, ConfigError, HeadraceError, RoleFailed
from headrace.settings import nearest

__all__ = ["main"]

COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "train": ("train", "METHOD ENV [flags]", "learn, and keep a run folder"),
    "watch": ("watch", "[RUN]", "the live view of a running or finished run"),
    "eval": ("eval", "RUN", "play with what a run learned, and say the return"),
    "enjoy": ("enjoy", "RUN", "see it play"),
    "resume": ("resume", "RUN", "go on with a run that was stopped"),
    "rerun": ("rerun", "RUN", "execute an asynchronous run again, bit for bit"),
    "plot": ("plot", "RUN...", "draw returns, also of several runs"),
    "list": ("listing", "[methods|plans|places|envs]", "what there is"),
    "doctor": ("doctor", "", "what is installed, and what this machine has"),
    "check-env": ("check_env", "ENV", "everything that is wrong with an environment"),
}
"""A verb's module in `headrace.commands`, its arguments, and what it does."""

EXAMPLES = """\
headrace train ppo CartPole-v1                      learns to balance a pole, in seconds
headrace enjoy latest                               shows it
headrace train ppo CartPole-v1 --plan.actors 2 --place processes
headrace train ppo --help                           every setting, what it means and its default
headrace list                                       methods, plans and places
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, without the program's name, and return the exit status.

    0: done. 2: what was given cannot be used; only the message is printed. 1: a run failed; its message and traceback.
    130 and 143: stopped by Ctrl-C or SIGTERM. `--traceback` anywhere shows the traceback of what was given, too.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    wants_traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        status = _dispatch(words)
        sys.stdout.flush()
        return status
    except (ConfigError, CheckpointError) as error:
        if wants_traceback:
            traceback.print_exc()
        else:
            print(f"headrace: {error}", file=sys.stderr)
        return 2
    except HeadraceError as error:
        print(_story(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(words: list[str]) -> int:
    if not words:
        print(EXAMPLES, end="")
        return 0
    verb, *rest = words
    if verb in ("--help", "-h", "help"):
        print(_help(), end="")
        return 0
    if verb == "--version":
        print(f"headrace {version('headrace')}")
        return 0
    if verb not in COMMANDS:
        near = ", ".join(nearest(verb, COMMANDS))
        raise ConfigError(f"no command {verb!r}. Nearest: {near}. All: headrace --help")
    # The module of an environment or a method that somebody names lies where they stand, as for `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    status: int = importlib.import_module(f"headrace.commands.{COMMANDS[verb][0]}").main(rest)
    return status


def _help() -> str:
    usages = {verb: f"headrace {verb} {usage}".rstrip() for verb, (_, usage, _) in COMMANDS.items()}
    width = max(map(len, usages.values()))
    lines = [f"  {usages[verb]:<{width}}  {does}" for verb, (_, _, does) in COMMANDS.items()]
    return "\n".join(
        [
            "Distributed reinforcement learning, written once and run anywhere.",
            "",
            *lines,
            "",
            "RUN is a folder, its name in runs/, or latest. Every command takes --help, and --traceback, which shows",
            "where in the program a mistake was found.",
            "",
            "Examples:",
            *(f"  {line}" for line in EXAMPLES.splitlines()),
            "",
        ]
    )


def _story(error: HeadraceError) -> str:
    """What failed and the traceback of what failed itself, not of the program around it."""
    own = error.traceback if isinstance(error, RoleFailed) else ""
    if not own and error.__cause__ is not None:
        own = "".join(traceback.format_exception(error.__cause__, chain=False))
    elif not own and not isinstance(error, RoleFailed):  # a role that was killed, or hangs, has none
        own = "".join(traceback.format_exception(error, chain=False))
    return f"headrace: {error}\n\n{own}".rstrip()
