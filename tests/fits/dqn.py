"""Double DQN (van Hasselt et al. 2016, arXiv:1509.06461) with prioritised replay (Schaul et al., arXiv:1511.05952)."""

from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from headrace import Decision, Loss, Method, Struct, axes
from headrace.nets import MLP


class Transitions(Struct):
    observation: torch.Tensor = axes("B ...")
    action: torch.Tensor = axes("B", torch.int64)
    reward: torch.Tensor = axes("B", torch.float32)
    terminated: torch.Tensor = axes("B", torch.bool)
    next_observation: torch.Tensor = axes("B ...")
    weight: torch.Tensor = axes("B", torch.float32)  # of importance: 1 until replay says otherwise


@dataclass(frozen=True)
class DQN(Method):
    gamma: float = 0.99
    epsilon: float | tuple[float, ...] = 0.4  # of all environments, or of each

    def build(self, spec, rng):
        q = MLP(*spec.observation.shape, (128, 128), spec.action.n, rng=rng)
        return torch.nn.ModuleDict({"q": q, "target": deepcopy(q).requires_grad_(False)})

    def acting(self, net):
        return net["q"]

    def behaviour(self, environments, of):  # as Ape-X (Horgan et al. 2018, arXiv:1803.00933)
        return replace(self, epsilon=tuple(self.epsilon ** (1 + 7 * i / max(1, of - 1)) for i in environments))

    def noise(self, q, num_steps, batch_size, rng):
        explore = torch.rand(num_steps, batch_size, generator=rng) < torch.tensor(self.epsilon)
        return explore, torch.randint(q.outputs, explore.shape, generator=rng)

    def act(self, q, observation, memory, noise):
        best = q(observation).argmax(-1)
        return Decision(action=torch.where(*noise, best) if noise else best, log_prob=torch.zeros(best.shape))

    def prepare(self, net, rollout):  # what replay keeps
        kept, before, after = rollout.valid, rollout.observation[:-1], rollout.observation[1:]
        taken = {name: getattr(rollout, name)[kept] for name in ("action", "reward", "terminated")}
        return Transitions(observation=before[kept], next_observation=after[kept], weight=kept[kept].float(), **taken)

    def losses(self, net, batch, step):
        after = net["target"](batch.next_observation).gather(-1, net["q"](batch.next_observation).argmax(-1, True))
        q = net["q"](batch.observation).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
        error = q - (batch.reward + self.gamma * after.squeeze(-1) * ~batch.terminated)
        yield Loss((batch.weight * error**2).sum(), len(q), metrics={"q": q.detach().sum()}, priority=error.abs())

    def optimizers(self, net):
        return {"net": torch.optim.Adam(net["q"].parameters(), lr=1e-4)}

    def after_update(self, net, version):
        if version % 2 == 0:
            net["target"].load_state_dict(net["q"].state_dict())
