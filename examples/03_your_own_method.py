"""A method of your own: advantage-weighted regression (Peng et al. 2019, arXiv:1910.00177), without its replay.

    python examples/03_your_own_method.py --place inline|threads|processes

The network, what a batch holds and the method: `docs/your-own-method.md` walks through them.
"""

import argparse
from dataclasses import dataclass

from torch import Tensor, nn, optim

from headrace import Decision, Gymnasium, Inline, Learner, Loss, Method, Processes, SyncBatches, Threads, evaluate
from headrace.distributions import distribution_over
from headrace.nets import MLP
from headrace.struct import Struct, axes
from headrace.targets import gae, next_value, standardized


class Net(nn.Module):
    def __init__(self, spec, rng):
        super().__init__()
        self.policy = distribution_over(spec.action)
        self.logits = MLP(spec.observation.shape[0], (64,), self.policy.size, gain=0.01, rng=rng)
        self.value = MLP(spec.observation.shape[0], (64,), 1, rng=rng)


class Batch(Struct):
    observation: Tensor = axes("T B ...")
    action: Tensor = axes("T B ...")
    advantage: Tensor = axes("T B")
    target: Tensor = axes("T B")
    weight: Tensor = axes("T B")  # 0 for a row that only resets


@dataclass(frozen=True)
class AWR(Method):
    learning_rate: float = 3e-3
    gamma: float = 0.98

    def build(self, spec, rng):
        return Net(spec, rng)

    def noise(self, net, num_steps, batch_size, rng):
        return net.policy.noise(num_steps, batch_size, rng=rng)

    def act(self, net, observation, memory, noise):
        action, _ = net.policy.sample(net.logits(observation), noise)
        return Decision(action=action, environment_action=net.policy.environment_action(action))

    def prepare(self, net, rollout):
        values = net.value(rollout.observation).squeeze(-1)  # [T + 1, B]
        after, ended = next_value(values, rollout.terminated), rollout.terminated | rollout.truncated
        advantage = gae(rollout.reward, values[:-1], after, ended, rollout.valid, self.gamma, gae_lambda=1.0)
        batch = {"observation": rollout.observation[:-1], "action": rollout.action, "advantage": advantage}
        return Batch(**batch, target=advantage + values[:-1], weight=rollout.valid.float())

    def minibatches(self, batch, rng, mean):
        batch = batch.replace(advantage=standardized(batch.advantage, batch.weight, mean)).flatten("T", "B")
        for _ in range(4):
            yield from batch.shuffle(rng, "T*B").split(256, "T*B")

    def losses(self, net, batch, step):
        log_prob, _ = net.policy.evaluate(net.logits(batch.observation), batch.action)
        policy_loss = -log_prob * batch.advantage.exp().clamp(max=20)
        value_loss = (net.value(batch.observation).squeeze(-1) - batch.target).square()
        yield Loss(total=((policy_loss + value_loss) * batch.weight).sum(), weight=batch.weight.sum())

    def optimizers(self, net):
        return {"net": optim.Adam(net.parameters(), self.learning_rate, fused=True)}


def main(place, env_steps=60_000, seed=1):
    env = Gymnasium("CartPole-v1")
    learner = Learner(AWR(), env.spec, seed=seed)
    for report in SyncBatches(num_steps=64).run(learner, env, place(), env_steps=env_steps):
        if report.version % 20 == 0 or report.env_steps >= env_steps:
            score = evaluate(learner.method, learner.net, env, episodes=20).mean()
            print(f"{report.env_steps:7,} steps   mean return of 20 episodes {score:5.1f}", flush=True)


if __name__ == "__main__":
    places = {"inline": Inline, "threads": Threads, "processes": Processes}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", choices=places, default="processes")
    main(places[parser.parse_args().place])
