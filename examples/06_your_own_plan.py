"""A plan of your own: first come, first served. The learner takes a rollout from whichever actor has one.

    python examples/06_your_own_plan.py --place inline|threads|processes

Two straight loops, one a role, joined by lanes. It runs every method, on every placement.
"""

import argparse
from dataclasses import dataclass, replace

from headrace import PPO, Actor, Gymnasium, Inline, Processes, Run, Threads, role


@dataclass(frozen=True)
class FirstCome:
    actors: int = 2
    """Roles that step environments."""
    num_envs: int = 8
    """Environments of each actor: a batch is one rollout of one actor."""
    num_steps: int = 64
    """Steps of a rollout."""

    def run(self, learner, env, place, *, env_steps, horizon=None, state=None):
        if state is not None:
            learner.load_state(state["learner"])
        with place.crew(learner.seed) as crew:
            weights = crew.weights(learner.acting, version=learner.version)
            lanes = crew.lanes(self.actors, like=learner.example(self.num_steps, self.num_envs))
            crew.start(collect, self, learner.method, learner.acting, env, weights, lanes, copies=self.actors)
            while learner.env_steps < env_steps:
                learner.anneal(learner.env_steps / (horizon or env_steps))
                report = learner.update(learner.prepare(lanes.take_any().item))
                weights.publish(learner.acting, learner.version)
                yield replace(report, state=lambda: {"learner": learner.state()}, crew=crew)


def collect(plan, method, net, env, weights, lanes):
    me = role()
    mine = range(me.rank * plan.num_envs, (me.rank + 1) * plan.num_envs)
    with Actor(method, net, env, mine, plan.num_steps, rank=me.rank) as actor:
        for number in lanes[me.rank].deliveries():
            actor.load(weights)  # the newest, whatever it is: the reports say how old it was
            lanes[me.rank].put(actor.rollout(number))


def main(place, env_steps=60_000, seed=1):
    method = PPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, update_epochs=10)
    run = Run(method, Gymnasium("CartPole-v1"), FirstCome(), place(), total_timesteps=env_steps, seed=seed)
    with run.reports() as reports:
        for report in reports:
            if report.version % 20 == 0 and report.episode_returns.size:
                mean, lag = report.episode_returns.mean(), report.lag.max
                print(f"{report.env_steps:7,} steps   mean return {mean:5.1f}   lag {lag}", flush=True)


if __name__ == "__main__":
    places = {"inline": Inline, "threads": Threads, "processes": Processes}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", choices=places, default="processes")
    main(places[parser.parse_args().place])
