"""A2C (Mnih et al. 2016, arXiv:1602.01783): one gradient step on each batch of fresh rollouts."""

from dataclasses import dataclass

import torch

from headrace import Decision, Loss, Method, Struct, Tree, axes
from headrace.losses import policy_gradient, squared_error
from headrace.nets import ActorCritic
from headrace.targets import gae, next_value


class Batch(Struct):
    observation: Tree = axes("T B ...")
    action: Tree = axes("T B ...")
    advantage: torch.Tensor = axes("T B", torch.float32)
    target: torch.Tensor = axes("T B", torch.float32)
    weight: torch.Tensor = axes("T B", torch.float32)


@dataclass(frozen=True)
class A2C(Method):
    learning_rate: float = 7e-4
    gamma: float = 0.99
    ent_coef: float = 0.01

    def build(self, spec, rng):
        return ActorCritic(spec, rng=rng)

    def noise(self, net, num_steps, batch_size, rng):
        return net.distribution.noise(num_steps, batch_size, rng=rng)

    def act(self, net, observation, memory, noise):
        action, log_prob = net.distribution.sample(net.logits(net.features(observation)), noise)
        given = net.distribution.environment_action(action)
        return Decision(action=action, log_prob=log_prob, environment_action=given)

    def prepare(self, net, rollout):
        values = net.values(net.features(rollout.observation))
        ended, after = rollout.terminated | rollout.truncated, next_value(values, rollout.terminated)
        advantage = gae(rollout.reward, values[:-1], after, ended, rollout.valid, self.gamma, 1.0)
        taken = {"observation": rollout.observation[:-1], "action": rollout.action, "weight": rollout.valid.float()}
        return Batch(**taken, advantage=advantage, target=advantage + values[:-1])

    def losses(self, net, batch, step):
        features = net.features(batch.observation)
        log_prob, entropy = net.distribution.evaluate(net.logits(features), batch.action)
        value_loss = squared_error(net.values(features), batch.target)
        loss = policy_gradient(log_prob, batch.advantage) + 0.5 * value_loss - self.ent_coef * entropy
        metrics = {"losses/value_loss": (batch.weight * value_loss.detach()).sum()}
        yield Loss((batch.weight * loss).sum(), batch.weight.sum(), max_grad_norm=0.5, metrics=metrics)

    def optimizers(self, net):
        return {"net": torch.optim.RMSprop(net.parameters(), lr=self.learning_rate, eps=1e-5)}
