"""IMPALA's learner (Espeholt et al. 2018, arXiv:1802.01561): V-trace for rollouts of older weights."""

from dataclasses import dataclass

from torch.optim import RMSprop

from headrace import Decision, Loss, Method
from headrace.losses import policy_gradient, squared_error
from headrace.nets import ActorCritic
from headrace.targets import next_value, vtrace


@dataclass(frozen=True)
class VTrace(Method):
    learning_rate: float = 6e-4
    gamma: float = 0.99
    ent_coef: float = 0.01

    def build(self, spec, rng):
        return ActorCritic(spec, shared=True, rng=rng)

    def noise(self, net, num_steps, batch_size, rng):
        return net.distribution.noise(num_steps, batch_size, rng=rng)

    def act(self, net, observation, memory, noise):
        action, log_prob = net.distribution.sample(net.logits(net.features(observation)), noise)
        given = net.distribution.environment_action(action)
        return Decision(action=action, log_prob=log_prob, environment_action=given)

    def prepare(self, net, rollout):
        return rollout  # the targets need the policy that the loss needs: one forward pass for both

    def losses(self, net, batch, step):
        features = net.features(batch.observation)
        values = net.values(features)
        value, after = values[:-1], next_value(values, batch.terminated)
        log_prob, entropy = net.distribution.evaluate(net.logits(features[:-1]), batch.action)
        log_ratio, ended = log_prob - batch.log_prob, batch.terminated | batch.truncated
        target, advantage = vtrace(log_ratio, batch.reward, value, after, ended, batch.valid, self.gamma)
        value_loss = squared_error(value, target)
        loss = policy_gradient(log_prob, advantage) + 0.5 * value_loss - self.ent_coef * entropy
        weight = batch.valid.float()
        metrics = {"losses/value_loss": (weight * value_loss.detach()).sum()}
        yield Loss((weight * loss).sum(), weight.sum(), max_grad_norm=40.0, metrics=metrics)

    def optimizers(self, net):
        return {"net": RMSprop(net.parameters(), lr=self.learning_rate, eps=0.01)}
