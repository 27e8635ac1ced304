"""TD3 (Fujimoto et al. 2018, arXiv:1802.09477): twin critics, smoothed targets, a policy that learns more slowly."""

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
    noise: torch.Tensor | None = axes("B ...", default=None)


@dataclass(frozen=True)
class TD3(Method):
    policy_delay: int = 2

    def build(self, spec, rng):
        (seen,), (size,) = spec.observation.shape, spec.action.shape
        critics = torch.nn.ModuleList(MLP(seen + size, (256, 256), 1, rng=rng) for _ in range(2))
        online = torch.nn.ModuleDict({"policy": MLP(seen, (256, 256), size, rng=rng), "critics": critics})
        return torch.nn.ModuleDict({"online": online, "target": deepcopy(online)})

    def noise(self, net, num_steps, batch_size, rng):
        return 0.1 * torch.randn(num_steps, batch_size, net["online"]["policy"].outputs, generator=rng)

    def act(self, net, observation, memory, noise):
        action = net["online"]["policy"](observation).tanh() + (0.0 if noise is None else noise)
        return Decision(action=action.clamp(-1, 1), log_prob=torch.zeros(len(action)))

    def prepare(self, net, rollout):
        return rollout  # for replay to cut into transitions

    def minibatches(self, batch, rng, mean):
        yield batch.replace(noise=(0.2 * torch.randn(batch.action.shape, generator=rng)).clamp(-0.5, 0.5))

    def losses(self, net, batch, step):
        (now, then), online, target = batch.observation, net["online"], net["target"]
        action = (target["policy"](then).tanh() + batch.noise).clamp(-1, 1)
        after = torch.minimum(*(q(torch.cat((then, action), -1)) for q in target["critics"])).squeeze(-1)
        aim = (batch.reward + 0.99 * after * ~batch.terminated).detach().unsqueeze(-1)
        errors = [q(torch.cat((now, batch.action), -1)) - aim for q in online["critics"]]
        yield Loss(sum(error.square().sum() for error in errors), len(now), "critics")
        if (step + 1) % self.policy_delay == 0:
            value = online["critics"][0](torch.cat((now, online["policy"](now).tanh()), -1))
            yield Loss(-value.sum(), len(now), "policy")

    def optimizers(self, net):
        return {name: torch.optim.Adam(net["online"][name].parameters(), 3e-4) for name in ("critics", "policy")}

    def after_update(self, net, version):
        if version % self.policy_delay == 0:
            for target, online in zip(net["target"].parameters(), net["online"].parameters(), strict=True):
                target.lerp_(online, 0.005)
