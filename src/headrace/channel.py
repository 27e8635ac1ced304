"""How roles talk: channels, lanes, weights, groups, and the laws that every placement keeps.

A *role* is a function that a placement runs beside others. Roles share nothing; what moves between them moves through
the objects described here, which a *crew* hands out and which are passed to a role as arguments:

    with Processes().crew(seed=1) as crew:              # or Inline(), Threads()
        lanes = crew.lanes(2, like=(0, 0.0))            # a channel per actor, one reader
        crew.start(actor, lanes, copies=2)              # actor(lanes) puts into lanes[role().rank]
        for rank, item in enumerate(lanes.take_each()):
            ...

The laws (tests/placements keeps them on every placement):

- A channel has one writer and one reader. An end belongs to the first (role, rank) that uses it; a new incarnation of
  that role inherits it; anybody else gets a ConfigError.
- Items arrive in the order they were put. `put` copies: what the writer does to its item afterwards reaches nobody.
- At most `capacity` items lie in a channel; `put` waits for room, and nothing is ever dropped.
- A take is a view, valid until the next take of that channel returns. `clone()` keeps it.
- Every wait ends: by an item (or room), by `Closed` (the channel was closed, its other end has finished, or the crew
  stops), by `RoleFailed` in the driver, or by `Stalled` when its timeout has passed. A wait has no timeout of its own:
  slow is not dead.
- What a role computes depends on the seed and on what it takes, never on the placement.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch
    from numpy.random import SeedSequence
    from torch import Tensor

__all__ = [
    "Activity",
    "Beat",
    "Channel",
    "Crew",
    "End",
    "Group",
    "Interval",
    "Lanes",
    "Member",
    "Note",
    "Placement",
    "Role",
    "Taken",
    "Weights",
    "role",
    "wait",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Activity:
    """What one channel, weights store, group or role has done in an interval.

    name: as given to the crew, "collect[1]" for a role. kind: "channel", "weights", "group" or "role".
    items, bytes: moved (put, published or reduced; for a role, all that it put and published).
    busy: seconds spent working (for a role) or copying tensors (for the others). starved: seconds in which its reader
    waited for input. blocked: seconds in which its writer waited for room. For a role the three sum to its life.
    held: items that lie in a channel now, capacity: how many can; 0 for the others.
    """

    name: str
    kind: str
    items: int
    bytes: int
    busy: float
    starved: float
    blocked: float
    held: int = 0
    capacity: int = 0


class Interval(NamedTuple):
    """What everything in a crew did since the timeline was asked for last."""

    seconds: float
    activities: tuple[Activity, ...]


class Taken(NamedTuple):
    """An item that `Lanes.take_any` took, and the rank of the lane that it lay in."""

    rank: int
    item: Any


@dataclass(frozen=True)
class Note:
    """What is published with a set of weights: the version, and small named values such as progress."""

    version: int
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True)
class Member:
    """One life of one role in a crew. pid: of its process; of the driver where it shares the driver's process."""

    name: str
    rank: int
    of: int
    incarnation: int
    pid: int


class End(Protocol):
    """One end of a channel, to be waited for: ready when taking (or putting) would not wait."""

    @property
    def waiter(self) -> Role:
        """The role whose end this is."""

    def ready(self) -> bool: ...


class Channel(Protocol[T]):
    """A bounded queue from one writer to one reader. A handle: a name and a layout, bound to memory at first use."""

    name: str
    capacity: int

    def put(self, item: T, timeout: float | None = None) -> None:
        """Copy the item into a free slot and hand it over; wait while the channel is full.

        Raises ShapeError when the item is not shaped as `like`, Closed, and Stalled after `timeout` seconds.
        """

    def reserve(self, timeout: float | None = None) -> T:
        """The next free slot itself, to be filled in place and handed over by `commit()`. Its content is undefined."""

    def commit(self) -> None:
        """Hand over the slot that `reserve()` gave."""

    def take(self, timeout: float | None = None, device: str | torch.device | None = None) -> T:
        """The oldest item, as a view that is valid until the next take of this channel returns.

        With `device`, a copy on that device instead, made in one piece. Raises Closed once the channel is closed and
        empty, and Stalled after `timeout` seconds.
        """

    def close(self) -> None:
        """No more puts. What lies in the channel can still be taken."""

    def deliveries(self) -> Iterator[int]:
        """For the writer: the number of the item to put next, again and again until the channel is closed.

        A restarted role goes on where its channel stands.
        """

    @property
    def control(self) -> int:
        """One integer that the reader sets and the writer reads without waiting (0 at first)."""

    @control.setter
    def control(self, word: int) -> None: ...

    @property
    def delivered(self) -> int:
        """How many items have been put, earlier runs (`start=`) included."""

    @property
    def taken(self) -> int:
        """How many items have been taken, earlier runs (`start=`) included."""

    @property
    def to_take(self) -> End:
        """This channel as something to `wait` for until an item can be taken."""

    @property
    def to_put(self) -> End:
        """This channel as something to `wait` for until there is room."""

    def statistics(self) -> Activity:
        """What this channel has done since it was made."""


class Lanes(Protocol[T]):
    """A channel per writer, all read by one role: how many become one without sharing a lock."""

    name: str

    def __len__(self) -> int: ...
    def __getitem__(self, rank: int) -> Channel[T]: ...
    def __iter__(self) -> Iterator[Channel[T]]: ...

    def take_each(self, timeout: float | None = None) -> list[T]:
        """One item of every lane, in rank order. The same views as `take`."""

    def take_any(self, timeout: float | None = None) -> Taken:
        """The next item of a lane that has one, fair among the lanes: (rank, item).

        Closed lanes are passed over; raises Closed when all are closed and empty.
        """

    @property
    def to_take(self) -> tuple[End, ...]:
        """All lanes as something to `wait` for."""

    def close(self) -> None:
        """Close every lane."""


class Weights(Protocol):
    """Versions of a network (or any tree of tensors), kept in a fixed number of banks. Never a queue.

    With `max_lag + 1` banks every exact version can be pulled under the protocol of the synchronous plans: version v
    is published only after item v - 1 was taken from every lane, and a pull is complete before its item is put.
    """

    name: str

    def publish(self, source: Any, version: int, **note: Any) -> None:
        """Copy the tensors of `source` (module, Struct or tree) from any device into the next bank, as this version."""

    def pull(
        self, target: Any, version: int | None = None, at_least: int | None = None, timeout: float | None = None
    ) -> Note:
        """Copy a version into the tensors of `target`: exactly `version`, or the newest that is `at_least` that.

        Without either, the newest. Waits until it is published. Never returns a torn copy. Raises ConfigError when
        the exact version has been overwritten, Closed and Stalled.
        """

    @property
    def latest(self) -> int:
        """The newest version, without waiting."""

    def history(self) -> list[tuple[Note, list[Tensor]]]:
        """Copies of all versions held, oldest first: what `crew.weights(history=…)` begins from."""

    def statistics(self) -> Activity:
        """What this store has done since it was made."""


class Group(Protocol):
    """Several copies of one role, and perhaps the driver, that compute together: each waits for all."""

    name: str
    size: int

    @property
    def rank(self) -> int:
        """The rank of the role that asks; the last one for the driver."""

    @property
    def arrived(self) -> int:
        """How many ranks have come to the next collective already, without waiting."""

    def mean(self, flat: Tensor, weight: float = 1.0, out: Tensor | None = None) -> Tensor:
        """The mean of every rank's vector [N], weighted, summed in rank order: the same bits in every rank.

        out: where to store it, which may be the vector itself; None: in new memory. A rank of weight 0 takes part and
        adds nothing, whatever its vector holds. Raises ShapeError when the vector has more bytes than `like`, or when
        another rank came with a vector of another length or dtype, or with another call; ConfigError when all weights
        are 0, Closed when a rank has finished.
        """

    def gather(self, flat: Tensor) -> Tensor:
        """Every rank's vector [N] of numbers, in rank order [size, N]: the same in every rank. Raises as `mean`."""

    def barrier(self) -> None:
        """Return once every rank has come here."""

    def statistics(self) -> Activity:
        """What this group has done since it was made."""


class Crew(Protocol):
    """The roles of one run and what joins them; a with-block that no role outlives.

    The first failure is raised in the driver, at its next wait or at the end of the block, with the role's own
    traceback. Leaving the block closes every channel and ends every role.
    """

    def __enter__(self) -> Crew: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def channel(self, capacity: int = 1, like: Any = None, start: int = 0, name: str | None = None) -> Channel[Any]:
        """A channel whose slots are shaped like `like`: a Struct, or a tree of tensors and numbers.

        Without `like` it carries small values that are pickled (up to 4 KiB).
        """

    def lanes(
        self, copies: int, capacity: int = 1, like: Any = None, start: int | Sequence[int] = 0, name: str | None = None
    ) -> Lanes[Any]:
        """A channel per writer. start: how many items each lane has carried in an earlier run."""

    def weights(
        self,
        source: Any,
        banks: int = 1,
        history: Sequence[tuple[Note, Sequence[Tensor]]] = (),
        name: str | None = None,
        version: int = 0,
        **note: Any,
    ) -> Weights:
        """A store for versions of `source`, which it holds as that version, or whatever `history` holds."""

    def group(self, size: int, like: Tensor | None = None, name: str | None = None) -> Group:
        """A group of `size` copies of one role, or of size − 1 and the driver. like: the longest vector [N]."""

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        copies: int = 1,
        name: str | None = None,
        device: str | Sequence[str] = "cpu",
        threads: int = 1,
    ) -> tuple[Member, ...]:
        """Run `function(*args)` as a role, `copies` times. Function and arguments are copied on every placement.

        device: what role().device says, one for all or one each. threads: torch threads of each.
        """

    def restart(self, member: Member) -> Member:
        """End this role if it lives and start its next incarnation from what was shipped; its failure is forgiven."""

    def join(self, *members: Member, timeout: float | None = None) -> None:
        """Wait until these roles (all, if none is named) have returned."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The current life of every role, in the order they were started."""

    def timeline(self) -> Interval:
        """What every role, channel, weights store and group has done since the last call."""


class Placement(Protocol):
    """Where roles run. A frozen value: `Inline()`, `Threads()`, `Processes()`."""

    def crew(self, seed: int = 0) -> Crew:
        """A crew whose roles draw their seeds from this one."""


class Beat(Protocol):
    """What a role calls before each thing that could hang, with the numbers that say which; see `Role.watch`."""

    def __call__(self, *numbers: int) -> None:
        """A beat begins, and the one before is over. Some tenths of a microsecond; ConfigError if they do not fit."""

    def idle(self) -> None:
        """The last beat is over, and nothing is done that could hang."""


class Role(Protocol):
    """What `role()` tells a function about itself."""

    name: str
    rank: int
    of: int
    incarnation: int
    device: str

    @property
    def stopping(self) -> bool:
        """Whether the crew is ending; a role that never waits should look at this."""

    @property
    def seed(self) -> SeedSequence:
        """SeedSequence((crew seed, role, rank, incarnation)): give it to a generator of your own."""

    def share_of(self, total: int) -> range:
        """This copy's share of `total` things: consecutive, in rank order, sizes differing by at most one."""

    def clock(self) -> float:
        """Seconds of the placement's clock: monotonic; virtual on Inline, where it moves only when all roles wait."""

    def sleep(self, seconds: float) -> None:
        """Let `seconds` of the placement's clock pass, while other roles run. Raises Closed if the crew stops."""

    def heartbeat(self, text: str) -> None:
        """Say what the role is doing; a failure report repeats the last one."""

    def watch(self, doing: str, within: float | None = None, advice: str = "") -> Beat:
        """A function to call before each thing that could hang; a role has one, and the next call replaces it.

        `beat = role().watch("adding {} to counter {}", within=60.0)`, then `beat(1, 17)`, `beat(2, 17)`, `beat.idle()`.
        A beat lasts until the next one, until `beat.idle()`, or until this role waits. One that lasts longer than
        `within` seconds is a failure: `RoleFailed` in the driver says what the role was doing, and `advice`, what to do
        if it was slow only. On Processes the role is killed; a thread is left behind. A failure of any kind repeats the
        last beat. Nobody watches the driver's own beats, nor can see that a thread keeps the interpreter lock.

        doing: what to print after "has been", with a {} for each number, six at most. within: None for no limit.
        Raises ConfigError for a text or a limit that is none.
        """

    def wait(self, *ends: End, timeout: float | None = None) -> list[End]:
        """See `headrace.channel.wait`."""


class _Contexts(threading.local):
    """The roles that this thread plays, by crew: one in a role's own thread, one for each open crew in a driver."""

    def __init__(self) -> None:
        self.of_crew: dict[str, Role] = {}


_contexts = _Contexts()


def enter(crew: str, context: Role) -> None:
    """Let this thread play a role in that crew. For placements."""
    _contexts.of_crew[crew] = context


def leave(crew: str) -> None:
    """This thread plays no role in that crew any more. For placements."""
    _contexts.of_crew.pop(crew, None)


def context_in(crew: str, name: str) -> Role:
    """The role that this thread plays in that crew, asked for by the handle `name`."""
    context = _contexts.of_crew.get(crew)
    if context is None:
        raise ConfigError(
            f"{name!r} was used outside its crew: this thread plays no role in it, or the with-block has ended. "
            "Use it inside `with placement.crew()`, in the thread that opened it, or pass it to a role as an argument."
        )
    return context


def role() -> Role:
    """The role that is running: its rank, its share, its clock. In the driver of an open crew, the driver's own.

    Raises ConfigError outside a crew.
    """
    if not _contexts.of_crew:
        raise ConfigError("role() was called outside a crew. Call it in a function given to crew.start(…).")
    return next(reversed(_contexts.of_crew.values()))


def wait(*ends: End, timeout: float | None = None) -> list[End]:
    """Wait until one of several ends is ready, and return all that are, in the order given.

    `wait(*lanes.to_take, results.to_put)`. A closed channel is ready: the take or put will say so. Raises Stalled after
    `timeout` seconds, Closed when the crew stops, ConfigError without an end or with ends of several crews.
    """
    waiters = {id(end.waiter): end.waiter for end in ends}
    if len(waiters) != 1:
        raise ConfigError(f"wait(…) got {len(ends)} ends in {len(waiters)} crews; give at least one, all of one crew.")
    return next(iter(waiters.values())).wait(*ends, timeout=timeout)
