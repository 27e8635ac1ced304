"""Gradients move, and nobody waits: A3C. Workers compute gradients, and the owner of the weights applies each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.actor import Actor
from headrace.channel import Lanes, Placement, Weights, role
from headrace.data import Gradient
from headrace.envs.base import Env
from headrace.errors import ConfigError
from headrace.learner import Learner
from headrace.plans.arrivals import NEWEST, Ages, Arrivals, Repeated, Rules, begun
from headrace.plans.checks import check_actors, check_counts, check_fresh, check_run
from headrace.plans.schedule import DIGITS, Journal, Schedule, Turn
from headrace.report import Report
from headrace.struct import Struct, axes
from headrace.tally import Told

__all__ = ["AsyncGradients"]


class Sent(Told):
    """A gradient, with what is reported of it and of the rollout that it was computed from."""

    flat: Tensor = axes("N", torch.float32)
    weight: Tensor = axes("1", torch.float64)
    max_grad_norm: Tensor = axes("1", torch.float64)
    metrics: Tensor = axes("M", torch.float64)
    """In the order of their names."""
    moments: Tensor = axes("Q", torch.float64)
    """What running statistics are moved by."""


@dataclass(frozen=True)
class AsyncGradients:
    """Each worker computes the gradient of its own rollout; it is applied as it comes (Mnih et al. 2016).

    Asynchronous methods for deep reinforcement learning, arXiv:1602.01783, with one owner of the weights in place of
    memory that all write to. Whoever has sent a gradient goes on with the weights that it has moved, and waits for
    nobody else's.
    """

    workers: int = 2
    """Roles that step environments and compute gradients."""
    num_envs: int = 8
    """Environments of all workers together; each worker has an equal share."""
    num_steps: int = 16
    """Steps of a rollout."""
    batch_gradients: int = 1
    """Gradients whose mean makes a step."""
    max_lag: int | None = None
    """Updates that a gradient's weights may be behind when it is applied: others are held back for it; None: any."""
    env_timeout: float | None = 300.0
    """Seconds that to make the environments, a reset or a step may take before it counts as hanging; None: any."""

    def __post_init__(self) -> None:
        check_counts(self, workers=1, num_envs=1, num_steps=1, batch_gradients=1)
        if self.max_lag is not None:
            check_counts(self, max_lag=0)
        check_actors(self.workers, self.num_envs, self.env_timeout, "workers")

    @property
    def recorded(self) -> bool:
        """Whether what is learned depends on time: such a run writes a schedule."""
        return True

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

        horizon: the environment steps at which schedules end, if not at the last one; a run in several parts gives the
        same to each. state: a report's `snapshot()`, to go on from. The roles live as long as the iterator: close it,
        or use it up. Of several devices, worker i computes on the one of number i modulo their count.

        journal: is given the schedule of this run as lines of text, as it goes. schedule: what such lines were read to.
        The run is then that run again, bit for bit, on any placement, as far as the schedule goes. Raises ConfigError
        for a schedule of other settings, where an update comes to other weights, and for a method that learns from a
        batch in several gradient steps.
        """
        check_fresh(learner.method, self)
        share = self.num_envs // self.workers
        learner.method.check(self.num_steps, share)
        check_run(learner, env, env_steps, horizon, state, holds=("learner",))
        pattern = Pattern.of(learner, self.num_steps, share)
        return self._run(learner, env, place, env_steps, horizon or env_steps, state, journal, schedule, pattern)

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
        pattern: Pattern,
    ) -> Iterator[Report]:
        if state is not None:
            learner.load_state(state["learner"])
        start, running = learner.version, True
        heading = self._heading(learner, horizon)
        if schedule is not None:
            schedule.check(heading)
        journal = None if write is None else Journal(write, heading)

        def snapshot(version: int) -> dict[str, Any]:
            if not running or learner.version != version:
                raise ConfigError(f"the plan has gone on from the report of version {version}; ask at that report.")
            return {"learner": learner.state()}

        with place.crew(learner.seed) as crew:
            progress = min(1.0, learner.env_steps / horizon)
            banks = 2 if schedule is None else schedule.banks  # the newest, and the one that is being written
            weights = crew.weights(learner.net, banks, name="weights", version=start, progress=progress)
            turns: Arrivals[Sent] | Repeated[Sent]
            if schedule is None:
                rules = Rules(self.workers, self.batch_gradients, self.max_lag, self.num_steps, answered=True)
                turns = Arrivals(rules, crew, pattern.sent, "gradients")
            else:
                turns = Repeated(self.workers, crew, pattern.sent, schedule.turns, "gradients")
            given = learner.maker, [str(device) for device in learner.devices], start
            crew.start(work, self, env, *given, weights, turns.starts, turns.lanes, copies=self.workers)
            ages = Ages(role().clock, start)
            try:
                while learner.env_steps < env_steps:
                    learner.anneal(learner.env_steps / horizon)
                    mean, taken = Mean(pattern.names, self.batch_gradients), list[Turn]()
                    while len(taken) < self.batch_gradients:
                        found = turns.take(learner.version)
                        if found is None:  # the schedule goes no further
                            return
                        turn, sent = found
                        if journal is not None:
                            journal.add(turn)
                        learner.hear_of(sent)
                        mean.add(sent)
                        taken.append(turn)
                    said = {**ages.tell(taken), **turns.tell()}
                    report = learner.apply(*mean.result(), pattern.batch)
                    progress = min(1.0, learner.env_steps / horizon)
                    weights.publish(learner.net, learner.version, progress=progress)
                    ages.published(learner.version)
                    turns.advance()
                    if journal is not None:
                        journal.updated(learner.version, learner.digest())
                    if schedule is not None:
                        schedule.check_weights(learner.version, learner.digest())
                    yield replace(
                        report,
                        metrics={**report.metrics, **said},
                        state=partial(snapshot, learner.version),
                        crew=crew,
                    )
            except Exception:
                if journal is not None:
                    for turn in turns.under_way():
                        journal.add(turn)
                raise
            finally:
                running = False

    def _heading(self, learner: Learner, horizon: int) -> dict[str, Any]:
        """What a run depends on besides its turns, as far as a plan can tell."""
        plan = {name: value for name, value in asdict(self).items() if name != "env_timeout"}
        digest = learner.digest()[:DIGITS]
        return {"seed": learner.seed, "start": learner.version, "weights": digest, "horizon": horizon, "plan": plan}


@dataclass(frozen=True)
class Pattern:
    """What workers of this learner send, of zeros: how its slots are laid out. batch: as they learn from."""

    names: tuple[str, ...]
    sent: Sent
    batch: Struct

    @classmethod
    def of(cls, learner: Learner, num_steps: int, num_envs: int) -> Pattern:
        """Make a gradient of a rollout in which no row counts, with a learner of its own."""
        trial = learner.maker(devices=learner.devices[:1])
        rollout = trial.example(num_steps, num_envs)
        batch = trial.prepare(rollout)
        names, fields = compute(trial, batch)
        return cls(names, Sent.of(rollout, **fields), batch)


class Mean:
    """The mean of so many gradients and their metrics, by how many rows each is of, in the order of adding."""

    def __init__(self, names: Sequence[str], count: int) -> None:
        self._names, self._alone = names, count == 1
        self._moments: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, sent: Sent) -> None:
        """Take in a gradient. The only one stays where it is; of one of several nothing is looked at later."""
        weight = sent.weight.clone()
        self._moments.append(sent.moments.clone())
        self._norm = sent.max_grad_norm.clone()
        parts = [sent.flat, sent.metrics] if self._alone else [sent.flat * weight.float(), sent.metrics * weight]
        if self._sums:
            for held, part in zip(self._sums, [*parts, weight], strict=True):
                held.add_(part)
        else:
            self._sums = [*parts, weight]

    def result(self) -> tuple[Gradient, dict[str, float], Sequence[Tensor]]:
        """The mean gradient, the mean metrics, and the moments of each."""
        flat, metrics, weight = self._sums
        if not self._alone:
            flat, metrics = flat / weight.float(), metrics / weight
        gradient = Gradient(flat=flat, weight=weight, max_grad_norm=self._norm)
        return gradient, dict(zip(self._names, metrics.tolist(), strict=True)), self._moments


def compute(learner: Learner, batch: Struct) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The names of the metrics, and the fields of `Sent` that come of a batch."""
    gradient, metrics = learner.gradient(batch)
    return tuple(metrics), {
        "flat": gradient.flat,
        "weight": gradient.weight,
        "max_grad_norm": gradient.max_grad_norm,
        "metrics": torch.tensor([*metrics.values()], dtype=torch.float64),
        "moments": learner.moments(batch),
    }


def work(
    plan: AsyncGradients,
    env: Env,
    make: Callable[..., Learner],
    devices: Sequence[str],
    first: int,
    weights: Weights,
    starts: Lanes[tuple[int, int]],
    lanes: Lanes[Sent],
) -> None:
    """A worker: a rollout whenever it may start one, with the newest weights that there are then, and its gradient."""
    me = role()
    mine = me.share_of(plan.num_envs)
    learner = make(devices=(devices[me.rank % len(devices)],), stream=(me.rank, first))
    method = learner.method.behaviour(mine, plan.num_envs)
    start, lane, seed = starts[me.rank], lanes[me.rank], (learner.seed, first, me.incarnation)
    with Actor(
        method, learner.acting, env, mine, plan.num_steps, seed, me.rank, watch=me.watch, timeout=plan.env_timeout
    ) as actor:
        for number in lane.deliveries():
            asked, _ = start.take()
            note = weights.pull(learner.net, version=None if asked == NEWEST else asked)
            start.control = begun(number, note.version)
            learner.anneal(note["progress"])
            actor.heed(note)
            rollout = actor.rollout(number)
            _, fields = compute(learner, learner.prepare(rollout))
            lane.put(Sent.of(rollout, **fields))
