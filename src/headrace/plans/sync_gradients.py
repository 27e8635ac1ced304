"""Gradients move, and everybody waits: DD-PPO. Every worker steps environments and learns, all with equal weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.actor import Actor
from headrace.channel import Group, Lanes, Note, Placement, role
from headrace.data import Rollout
from headrace.envs.base import Env
from headrace.errors import ConfigError, HeadraceError
from headrace.learner import Learner
from headrace.plans.checks import check_actors, check_counts, check_fresh, check_run
from headrace.plans.schedule import DIGITS, Journal, Schedule, Turn
from headrace.report import Report
from headrace.tally import Told

__all__ = ["SyncGradients"]

SHORTEST = 0.25
"""Of a rollout that is cut: the share of its steps that it has at least (§5.1 of the paper)."""


@dataclass(frozen=True)
class SyncGradients:
    """Every worker learns from its own rollout, with gradients that are averaged over all (Wijmans et al. 2020).

    Decentralized distributed PPO, arXiv:1911.00357. Nobody owns the weights: all workers begin with equal ones and
    take equal steps. The last worker is whoever calls `run`, with its own learner.
    """

    workers: int = 2
    """Roles that step environments and learn; one of them is the caller."""
    num_envs: int = 8
    """Environments of all workers together; each worker has an equal share."""
    num_steps: int = 128
    """Steps of a rollout."""
    cut_off: float | None = None
    """When this share of the workers have their rollouts, the others hand in what they have; None: all wait."""
    verify_every: int = 100
    """Updates after which it is checked again that the weights of all workers are equal to the bit."""
    env_timeout: float | None = 300.0
    """Seconds that to make the environments, a reset or a step of another worker than the caller may take before it
    counts as hanging; None: any."""

    def __post_init__(self) -> None:
        check_counts(self, workers=1, num_envs=1, num_steps=1, verify_every=1)
        check_actors(self.workers, self.num_envs, self.env_timeout, "workers")
        if self.cut_off is not None and not 0 < self.cut_off <= 1:
            raise ConfigError(f"cut_off={self.cut_off!r}: give a share of the workers above 0, up to 1, or None.")

    @property
    def recorded(self) -> bool:
        """Whether what is learned depends on time: such a run writes a schedule."""
        return self.cut_off is not None

    def run(
        self,
        learner: Learner,
        env: Env,
        place: Placement,
        *,
        env_steps: int,
        horizon: int | None = None,
        state: Mapping[str, Any] | None = None,
        journal: Callable[[str], object] | None = None,
        schedule: Schedule | None = None,
    ) -> Iterator[Report]:
        """Learn until so many environment steps were learned from, and report every update.

        The learner is this worker's, and ends with what all have learned. Of several devices, worker i computes on the
        one of number i modulo their count.
        horizon: the environment steps at which schedules end, if not at the last one; a run in several parts gives the
        same to each. state: a report's `snapshot()`, to go on from. The roles live as long as the iterator: close it,
        or use it up.

        journal, schedule: of a run with `cut_off`, how long each rollout was; see `AsyncBatches.run`. Without it the
        seed alone says what is learned, and a schedule is refused.
        """
        check_fresh(learner.method, self)
        share = self.num_envs // self.workers
        learner.method.check(self.num_steps, share)
        check_run(learner, env, env_steps, horizon, state, holds=("learner",))
        if schedule is not None and self.cut_off is None:
            raise ConfigError("a run without cut_off has no schedule: run it again with its seed.")
        return self._run(learner, env, place, env_steps, horizon or env_steps, state, journal, schedule)

    def _run(
        self,
        learner: Learner,
        env: Env,
        place: Placement,
        env_steps: int,
        horizon: int,
        state: Mapping[str, Any] | None,
        write: Callable[[str], object] | None,
        schedule: Schedule | None,
    ) -> Iterator[Report]:
        if state is not None:
            learner.load_state(state["learner"])
        running = True
        heading = self._heading(learner, horizon)
        if schedule is not None:
            schedule.check(heading)
        journal = None if write is None or self.cut_off is None else Journal(write, heading)
        lengths = None if schedule is None else [turn.rows for turn in schedule.turns]

        def snapshot(version: int) -> dict[str, Any]:
            if not running or learner.version != version:
                raise ConfigError(f"the plan has gone on from the report of version {version}; ask at that report.")
            return {"learner": learner.state()}

        with place.crew(learner.seed) as crew:
            longest = torch.zeros(learner.longest // 4)
            group = crew.group(self.workers, longest, name="workers")
            like = learner.example(self.num_steps, self.num_envs // self.workers)
            lanes = crew.lanes(max(1, self.workers - 1), like=Told.of(like), name="told")
            if self.workers > 1:
                given = learner.maker, [str(device) for device in learner.devices], learner.state()
                limits = env_steps, horizon, lengths
                crew.start(work, self, env, *given, *limits, group, lanes, copies=self.workers - 1)
            worker = Worker(self, learner, env, env_steps, horizon, lengths, group, learner.version)
            try:
                with worker.actor(None) as actor:
                    while learner.env_steps < env_steps:
                        with _one_thread():
                            rollout = worker.collect(actor)
                        if rollout is None:  # the schedule goes no further
                            return
                        batch = learner.prepare(rollout)
                        rows = worker.agree(rollout)
                        for lane in lanes if self.workers > 1 else ():
                            learner.hear_of(lane.take())
                        if journal is not None:
                            for rank, made in enumerate(rows):
                                journal.add(Turn(rank, learner.version, "learned", made))
                        report = worker.update(batch)
                        if journal is not None:
                            journal.updated(learner.version, learner.digest())
                        if schedule is not None:
                            schedule.check_weights(learner.version, learner.digest())
                        cut = sum(made < self.num_steps for made in rows) / self.workers
                        yield replace(
                            report,
                            metrics=report.metrics if self.cut_off is None else {**report.metrics, "perf/cut": cut},
                            state=partial(snapshot, learner.version),
                            crew=crew,
                        )
            finally:
                running = False

    def _heading(self, learner: Learner, horizon: int) -> dict[str, Any]:
        """What a run depends on besides the lengths of its rollouts, as far as a plan can tell."""
        plan = {name: value for name, value in asdict(self).items() if name not in ("env_timeout", "verify_every")}
        digest = learner.digest()[:DIGITS]
        return {"seed": learner.seed, "start": learner.version, "weights": digest, "horizon": horizon, "plan": plan}


class Worker:
    """What the caller and the roles do alike, in the same order, so that no collective is left alone.

    Each update takes, beside the means that the method takes: `agree`, in which all tell how much they have collected,
    and at its end another gathering, in which all tell what they have learned from, and with what weights they end.
    lengths: of the rollouts of all workers, update after update, as a schedule has them.
    """

    def __init__(
        self,
        plan: SyncGradients,
        learner: Learner,
        env: Env,
        env_steps: int,
        horizon: int,
        lengths: Sequence[int] | None,
        group: Group,
        start: int,
    ) -> None:
        self._plan, self._learner, self._env, self._group = plan, learner, env, group
        self.env_steps, self._horizon, self._lengths, self._start = env_steps, horizon, lengths, start
        self._enough = None if plan.cut_off is None else max(1, math.ceil(plan.cut_off * plan.workers))
        self._shortest = max(1, math.ceil(SHORTEST * plan.num_steps))

    def actor(self, watch: Any) -> Actor:
        """This worker's environments, which its own network acts in."""
        plan, learner, rank = self._plan, self._learner, self._group.rank
        mine = range(plan.num_envs * rank // plan.workers, plan.num_envs * (rank + 1) // plan.workers)
        method = learner.method.behaviour(mine, plan.num_envs)
        seed = learner.seed, self._start, role().incarnation
        return Actor(
            method, learner.acting, self._env, mine, plan.num_steps, seed, rank, watch=watch, timeout=plan.env_timeout
        )

    def collect(self, actor: Actor) -> Rollout | None:
        """The next rollout; None where a schedule ends before it."""
        learner, plan = self._learner, self._plan
        progress = min(1.0, learner.env_steps / self._horizon)
        learner.anneal(progress)
        actor.heed(Note(learner.version, {"progress": progress}))
        number = learner.version
        if self._lengths is not None:
            place = (number - self._start) * plan.workers
            if place + plan.workers > len(self._lengths):
                return None
            rows = self._lengths[place + self._group.rank]
            return actor.rollout(number, stop=lambda made: made >= rows)
        if self._enough is None or plan.workers == 1:
            return actor.rollout(number)
        return actor.rollout(number, stop=self._are_enough)

    def _are_enough(self, made: int) -> bool:
        """Whether so many rows are to be handed in, since others wait."""
        assert self._enough is not None
        return made >= self._shortest and self._group.arrived >= self._enough

    def agree(self, rollout: Rollout) -> list[int]:
        """Count the environment steps of all workers, and return the rows of each one's rollout."""
        rows, steps = int((rollout.version[:, 0] >= 0).sum()), int(rollout.env_steps.sum())
        self._others = 0
        if self._plan.workers == 1:
            return [rows]
        counts = self._group.gather(torch.tensor([rows, steps]))
        self._others = int(counts[:, 1].sum()) - steps
        return [int(count) for count in counts[:, 0]]

    def update(self, batch: Any) -> Report:
        """Learn from this worker's batch along with all others. Raises HeadraceError if that leaves unequal weights."""
        learner, plan = self._learner, self._plan
        if plan.workers == 1:
            return learner.update(batch)
        before = learner.samples_learned
        report = learner.update(batch, self._mean)
        verifies = learner.version % plan.verify_every == 0
        digest = int(learner.digest()[:15], 16) if verifies else 0
        learned = self._group.gather(torch.tensor([learner.samples_learned - before, digest]))
        if verifies:
            check_equal(learned[:, 1].tolist(), learner.version)
        learner.samples_learned = before + int(learned[:, 0].sum())
        return replace(report, samples_learned=learner.samples_learned)

    def count_others(self) -> None:
        """Count what other workers have collected, where it is not heard from them."""
        self._learner.env_steps += self._others

    def _mean(self, vector: Tensor, weight: Tensor | float) -> Tensor:
        return self._group.mean(vector, float(weight), vector if self._learner.owns(vector) else None)


def work(
    plan: SyncGradients,
    env: Env,
    make: Callable[..., Learner],
    devices: Sequence[str],
    state: Mapping[str, Any],
    env_steps: int,
    horizon: int,
    lengths: Sequence[int] | None,
    group: Group,
    lanes: Lanes[Told],
) -> None:
    """A worker that is not the caller."""
    me = role()
    start = int(state["counters"]["version"])
    learner = make(devices=(devices[me.rank % len(devices)],), stream=(me.rank, start))
    learner.load_state({**state, "rng": learner.state()["rng"]})
    worker = Worker(plan, learner, env, env_steps, horizon, lengths, group, start)
    with worker.actor(me.watch) as actor:
        while learner.env_steps < env_steps:
            rollout = worker.collect(actor)
            if rollout is None:
                return
            batch = learner.prepare(rollout)
            lanes[me.rank].put(Told.of(rollout))
            worker.agree(rollout)
            worker.count_others()
            worker.update(batch)


def check_equal(digests: Sequence[int], version: int) -> None:
    """Raise HeadraceError if the weights of some ranks are not those of most, and name them."""
    usual = max(digests, key=digests.count)
    if others := [str(rank) for rank, digest in enumerate(digests) if digest != usual]:
        raise HeadraceError(
            f"after update {version} the weights of rank {', '.join(others)} of {len(digests)} are not those of the "
            "others. All workers need the same processor, PyTorch and method, and nobody but the learner may change "
            "weights."
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Act with one torch thread, as every role does, and leave the caller's count as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
