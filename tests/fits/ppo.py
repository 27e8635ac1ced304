"""PPO (Schulman et al. 2017, arXiv:1707.06347): several epochs of clipped steps over fresh rollouts."""

from dataclasses import dataclass

import torch

from headrace import Decision, Loss, Method, Struct, Tree, axes
from headrace.losses import approximate_kl, clipped_surrogate, squared_error
from headrace.nets import ActorCritic
from headrace.targets import gae, next_value, standardized


class Batch(Struct):
    observation: Tree = axes("T B ...")
    action: Tree = axes("T B ...")
    log_prob: torch.Tensor = axes("T B", torch.float32)
    advantage: torch.Tensor = axes("T B", torch.float32)
    target: torch.Tensor = axes("T B", torch.float32)
    weight: torch.Tensor = axes("T B", torch.float32)


@dataclass(frozen=True)
class PPO(Method):
    learning_rate: float = 3e-4
    minibatch_size: int = 64

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
        advantage = gae(rollout.reward, values[:-1], after, ended, rollout.valid, 0.99, 0.95)
        taken = {"observation": rollout.observation[:-1], "action": rollout.action, "log_prob": rollout.log_prob}
        return Batch(**taken, advantage=advantage, target=advantage + values[:-1], weight=rollout.valid.float())

    def minibatches(self, batch, rng, mean):
        for _ in range(4):
            for part in batch.flatten("T", "B").shuffle(rng).split(self.minibatch_size):
                yield part.replace(advantage=standardized(part.advantage, part.weight, mean))

    def losses(self, net, batch, step):
        features = net.features(batch.observation)
        log_prob, _ = net.distribution.evaluate(net.logits(features), batch.action)
        log_ratio = log_prob - batch.log_prob
        value_loss = squared_error(net.values(features), batch.target)
        loss = clipped_surrogate(log_ratio, batch.advantage, 0.2) + 0.5 * value_loss
        metrics = {"losses/approx_kl": (batch.weight * approximate_kl(log_ratio.detach())).sum()}
        yield Loss((batch.weight * loss).sum(), batch.weight.sum(), max_grad_norm=0.5, metrics=metrics)

    def optimizers(self, net):
        return {"net": torch.optim.Adam(net.parameters(), lr=self.learning_rate, eps=1e-5)}
