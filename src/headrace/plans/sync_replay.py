"""Replay moves, and everybody waits: DQN, Rainbow, SAC, TD3, DDPG. What is learned per step taken is a number."""

from __future__ import annotations

import math
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
from headrace.plans.checks import check_actors, check_counts, check_replayed, check_run
from headrace.plans.ration import Ration
from headrace.replay import Replay
from headrace.report import Report

__all__ = ["SyncReplay"]


@dataclass(frozen=True)
class SyncReplay:
    """Each round the learner stores one rollout of every actor, in rank order, then learns from samples of the store.

    It learns as long as it is behind: for every environment step stored after the first `learning_starts`, from `ratio`
    samples. Before its k-th rollout an actor takes the weights of exactly after round max(0, k - max_lag), so that what
    is computed depends on the seed alone.
    """

    actors: int = 1
    """Roles that step environments."""
    num_envs: int = 1
    """Environments of all actors together: adding actors changes nothing that is learned from."""
    num_steps: int = 4
    """Steps of a rollout."""
    ratio: float = 16.0
    """Samples learned per environment step: with 16, one batch of 64 every 4 steps."""
    batch_size: int = 64
    """Samples of an update."""
    buffer_size: int = 100_000
    """Rows that the store holds, of all environments together; new ones then replace the oldest."""
    learning_starts: int = 1_000
    """Environment steps to store before learning starts; until then the method acts at random, where it explores so."""
    max_lag: int = 0
    """Rounds that a rollout's weights are behind the learner's: 0 is lock-step, 1 lets acting overlap learning."""
    save_replay: bool = True
    """Whether a checkpoint holds the store too. Without it a run that goes on fills the store anew before it learns."""
    env_timeout: float | None = 300.0
    """Seconds that to make the environments, a reset or a step may take before it counts as hanging; None: any."""

    def __post_init__(self) -> None:
        check_counts(self, actors=1, num_envs=1, num_steps=1, batch_size=1, buffer_size=1, learning_starts=0, max_lag=0)
        if not isinstance(self.ratio, int | float) or isinstance(self.ratio, bool) or not 0 < self.ratio < math.inf:
            raise ConfigError(f"ratio={self.ratio!r}: give the samples to learn per environment step, above 0.")
        check_actors(self.actors, self.num_envs, self.env_timeout)
        least = max(self.learning_starts, self.batch_size, self.num_envs * self.num_steps)
        if self.buffer_size < least:
            raise ConfigError(
                f"buffer_size={self.buffer_size:,} rows: learning_starts={self.learning_starts:,} steps, a batch of "
                f"{self.batch_size:,} and a round of num_envs × num_steps = {self.num_envs * self.num_steps:,} rows "
                f"are to fit in. Give at least {least:,}, or less of these."
            )

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
        """Learn until so many environment steps were taken, and report every update, and every round without one.

        horizon: the environment steps at which schedules end, if not at the last one; a run in several parts gives the
        same to each. state: a report's `snapshot()`, to go on from; one whose "replay" is None fills the store anew.
        The roles live as long as the iterator: close it, or use it up.
        """
        check_replayed(learner.method, self)
        check_run(learner, env, env_steps, horizon, state, holds=("learner", "weights", "rounds", "replay"))
        last = max(env_steps, horizon or 0)
        if state is None and self.learning_starts >= last:
            raise ConfigError(
                f"learning_starts={self.learning_starts:,}, and the run ends after {last:,} environment steps: it "
                "would learn nothing. Give fewer (--plan.learning-starts), or a longer run."
            )
        seed = (learner.seed, learner.env_steps if state is None else state["rounds"])
        ration = Ration(self, learner, seed, None if state is None else state["replay"])
        return self._run(learner, env, place, env_steps, horizon or env_steps, state, seed, ration)

    def notices(self, learner: Learner, state: Mapping[str, Any] | None) -> Iterator[str]:
        """What to say of the store before a run: how large it is, and what is not there when one goes on."""
        like = learner.example(self.num_steps, self.num_envs // self.actors)
        room = Replay.room(like, self.actors, self.buffer_size, check_replayed(learner.method, self), learner.spec)
        size = f"{room.needed / 1e6:,.1f} MB"
        if room.tight:
            yield (
                f"the replay takes {size} when it is full: over 90 % of the {room.available / 1e6:,.1f} MB that are "
                "available. Give a lower --plan.buffer-size if other programs need some."
            )
        if self.save_replay:
            yield f"checkpoints hold the replay: {size} each when it is full; --plan.save-replay false leaves it out"
        if state is not None and state["replay"] is None:
            yield (
                "the checkpoint holds no replay: learning waits until there are "
                f"{self.learning_starts:,} steps again, which the saved policy makes"
            )

    def _run(
        self,
        learner: Learner,
        env: Env,
        place: Placement,
        env_steps: int,
        horizon: int,
        state: Mapping[str, Any] | None,
        seed: tuple[int, ...],
        ration: Ration,
    ) -> Iterator[Report]:
        rounds, history, resumed = 0, (), state is not None
        if state is not None:
            learner.load_state(state["learner"])
            rounds, history = state["rounds"], state["weights"][-self.max_lag - 1 :]
        oldest = history[0][0].version if history else rounds  # nobody can act with weights from before
        at_random = 0 if learner.version else -(-self.learning_starts // (self.num_envs * self.num_steps))
        number, running = 0, True  # of reports

        def note() -> dict[str, float]:
            return {"progress": min(1.0, learner.env_steps / horizon), "updates": learner.version}

        def snapshot(asked: int) -> dict[str, Any]:
            if not running or asked != number:
                raise ConfigError("the plan has gone on from this report; ask for a snapshot while it waits there.")
            held = {"learner": learner.state(), "weights": weights.history(), "rounds": rounds}
            return {**held, "replay": ration.state() if self.save_replay else None}

        with place.crew(learner.seed) as crew:
            banks = self.max_lag + 1
            weights = crew.weights(learner.acting, banks, history, name="weights", version=rounds, **note())
            lanes = crew.lanes(self.actors, max(1, self.max_lag), ration.like, rounds, name="rollouts")
            ends = oldest, at_random, weights, lanes
            crew.start(collect, self, learner.method, learner.acting, env, seed, *ends, copies=self.actors)
            try:
                while resumed or learner.env_steps < env_steps:
                    if not resumed:  # a snapshot is from after its round's rollouts, and from before its weights
                        for rank, rollout in enumerate(lanes.take_each()):
                            ration.add(rank, rollout)
                        rounds += 1
                    for report in ration.updates(learner.env_steps / horizon, quiet=resumed):
                        number += 1
                        yield replace(report, state=partial(snapshot, number), crew=crew)
                    weights.publish(learner.acting, rounds, **note())
                    resumed = False
            finally:
                running = False


def collect(
    plan: SyncReplay,
    method: Method,
    net: nn.Module,
    env: Env,
    seed: tuple[int, ...],
    oldest: int,
    at_random: int,
    weights: Weights,
    lanes: Lanes[Rollout],
) -> None:
    """The actor: a rollout with exactly the weights that its number asks for; the first ones at random."""
    me = role()
    mine = me.share_of(plan.num_envs)
    method = method.behaviour(mine, plan.num_envs)
    seed, watch = (*seed, me.incarnation), me.watch
    with Actor(method, net, env, mine, plan.num_steps, seed, me.rank, watch=watch, timeout=plan.env_timeout) as actor:
        for number in lanes[me.rank].deliveries():  # a restarted actor goes on where its lane stands
            actor.method = method.at_random() if number < at_random else method
            actor.load(weights, version=max(oldest, number - plan.max_lag))
            lanes[me.rank].put(actor.rollout(number))
