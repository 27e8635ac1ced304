"""Batches of experience move, and everybody waits: A2C, PPO; with `max_lag=1` acting overlaps learning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from headrace.actor import Actor
from headrace.channel import Lanes, Placement, Weights, role
from headrace.data import Rollout
from headrace.envs.base import Env
from headrace.errors import ConfigError
from headrace.learner import Learner
from headrace.method import Method
from headrace.plans.checks import check_actors, check_counts, check_fresh, check_run
from headrace.report import Report

__all__ = ["SyncBatches"]


@dataclass(frozen=True)
class SyncBatches:
    """The learner takes one rollout of every actor, in rank order, and learns from all of them together.

    Before its k-th rollout an actor takes weights of version exactly max(0, k - max_lag), so that what is computed
    depends on the seed alone.
    """

    actors: int = 1
    """Roles that step environments."""
    num_envs: int = 8
    """Environments of all actors together: adding actors changes no batch."""
    num_steps: int = 128
    """Steps of a rollout."""
    max_lag: int = 0
    """Updates that a rollout's weights are behind the learner's: 0 is lock-step, 1 lets acting overlap learning."""
    env_timeout: float | None = 300.0
    """Seconds that to make the environments, a reset or a step may take before it counts as hanging; None: any."""

    def __post_init__(self) -> None:
        check_counts(self, actors=1, num_envs=1, num_steps=1, max_lag=0)
        check_actors(self.actors, self.num_envs, self.env_timeout)

    def run(
        self,
        learner: Learner,
        env: Env,
        place: Placement,
        *,
        env_steps: int,
        horizon: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Iterator[Report]:
        """Learn until so many environment steps were learned from, and report every update.

        horizon: the environment steps at which schedules end, if not at the last one; a run in several parts gives the
        same to each. state: a report's `snapshot()`, to go on from. The roles live as long as the iterator: close it,
        or use it up.
        """
        check_fresh(learner.method, self)
        learner.method.check(self.num_steps, self.num_envs)
        check_run(learner, env, env_steps, horizon, state, holds=("learner", "weights"))
        return self._run(learner, env, place, env_steps, horizon or env_steps, state)

    def _run(
        self,
        learner: Learner,
        env: Env,
        place: Placement,
        env_steps: int,
        horizon: int,
        state: Mapping[str, Any] | None,
    ) -> Iterator[Report]:
        history = ()
        if state is not None:
            learner.load_state(state["learner"])
            history = state["weights"][-self.max_lag - 1 :]
        start, running = learner.version, True
        oldest = history[0][0].version if history else start  # nobody can act with weights from before

        def snapshot(version: int) -> dict[str, Any]:
            if not running or learner.version != version:
                raise ConfigError(f"the plan has gone on from the report of version {version}; ask at that report.")
            return {"learner": learner.state(), "weights": weights.history()}

        with place.crew(learner.seed) as crew:
            weights = crew.weights(learner.acting, self.max_lag + 1, history, name="weights", version=start)
            like = learner.example(self.num_steps, self.num_envs // self.actors)
            lanes = crew.lanes(self.actors, max(1, self.max_lag), like, start, name="rollouts")
            seed = (learner.seed, start)
            crew.start(
                collect, self, learner.method, learner.acting, env, seed, oldest, weights, lanes, copies=self.actors
            )
            try:
                while learner.env_steps < env_steps:
                    learner.anneal(learner.env_steps / horizon)
                    report = learner.update(learner.prepare(Rollout.cat(lanes.take_each())))
                    weights.publish(learner.acting, learner.version, progress=min(1.0, learner.env_steps / horizon))
                    yield replace(report, state=partial(snapshot, learner.version), crew=crew)
            finally:
                running = False


def collect(
    plan: SyncBatches,
    method: Method,
    net: nn.Module,
    env: Env,
    seed: tuple[int, ...],
    oldest: int,
    weights: Weights,
    lanes: Lanes[Rollout],
) -> None:
    """The actor: a rollout with exactly the weights that its number asks for, again and again."""
    me = role()
    mine = me.share_of(plan.num_envs)
    method = method.behaviour(mine, plan.num_envs)
    seed, watch = (*seed, me.incarnation), me.watch
    with Actor(method, net, env, mine, plan.num_steps, seed, me.rank, watch=watch, timeout=plan.env_timeout) as actor:
        for number in lanes[me.rank].deliveries():  # a restarted actor goes on where its lane stands
            actor.load(weights, version=max(oldest, number - plan.max_lag))
            lanes[me.rank].put(actor.rollout(number))
