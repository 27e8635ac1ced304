"""What an asynchronous run depended on besides its seed: a line of text for every rollout, in the order of taking.

    {"format": 1, "seed": 1, "start": 0, "horizon": 100000, "plan": {"actors": 4, …}} 5b2c7f0a
    2 17 learned 32 8d1e0b44        actor 2, weights of version 17, learned from, all 32 rows
    0 16 learned 9 c94a71f2         it was told to hand in what it had: 9 rows
    3 11 dropped 32 5533a0de        it came too late, and was not learned from
    = 18 3f5ac0d1 71c2e0ba          an update made version 18, which was published; its weights begin with this digest
    1 18 begun 32 01f7b3aa          it was under way when the run failed

The word at the end of a line is a checksum of all lines up to there. A rollout takes at most 64 bytes. Where gradients
move, such a line is of a gradient, and of the rollout that it was computed from.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from headrace.errors import ConfigError

__all__ = ["Journal", "Schedule", "Turn"]

FORMAT = 1
DIGITS = 8
"""Of a digest, which tell two sets of weights apart."""


class Turn(NamedTuple):
    """A rollout: who made it, with which weights, what became of it, and how many rows it has."""

    rank: int
    version: int
    fate: str
    rows: int


class Journal:
    """Writes a schedule, line after line, as the run goes. write: is given each line, without its end."""

    def __init__(self, write: Callable[[str], object], heading: Mapping[str, Any]) -> None:
        self._write, self._sum = write, 0
        self._line(json.dumps({"format": FORMAT, **heading}))

    def add(self, turn: Turn) -> None:
        """Note a rollout."""
        self._line("{} {} {} {}".format(*turn))

    def updated(self, version: int, digest: str) -> None:
        """Note an update. digest: of the weights that it made."""
        self._line(f"= {version} {digest[:DIGITS]}")

    def _line(self, text: str) -> None:
        self._sum = zlib.crc32(text.encode(), self._sum)
        self._write(f"{text} {self._sum:08x}")


@dataclass(frozen=True)
class Schedule:
    """A schedule as it was read. heading: the plan's settings, the seed, the version that the run began with."""

    heading: Mapping[str, Any]
    turns: tuple[Turn, ...]
    digests: Mapping[int, str]
    """How the digest of each version's weights begins."""

    @classmethod
    def read(cls, lines: Iterable[str]) -> Self:
        """The schedule in these lines, such as those of an open file.

        A last line that is not whole was cut off by the end of the process that wrote it, and is left out. Raises
        ConfigError for anything else that a journal did not write.
        """
        written = [line.rstrip("\n") for line in lines]
        total, heading, turns, digests = 0, None, [], {}
        for number, line in enumerate(written, 1):
            text, _, checksum = line.rpartition(" ")
            total = zlib.crc32(text.encode(), total)
            if checksum != f"{total:08x}":
                if number == len(written):
                    break
                raise ConfigError(
                    f"the schedule is damaged in line {number}: its checksum is {checksum!r}, expected {total:08x}. "
                    "A run can be rerun only from the schedule that it wrote."
                )
            if heading is None:
                heading = json.loads(text)
                if heading["format"] != FORMAT:
                    raise ConfigError(
                        f"the schedule has format {heading['format']}; this library reads {FORMAT}. Rerun it with the "
                        "library that wrote it."
                    )
                continue
            first, version, *rest = text.split()
            if first == "=":
                (digests[int(version)],) = rest
            else:
                fate, rows = rest
                turns.append(Turn(int(first), int(version), fate, int(rows)))
        if heading is None:
            raise ConfigError("the schedule is empty: the run that wrote it had not begun.")
        return cls(heading, tuple(turns), digests)

    def check(self, heading: Mapping[str, Any]) -> None:
        """Raise ConfigError if a run with this heading is not the one that wrote the schedule."""
        ours, theirs = _flat(heading), _flat(self.heading)
        found = [
            f"{name} was {theirs.get(name, 'unknown')}, is {ours.get(name, 'unknown')}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        if found:
            raise ConfigError(f"the schedule is of another run: {'; '.join(found)}. Rerun with the same settings.")

    def check_weights(self, version: int, digest: str) -> None:
        """Raise ConfigError if an update made other weights than it did when the schedule was written."""
        recorded = self.digests.get(version, digest)
        if not digest.startswith(recorded):
            raise ConfigError(
                f"update {version} made weights {digest[:DIGITS]}, and {recorded} when the schedule was written: from "
                "here on this is another run. Rerun it with the same settings, threads, processor and PyTorch."
            )

    @property
    def banks(self) -> int:
        """How many versions of the weights must be held for every rollout to find its own."""
        plan, version = self.heading["plan"], int(self.heading["start"])
        batch, passes = plan.get("batch_rollouts") or plan["batch_gradients"], plan.get("passes", 1)
        lag = taken = 0
        for turn in self.turns:
            lag = max(lag, version - turn.version)
            taken += turn.fate == "learned"
            if taken == batch:
                taken, version = 0, version + passes
        return lag + 1


def _flat(heading: Mapping[str, Any]) -> dict[str, Any]:
    """A heading with the plan's settings beside the others."""
    plan = {f"plan.{name}": value for name, value in heading["plan"].items()}
    return {**{name: value for name, value in heading.items() if name not in ("plan", "format")}, **plan}
