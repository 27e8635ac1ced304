"""What the crews of all placements have in common: handing out, starting, failing, ending, counting."""

from __future__ import annotations

import itertools
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor

import headrace.channel
from headrace.channel import Activity, Interval, Member, Note
from headrace.errors import Closed, ConfigError, RoleFailed, Stalled
from headrace.place import board as b
from headrace.place.banks import BankedWeights, WeightsLayout, weights_bytes
from headrace.place.board import Board
from headrace.place.context import Context, Identity
from headrace.place.layout import layout_of
from headrace.place.life import Failure, Post
from headrace.place.memory import Memory
from headrace.place.reduce import SharedGroup, group_bytes
from headrace.place.ring import RingChannel, RingLanes, channel_bytes
from headrace.place.shipping import ship

__all__ = ["BaseCrew"]

_numbers = itertools.count()

_log = logging.getLogger("headrace.place")


class BaseCrew(ABC):
    """A crew. A placement says how roles are launched, watched and ended, and how the driver waits."""

    def __init__(self, seed: int, poison: bool) -> None:
        self._process = os.getpid()
        self.id = f"{self._process}.{next(_numbers)}"
        self.seed, self._poison = seed, poison
        self.posts: list[Post] = []
        self._handles: list[RingChannel[Any] | BankedWeights | SharedGroup] = []
        self._names: set[str] = set()
        self._forgiven: set[tuple[int, int]] = set()
        self._last: dict[str, Activity] = {}
        self._lived: dict[int, tuple[float, float, float]] = {}  # what a role's earlier lives came to
        self._state = "new"

    # -- what a placement gives

    @abstractmethod
    def _enter(self) -> Memory:
        """Begin: the memory for everything that the crew hands out."""

    @abstractmethod
    def _context(self, identity: Identity) -> Context:
        """How a role of this placement waits."""

    @abstractmethod
    def _pack(self, data: bytes, name: str) -> Any:
        """Keep what is shipped where `_launch` finds it."""

    @abstractmethod
    def _launch(self, posts: Sequence[Post]) -> None:
        """Start these roles, and note their pids."""

    @abstractmethod
    def _failures(self) -> list[Failure]:
        """All failures of roles in their current life, first come first."""

    @abstractmethod
    def _finish(self, hurry: bool) -> None:
        """End every role that still runs, the crew being told to stop. hurry: without patience."""

    @abstractmethod
    def _end_life(self, post: Post) -> None:
        """Make sure that this role's current life is over."""

    @abstractmethod
    def look_after_roles(self) -> None:
        """Look after the roles while the driver waits."""

    def note_wait(self, seconds: float, what: str) -> None:
        """Log that the driver has waited for so long, and what each role said last."""
        heard = [f"{post}: {text}" for post in self.posts if (text := self.board.heard(post.index))]
        _log.info("waiting for data for %.0f s, to %s%s", seconds, what, "".join(f"; {each}" for each in heard))

    # -- the with-block

    def __enter__(self) -> Self:
        if self._state != "new":
            raise ConfigError("a crew is one with-block; make a new one with placement.crew(…).")
        self.memory = self._enter()
        self._state = "open"
        self.board = Board.create(self.memory)
        identity = Identity("driver", 0, 1, 0, "cpu", b.DRIVER, self.seed)
        self.board.begin(b.DRIVER, str(identity), 0, 0)
        self.board.set(b.DRIVER, b.STATE, b.RUNNING)
        self._asked = self.board.get(b.DRIVER, b.BEGAN)  # when the timeline was asked for last
        self.driver = self._context(identity)
        self.driver.overseer = self
        headrace.channel.enter(self.id, self.driver)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:  # a forked copy of the driver: the roles are not its own
            headrace.channel.leave(self.id)
            return
        try:
            self._stop()
            failures = self._unforgiven()
        finally:
            self._state = "closed"
            self.driver.let_go()
            headrace.channel.leave(self.id)
            self.memory.close()
        if not failures or isinstance(error, RoleFailed):
            return
        failure = failures[0].error()
        if error is None or isinstance(error, Closed | Stalled):
            raise failure from failure.__cause__
        error.add_note(f"Besides, {failure}")

    def _stop(self) -> None:
        """Tell all, wait for all. A second Ctrl-C takes away the patience, not the ending."""
        try:
            self.board.raise_alarm(b.STOPPING)
            for handle in self._handles:
                handle.close()
            self._finish(hurry=False)
        except KeyboardInterrupt:
            self._finish(hurry=True)
            raise

    # -- handing out

    def channel(self, capacity: int = 1, like: Any = None, start: int = 0, name: str | None = None) -> RingChannel[Any]:
        """See `headrace.channel.Crew.channel`."""
        return self._channel(0, capacity, like, start, self._name("channel", name))

    def lanes(
        self, copies: int, capacity: int = 1, like: Any = None, start: int | Sequence[int] = 0, name: str | None = None
    ) -> RingLanes[Any]:
        """See `headrace.channel.Crew.lanes`."""
        if copies < 1:
            raise ConfigError(f"lanes(copies={copies}): give at least one.")
        starts = [start] * copies if isinstance(start, int) else list(start)
        if len(starts) != copies:
            raise ConfigError(f"lanes({copies}, start=…): {len(starts)} starts for {copies} lanes; give one for each.")
        name = self._name("lanes", name)
        channels = [self._channel(k, capacity, like, begin, f"{name}[{k}]") for k, begin in enumerate(starts)]
        return RingLanes(name, channels)

    def _channel(self, lane: int, capacity: int, like: Any, start: int, name: str) -> RingChannel[Any]:
        self._check_open()
        if capacity < 1 or start < 0:
            raise ConfigError(f"{name}: capacity={capacity}, start={start}; a channel holds at least 1, from 0 on.")
        layout = layout_of(like)
        what = f"{name} ({capacity + 1} slots of {layout.nbytes:,} bytes)"
        offset = self.memory.allocate(channel_bytes(capacity, layout), what)
        channel: RingChannel[Any] = RingChannel(self.id, name, offset, lane, capacity, layout, self._poison)
        channel.begin(start)
        self._handles.append(channel)
        return channel

    def weights(
        self,
        source: Any,
        banks: int = 1,
        history: Sequence[tuple[Note, Sequence[Tensor]]] = (),
        name: str | None = None,
        version: int = 0,
        **note: Any,
    ) -> BankedWeights:
        """See `headrace.channel.Crew.weights`."""
        self._check_open()
        name = self._name("weights", name)
        if banks < 1:
            raise ConfigError(f"{name}: banks={banks}; give at least 1 (max_lag + 1).")
        layout = WeightsLayout(source)
        past = [(note, layout.checked(tensors)) for note, tensors in history] or [
            (Note(version, note), layout.tensors(source))
        ]
        what = f"{name} ({banks} banks of {layout.nbytes:,} bytes)"
        weights = BankedWeights(self.id, name, self.memory.allocate(weights_bytes(banks, layout), what), banks, layout)
        weights.begin(past[-banks:])
        self._handles.append(weights)
        return weights

    def group(self, size: int, like: Tensor | None = None, name: str | None = None) -> SharedGroup:
        """See `headrace.channel.Crew.group`."""
        self._check_open()
        name = self._name("group", name)
        if like is None:
            like = Tensor()
        if size < 1 or like.dim() != 1 or not like.is_floating_point():
            raise ConfigError(
                f"{name}: size={size}, like={list(like.shape)} {like.dtype}; give a size from 1 on, and a vector [N] "
                "of floats."
            )
        what = f"{name} ({size + 1} vectors of {like.nbytes:,} bytes)"
        offset = self.memory.allocate(group_bytes(size, like.numel(), like.dtype), what)
        group = SharedGroup(self.id, name, offset, size, like.numel(), like.dtype)
        self._handles.append(group)
        return group

    # -- roles

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        copies: int = 1,
        name: str | None = None,
        device: str | Sequence[str] = "cpu",
        threads: int = 1,
    ) -> tuple[Member, ...]:
        """See `headrace.channel.Crew.start`."""
        self._check_open()
        name = str(name or getattr(function, "__name__", type(function).__name__))
        devices = [device] * copies if isinstance(device, str) else list(device)
        if copies < 1 or threads < 1 or len(devices) != copies:
            raise ConfigError(
                f"{name}: copies={copies}, threads={threads}, device={device!r}; give "
                "at least one of each, and a device for each copy."
            )
        if len(self.posts) + copies > b.MAX_ROLES:
            raise ConfigError(
                f"a crew holds at most {b.MAX_ROLES} roles; with {name} it would be {len(self.posts) + copies}. Give "
                "fewer copies, each with more to do."
            )
        if any(post.name == name for post in self.posts):
            raise ConfigError(f"this crew has roles named {name!r} already; give name=… to tell them apart.")
        data, handles = ship(function, args, name)
        payload = self._pack(data, name)
        posts = []
        for rank in range(copies):
            post = Post(len(self.posts) + 1, name, rank, copies, devices[rank], threads, payload)
            self.board.begin(post.index, str(post), rank, 0)
            for handle in handles:
                handle.note_holder(post.index)
            self.posts.append(post)
            posts.append(post)
        self._launch(posts)
        return tuple(post.member() for post in posts)

    def restart(self, member: Member) -> Member:
        """See `headrace.channel.Crew.restart`."""
        self._check_open()
        post = self._post(member)
        if post.incarnation != member.incarnation:
            raise ConfigError(
                f"{post} lives in incarnation {post.incarnation}; incarnation {member.incarnation} is over."
            )
        self._end_life(post)
        self._forgiven.add((post.index, post.incarnation))
        self._lived[post.index] = self._life_so_far(post.index)
        post.incarnation += 1
        self.board.begin(post.index, str(post), post.rank, post.incarnation)
        if not self._unforgiven() and self.board.words[b.ALARM] == b.FAILURE:
            self.board.words[b.ALARM] = b.CALM
        self._launch([post])
        return post.member()

    def join(self, *members: Member, timeout: float | None = None) -> None:
        """See `headrace.channel.Crew.join`."""
        self._check_open()
        posts = [self._post(member) for member in members] or self.posts
        end = _ToEnd(self.board, posts)
        if self.board.words[b.ALARM]:
            self.driver.heed_alarm()
        if not end.ready():
            self.driver.until((end,), timeout)
        if self.board.words[b.ALARM]:
            self.driver.heed_alarm()

    @property
    def members(self) -> tuple[Member, ...]:
        """See `headrace.channel.Crew.members`."""
        return tuple(post.member() for post in self.posts)

    def timeline(self) -> Interval:
        """See `headrace.channel.Crew.timeline`."""
        now = time.monotonic_ns()
        totals = [handle.statistics() for handle in self._handles]
        moved: dict[int, tuple[int, int]] = {}
        for handle, total in zip(self._handles, totals, strict=True):
            if isinstance(handle, SharedGroup) or (writer := handle.writer_index()) is None:
                continue
            items, nbytes = moved.get(writer, (0, 0))
            moved[writer] = (items + total.items, nbytes + total.bytes)
        for index in self.board.roles:
            totals.append(
                Activity(self.board.name(index), "role", *moved.get(index, (0, 0)), *self._life_so_far(index))
            )
        nothing = {a.name: Activity(a.name, a.kind, 0, 0, 0.0, 0.0, 0.0) for a in totals}
        activities = tuple(_difference(total, {**nothing, **self._last}[total.name]) for total in totals)
        self._last = {total.name: total for total in totals}
        since, self._asked = self._asked, now
        return Interval((now - since) / 1e9, activities)

    def _life_so_far(self, index: int) -> tuple[float, float, float]:
        """Seconds in which a role was busy, starved and blocked, in all its lives."""
        board = self.board
        until = board.get(index, b.ENDED_AT) or time.monotonic_ns()
        waits = {word: board.get(index, word) for word in (b.STARVED, b.BLOCKED)}
        waiting = board.get(index, b.WAITING)
        if waiting:
            waits[waiting] += max(0, until - board.get(index, b.SINCE))
        busy = max(0, until - board.get(index, b.BEGAN) - sum(waits.values()))
        before = self._lived.get(index, (0.0, 0.0, 0.0))
        return before[0] + busy / 1e9, before[1] + waits[b.STARVED] / 1e9, before[2] + waits[b.BLOCKED] / 1e9

    # -- failures

    def _unforgiven(self) -> list[Failure]:
        return [f for f in self._failures() if (f.post.index, f.incarnation) not in self._forgiven]

    def raise_failure(self) -> None:
        """Raise the first failure of a role in its current life, if there is one."""
        failures = self._unforgiven()
        if failures:
            failure = failures[0].error()
            raise failure from failure.__cause__

    def _post(self, member: Member) -> Post:
        for post in self.posts:
            if (post.name, post.rank) == (member.name, member.rank):
                return post
        raise ConfigError(f"this crew has no role {member.name}[{member.rank}].")

    def _check_open(self) -> None:
        if self._state != "open":
            raise ConfigError(
                f"this crew is {self._state}: use it inside its with-block, `with placement.crew() as crew:`."
            )

    def _name(self, kind: str, name: str | None) -> str:
        if name is None:
            name = next(n for k in itertools.count() if (n := f"{kind}-{k}" if k else kind) not in self._names)
        if name in self._names:
            raise ConfigError(f"this crew has something named {name!r} already; give another name=….")
        self._names.add(name)
        return name


class _ToEnd:
    """The end of some roles as something for the driver to wait for."""

    word = b.STARVED

    def __init__(self, board: Board, posts: Sequence[Post]) -> None:
        self._board, self._posts = board, posts

    def missing(self) -> list[Post]:
        return [post for post in self._posts if self._board.get(post.index, b.STATE) != b.ENDED]

    def ready(self) -> bool:
        return not self.missing()

    def charge(self, nanoseconds: int) -> None:
        """Counted for the driver alone."""

    def orphaned(self) -> str:
        return ""

    def describe(self) -> str:
        return "see the end of " + ", ".join(map(str, self.missing()))


def _difference(now: Activity, before: Activity) -> Activity:
    return Activity(
        now.name,
        now.kind,
        now.items - before.items,
        now.bytes - before.bytes,
        max(0.0, now.busy - before.busy),
        max(0.0, now.starved - before.starved),
        max(0.0, now.blocked - before.blocked),
        now.held,
        now.capacity,
    )
