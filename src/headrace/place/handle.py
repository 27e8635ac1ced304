"""Handles: what a role holds of a channel, a weights store or a group. A name and a place, bound at first use."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

from headrace.channel import context_in
from headrace.errors import Closed, ConfigError
from headrace.place import board as b
from headrace.place.context import Context

__all__ = ["HEADER_BYTES", "Handle", "shipped"]

HOLDERS = 512  # offset of a bit per role: whether the handle was shipped to it
HOLDERS_BYTES = (b.MAX_ROLES + 8) // 8
HEADER_BYTES = 768
CLOSED = 32  # word


class _Shipped(threading.local):
    def __init__(self) -> None:
        self.handles: list[Handle] | None = None


shipped = _Shipped()  # the handles that the pickler of this thread has met, while it is asked to note them


class Handle:
    """A name and a range of a crew's memory. Pickled, it holds no address; each role binds its own copy."""

    def __init__(self, crew: str, name: str, offset: int, nbytes: int) -> None:
        self.crew, self.name, self.offset, self.nbytes = crew, name, offset, nbytes
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        if shipped.handles is not None:
            shipped.handles.append(self)
        return {key: self.__dict__[key] for key in self.shipped_fields()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} {self.name!r}>"

    def shipped_fields(self) -> tuple[str, ...]:
        """The attributes that travel."""
        return ("crew", "name", "offset", "nbytes")

    def _reset(self) -> None:
        """The attributes of a handle that no role has used yet."""

    def unbind(self) -> None:
        """Let go of role and memory, when the role or its crew has ended."""
        state = {key: self.__dict__[key] for key in self.shipped_fields()}
        self.__dict__.clear()
        self.__setstate__(state)

    @cached_property
    def context(self) -> Context:
        """The role that uses this handle."""
        context = context_in(self.crew, self.name)
        assert isinstance(context, Context)
        return context

    @cached_property
    def memory(self) -> memoryview:
        """Its bytes, mapped into this process at the first use."""
        self.context.bound.append(self.unbind)
        return self.context.memory.view(self.offset, self.nbytes)

    @cached_property
    def words(self) -> memoryview[int]:
        """Its bytes as words."""
        return self.memory.cast("q")

    def note_holder(self, index: int) -> None:
        """Remember that this handle was shipped to that role."""
        self.memory[HOLDERS + index // 8] |= 1 << index % 8

    def claim(self, owner_word: int, life_word: int, what: str) -> None:
        """Make this role the owner of an end; an end belongs to the first (role, rank) that uses it."""
        me, words = self.context, self.words
        with me.memory.exclusive(self.offset + owner_word * 8):
            owner = words[owner_word]
            if owner not in (0, me.index + 1):
                raise ConfigError(
                    f"{self.name!r} has its {what} already: {me.board.name(owner - 1)}; {me.identity} cannot be "
                    "another one. A channel has one writer and one reader; for many writers take lanes, one for each."
                )
            if words[life_word] > me.incarnation:
                raise self.taken_over(words[life_word])
            words[life_word] = me.incarnation
            words[owner_word] = me.index + 1

    def taken_over(self, life: int) -> Closed:
        """The refusal of an old incarnation's late operation."""
        me = self.context
        return Closed(f"{self.name!r}: incarnation {life} of {me.identity} has taken over; this is {me.incarnation}")

    def owner(self, owner_word: int, what: str) -> str:
        """Who owns an end, for messages."""
        owner = self.words[owner_word]
        if not owner:
            return f"no {what} yet"
        board = self.context.board
        heard = board.heard(owner - 1)
        return f"its {what} is {board.name(owner - 1)}" + (f", last heard: {heard}" if heard else "")

    def orphaned(self, owner_word: int, verb: str) -> str:
        """Why nobody will ever use that end again, or the empty string."""
        board, owner = self.context.board, self.words[owner_word]
        if owner:
            return f"{board.name(owner - 1)} has finished" if board.get(owner - 1, b.STATE) == b.ENDED else ""
        # Not used yet: by the driver, which holds everything, or by a role that it was shipped to, it may still be.
        for index in (b.DRIVER, *self.holders()):
            if index != self.context.index and board.get(index, b.STATE) != b.ENDED:
                return ""
        return f"no other role that could {verb} it is running"

    def holders(self) -> list[int]:
        """The indices of the roles that this handle was shipped to."""
        return [index for index in self.context.board.roles if self.memory[HOLDERS + index // 8] >> index % 8 & 1]
