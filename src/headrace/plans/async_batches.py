"""Batches of experience move, and nobody waits: IMPALA, APPO. First come, first served, with a lag that is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from headrace.actor import Actor
from headrace.channel import Channel, Lanes, Placement, Weights, role
from headrace.data import Rollout
from headrace.envs.base import Env
from headrace.errors import ConfigError
from headrace.learner import Learner
from headrace.method import Method
from headrace.plans.arrivals import NEWEST, Ages, Arrivals, Repeated, Rules, begun
from headrace.plans.checks import check_actors, check_counts, check_fresh, check_run
from headrace.plans.schedule import DIGITS, Journal, Schedule, Turn
from headrace.report import Report

__all__ = ["AsyncBatches"]


@dataclass(frozen=True)
class AsyncBatches:
    """The learner takes rollouts as they come, and learns from every few; actors pull the newest weights for each.

    A rollout that acted with version v is learned from at version v + max_lag at the latest. `on_stale` says how.
    """

    actors: int = 2
    """Roles that step environments."""
    num_envs: int = 8
    """Environments of all actors together; each actor has an equal share."""
    num_steps: int = 32
    """Steps of a rollout."""
    batch_rollouts: int = 2
    """Rollouts, each of one actor, that make a batch."""
    max_lag: int = 4
    """Updates that a rollout's weights may be behind the learner's when it is learned from."""
    on_stale: Literal["wait", "cut", "drop"] = "wait"
    """Where a slow actor would break that bound: wait for it, cut its rollout short, or drop and count the rollout."""
    passes: int = 1
    """Updates on every batch."""
    env_timeout: float | None = 300.0
    """Seconds that to make the environments, a reset or a step may take before it counts as hanging; None: any."""

    def __post_init__(self) -> None:
        check_counts(self, actors=1, num_envs=1, num_steps=1, batch_rollouts=1, max_lag=0, passes=1)
        if self.on_stale not in ("wait", "cut", "drop"):
            raise ConfigError(f'on_stale={self.on_stale!r}: choose "wait", "cut" or "drop".')
        if self.max_lag < self.passes - 1:
            raise ConfigError(
                f"max_lag={self.max_lag}, passes={self.passes}: the last pass over a batch comes {self.passes - 1} "
                f"updates after the first one. Give a max_lag of {self.passes - 1} at least."
            )
        check_actors(self.actors, self.num_envs, self.env_timeout)

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
        or use it up.

        journal: is given the schedule of this run as lines of text, as it goes. schedule: what such lines were read to.
        The run is then that run again, bit for bit, on any placement, as far as the schedule goes. Raises ConfigError
        for a schedule of other settings, and where an update comes to other weights.
        """
        check_fresh(learner.method, self)
        share = self.num_envs // self.actors
        learner.method.check(self.num_steps, self.batch_rollouts * share)
        check_run(learner, env, env_steps, horizon, state, holds=("learner", "weights"))
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
        start, running = learner.version, True
        heading = self._heading(learner, horizon)
        if schedule is not None:
            schedule.check(heading)
        journal = None if write is None else Journal(write, heading)

        def snapshot(version: int) -> dict[str, Any]:
            if not running or learner.version != version:
                raise ConfigError(f"the plan has gone on from the report of version {version}; ask at that report.")
            return {"learner": learner.state(), "weights": weights.history()[-1:]}

        with place.crew(learner.seed) as crew:
            progress = min(1.0, learner.env_steps / horizon)
            banks = 2 if schedule is None else schedule.banks  # the newest, and the one that is being written
            weights = crew.weights(learner.acting, banks, name="weights", version=start, progress=progress)
            columns = self.num_envs // self.actors
            like, seed = learner.example(self.num_steps, columns), (learner.seed, start)
            turns: Arrivals[Rollout] | Repeated[Rollout]
            if schedule is None:
                turns = Arrivals(self._rules, crew, like)
            else:
                turns = Repeated(self.actors, crew, like, schedule.turns)
            ends = weights, turns.starts, turns.lanes
            crew.start(collect, self, learner.method, learner.acting, env, seed, *ends, copies=self.actors)
            batch = learner.example(self.num_steps, self.batch_rollouts * columns)
            places = batch.split(columns, "B")
            ages = Ages(role().clock, start)
            try:
                while learner.env_steps < env_steps:
                    learner.anneal(learner.env_steps / horizon)
                    filled = self._fill(places, turns, learner, journal)
                    if filled is None:  # the schedule goes no further
                        return
                    told = {**ages.tell(filled), **turns.tell()}
                    prepared, lags = learner.prepare(batch), None
                    for number in range(self.passes):
                        report = learner.update(prepared)
                        progress = min(1.0, learner.env_steps / horizon)
                        weights.publish(learner.acting, learner.version, progress=progress)
                        ages.published(learner.version)
                        if number == self.passes - 1:
                            turns.advance()
                        if journal is not None:
                            journal.updated(learner.version, learner.digest())
                        if schedule is not None:
                            schedule.check_weights(learner.version, learner.digest())
                        lags = report.lags if lags is None else lags + 1  # a later pass learns an update later
                        yield replace(
                            report,
                            lags=lags,
                            more=number < self.passes - 1,
                            metrics={**report.metrics, **told},
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

    @property
    def _rules(self) -> Rules:
        return Rules(self.actors, self.batch_rollouts, self.max_lag, self.num_steps, self.on_stale, self.passes)

    def _heading(self, learner: Learner, horizon: int) -> dict[str, Any]:
        """What a run depends on besides its turns, as far as a plan can tell."""
        plan = {name: value for name, value in asdict(self).items() if name != "env_timeout"}
        digest = learner.digest()[:DIGITS]
        return {"seed": learner.seed, "start": learner.version, "weights": digest, "horizon": horizon, "plan": plan}

    def _fill(
        self,
        places: Sequence[Rollout],
        turns: Arrivals[Rollout] | Repeated[Rollout],
        learner: Learner,
        journal: Journal | None,
    ) -> list[Turn] | None:
        """Copy rollouts into all places of the batch, and return whose; None where a schedule ends before that."""
        filled: list[Turn] = []
        while len(filled) < len(places):
            taken = turns.take(learner.version)
            if taken is None:
                return None
            turn, rollout = taken
            if journal is not None:
                journal.add(turn)
            if turn.fate == "learned":
                places[len(filled)].copy_(rollout)
                filled.append(turn)
            else:
                learner.dropped["stale"] = learner.dropped.get("stale", 0) + int(rollout.env_steps.sum())
        return filled


def collect(
    plan: AsyncBatches,
    method: Method,
    net: nn.Module,
    env: Env,
    seed: tuple[int, ...],
    weights: Weights,
    starts: Lanes[tuple[int, int]],
    lanes: Lanes[Rollout],
) -> None:
    """The actor: a rollout whenever it may start one, with the newest weights that there are then."""
    me = role()
    mine = me.share_of(plan.num_envs)
    method = method.behaviour(mine, plan.num_envs)
    seed, watch = (*seed, me.incarnation), me.watch
    start, lane = starts[me.rank], lanes[me.rank]
    with Actor(method, net, env, mine, plan.num_steps, seed, me.rank, watch=watch, timeout=plan.env_timeout) as actor:
        for number in lane.deliveries():
            version, rows = start.take()
            actor.load(weights, version=None if version == NEWEST else version)
            start.control = begun(number, actor.version)
            if plan.on_stale == "cut":
                lane.put(actor.rollout(number, stop=partial(enough, lane, number, rows)))
            else:
                lane.put(actor.rollout(number))


def enough(lane: Channel[Rollout], number: int, rows: int, made: int) -> bool:
    """Whether a rollout that has so many rows is to be handed in."""
    return made >= rows or lane.control > number
