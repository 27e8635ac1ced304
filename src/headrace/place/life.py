"""A role's life: the post it fills, how it is played to its end, and how it fails."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import headrace.channel
from headrace.channel import Member
from headrace.errors import Closed, RoleFailed
from headrace.place import board as b
from headrace.place.board import Board
from headrace.place.context import Context

__all__ = ["Failure", "Post", "describe", "hang", "play"]


@dataclass
class Post:
    """A place in the crew that a role fills: what was shipped to it, and which life it is in."""

    index: int
    name: str
    rank: int
    of: int
    device: str
    threads: int
    payload: Any  # what `_launch` needs to start it again
    incarnation: int = 0
    pid: int = 0

    def member(self) -> Member:
        """This post's current life."""
        return Member(self.name, self.rank, self.of, self.incarnation, self.pid)

    def __str__(self) -> str:
        return f"{self.name}[{self.rank}]"


@dataclass
class Failure:
    """How a role failed: with an exception, by a signal, by leaving with an exit code, or by hanging in a beat."""

    post: Post
    incarnation: int
    what: str
    signal: int | None = None
    exit_code: int | None = None
    traceback: str = ""
    cause: BaseException | None = field(default=None, repr=False)
    heard: str = ""  # what it said last

    def error(self) -> RoleFailed:
        """The error that the driver raises."""
        post = self.post
        life = f" (incarnation {self.incarnation})" if self.incarnation else ""
        error = RoleFailed(
            f"{post}{life} {self.what}"
            + (f"{'' if self.what.endswith('.') else '.'} Last heard: {self.heard}" if self.heard else ""),
            role=post.name,
            rank=post.rank,
            incarnation=self.incarnation,
            signal=self.signal,
            exit_code=self.exit_code,
            traceback=self.traceback,
        )
        error.__cause__ = self.cause
        return error


def hang(board: Board, post: Post, end: str) -> Failure:
    """The failure of a role that hangs in a beat. end: what has become of it."""
    limit, advice = board.get(post.index, b.WITHIN) / 1e9, board.advice(post.index)
    what = f"has been {board.doing(post.index)} for more than {limit:g} s, and {end}" + (advice and f"; {advice}")
    return Failure(post, post.incarnation, what, heard=board.said(post.index))


def play(context: Context, crew: str, function: Callable[[], Any]) -> BaseException | None:
    """Run a role to its end: what it raised, None when it returned or was told to stop."""
    board, index = context.board, context.index
    headrace.channel.enter(crew, context)
    board.set(index, b.STATE, b.RUNNING)
    try:
        function()
    except Closed:
        pass
    except BaseException as error:  # whatever it is, it is the role's end, and the driver's to know
        return error
    finally:
        board.set(index, b.ENDED_AT, time.monotonic_ns())
        headrace.channel.leave(crew)
    # First the state, then the bells: who is woken looks at the state.
    board.set(index, b.STATE, b.ENDED)
    context.close_ends()
    board.bell(b.DRIVER).ring()
    return None


def describe(error: BaseException) -> tuple[str, str]:
    """What a role's exception is called in a message, and its traceback as text."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"raised {name}: {error}", "".join(traceback.format_exception(error))
