"""SAC (Haarnoja et al. 2018, arXiv:1812.05905): twin critics, a squashed policy and a learned temperature."""

from copy import deepcopy
from dataclasses import dataclass

import torch

from headrace import Decision, Loss, Method, Struct, axes
from headrace.nets import MLP


class Transitions(Struct):
    observation: torch.Tensor = axes("2 B ...")  # before the step and after it
    action: torch.Tensor = axes("B ...")
    reward: torch.Tensor = axes("B", torch.float32)
    terminated: torch.Tensor = axes("B", torch.bool)
    noise: torch.Tensor | None = axes("2 B ...", default=None)


@dataclass(frozen=True)
class SAC(Method):
    gamma: float = 0.99

    def build(self, spec, rng):
        (seen,), (size,) = spec.observation.shape, spec.action.shape
        critics = torch.nn.ModuleList(MLP(seen + size, (256, 256), 1, rng=rng) for _ in range(2))
        parts = {"policy": MLP(seen, (256, 256), 2 * size, rng=rng), "critics": critics, "targets": deepcopy(critics)}
        return torch.nn.ModuleDict({**parts, "temperature": torch.nn.ParameterList([torch.zeros(())])})

    def noise(self, net, num_steps, batch_size, rng):
        return torch.randn(num_steps, batch_size, net["policy"].outputs // 2, generator=rng)

    def act(self, net, observation, memory, noise):
        mean, log_std = net["policy"](observation).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = mean if noise is None else mean + normal.stddev * noise
        return Decision(action=raw.tanh(), log_prob=(normal.log_prob(raw) - (1 - raw.tanh() ** 2 + 1e-6).log()).sum(-1))

    def prepare(self, net, rollout):
        return rollout  # for replay to cut into transitions

    def minibatches(self, batch, rng, mean):
        yield batch.replace(noise=torch.randn(2, *batch.action.shape, generator=rng))

    def losses(self, net, batch, step):
        new, alpha = self.act(net, batch.observation, None, batch.noise), net["temperature"][0].exp()
        seen, old = torch.cat((batch.observation, new.action), -1), torch.cat((batch.observation[0], batch.action), -1)
        after = torch.minimum(*(q(seen[1]) for q in net["targets"])).squeeze(-1) - alpha * new.log_prob[1]
        target = (batch.reward + self.gamma * after * ~batch.terminated).detach().unsqueeze(-1)
        yield Loss(sum((q(old) - target).square().sum() for q in net["critics"]), len(old), "critics")
        value = torch.minimum(*(q(seen[0]) for q in net["critics"])).squeeze(-1)
        yield Loss((alpha.detach() * new.log_prob[0] - value).sum(), len(old), "policy")
        yield Loss((alpha * (batch.action.shape[-1] - new.log_prob[0].detach())).sum(), len(old), "temperature")

    def optimizers(self, net):
        return {name: torch.optim.Adam(net[name].parameters(), 3e-4) for name in ("critics", "policy", "temperature")}

    def after_update(self, net, version):
        for target, online in zip(net["targets"].parameters(), net["critics"].parameters(), strict=True):
            target.lerp_(online, 0.005)
