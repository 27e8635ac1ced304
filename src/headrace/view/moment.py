"""What a view shows: a run's heading, and how the run stands at one moment. Plain numbers, and JSON both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Evaluation", "Header", "Machine", "Moment", "Queue", "Stage"]


@dataclass(frozen=True)
class Header:
    """What is known of a run before it begins, in words that a person reads."""

    method: str
    """As on the command line: "ppo"."""
    env: str
    plan: str
    """Its name, and then its settings: "sync-batches actors 2 num_envs 8"."""
    place: str
    device: str
    """Where the learner's network is: "cpu", "cuda:0"."""
    preset: str
    """The preset's name; empty where none fits."""
    folder: str
    """The run folder; empty where the run keeps nothing."""
    seed: int
    total_timesteps: int
    threshold: float | None
    """The return at which the environment counts as solved, where it has one."""

    def to_json(self) -> dict[str, Any]:
        """This heading as a dict that `json.dumps` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Header:
        """The heading that `to_json` wrote. Raises KeyError when a field is missing."""
        return cls(**{name: found[name] for name in _names(cls)})


@dataclass(frozen=True)
class Stage:
    """What one copy of a role did in an interval.

    per_second: items that it put or published. busy, starved, blocked: shares of the interval in which it worked,
    waited for input and waited for room; they sum to 1.
    """

    name: str
    """The role, "collect" or "driver", without its rank."""
    rank: int
    per_second: float
    busy: float
    starved: float
    blocked: float


@dataclass(frozen=True)
class Queue:
    """One channel in an interval: items put a second, and how full it was when looked at, as a share of its room."""

    name: str
    per_second: float
    fill: float
    """Items in it / capacity: one sample, or the mean of several; 0 to 1."""
    capacity: int
    """Items."""


@dataclass(frozen=True)
class Machine:
    """What the processes of a run use of their machine."""

    cpu: float
    """Cores that they keep busy: 1.5 is one and a half."""
    cores: int
    """Cores that they may use: a container's, where it has fewer than its machine."""
    rss_mb: float
    """Resident memory of all of them, in MB (10**6 bytes)."""
    shm_mb: float | None
    """Shared memory that the run holds, in MB; None where it is unknown."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation's returns: mean, standard deviation and number of the episodes, and when it was, in env steps."""

    mean: float
    std: float
    episodes: int
    env_steps: int


@dataclass(frozen=True)
class Moment:
    """How a run stands. Counters are of the whole run, earlier lives included; rates and shares are of the interval."""

    seconds: float
    """Since the run began, earlier lives included."""
    interval: float
    """Seconds that the stages, the queues and the machine were measured over."""
    env_steps: int
    updates: int
    gradient_steps: int
    samples_learned: int
    total_timesteps: int
    steps_per_second: float
    """Environment steps learned from per second, over the interval."""
    return_mean100: float | None
    """Mean return of the last 100 training episodes; None before one has ended."""
    best_return: float | None
    """The highest that `return_mean100` has been."""
    episodes_finished: int
    running_return: float | None
    """Mean return so far of the episodes that go on; None where it is unknown."""
    running_length: float | None
    evaluation: Evaluation | None
    """The last one."""
    lag_p50: float
    """Of the last batch's steps, in updates."""
    lag_p95: float
    lag_max: int
    dropped: dict[str, int]
    """Environment steps that were never learned from, by reason."""
    replay_ratio: float
    """Samples learned per environment step."""
    stages: tuple[Stage, ...]
    queues: tuple[Queue, ...]
    machine: Machine
    restarts: int
    """Roles that were started again."""
    verdict: str | None
    """What holds the run up, in a line (`headrace.view.verdict`); None while that cannot be said."""

    def to_json(self) -> dict[str, Any]:
        """This moment as a dict that `json.dumps` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Moment:
        """The moment that `to_json` wrote, also after it went through JSON. Raises KeyError when a field is missing."""
        fields = {name: found[name] for name in _names(cls)}
        fields["evaluation"] = found["evaluation"] and Evaluation(**found["evaluation"])
        fields["stages"] = tuple(Stage(**stage) for stage in found["stages"])
        fields["queues"] = tuple(Queue(**queue) for queue in found["queues"])
        fields["machine"] = Machine(**found["machine"])
        return cls(**fields)


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]
