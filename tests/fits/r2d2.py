"""R2D2 (Kapturowski et al. 2019): recurrent Q-learning from replayed sequences with stored memory and burn-in."""

from copy import deepcopy
from dataclasses import dataclass

import torch

from headrace import Decision, Loss, Method, Struct, axes
from headrace.nets import GRU, MLP


class Sequences(Struct):
    observation: torch.Tensor = axes("T+1 B ...")
    action: torch.Tensor = axes("T B", torch.int64)
    reward: torch.Tensor = axes("T B", torch.float32)
    terminated: torch.Tensor = axes("T B", torch.bool)
    valid: torch.Tensor = axes("T B", torch.bool)
    memory: torch.Tensor = axes("B ...", torch.float32)  # as it was when the first action was chosen
    weight: torch.Tensor = axes("B", torch.float32)  # of importance


@dataclass(frozen=True)
class R2D2(Method):
    gamma: float = 0.997
    burn_in: int = 10

    def build(self, spec, rng):
        gru = GRU(*spec.observation.shape, 128, rng)
        q = torch.nn.ModuleDict({"gru": gru, "head": MLP(128, (128,), spec.action.n, rng=rng)})
        return torch.nn.ModuleDict({"q": q, "target": deepcopy(q).requires_grad_(False)})

    def initial_memory(self, net, batch_size):
        return torch.zeros(batch_size, net["q"]["gru"].size)

    def act(self, net, observation, memory, noise):
        memory = net["q"]["gru"].cell(observation, memory)
        action = net["q"]["head"](memory).argmax(-1)
        return Decision(action=action, log_prob=torch.zeros(len(action)), memory=memory)

    def prepare(self, net, rollout):
        return rollout  # for replay to keep

    def losses(self, net, batch, step):
        k, first, values = self.burn_in, torch.cat([torch.zeros_like(batch.valid[:1]), ~batch.valid]), {}
        for name, q in net.items():
            with torch.no_grad():
                memory = q["gru"](batch.observation[:k], batch.memory, first[:k])[-1]
            values[name] = q["head"](q["gru"](batch.observation[k:], memory, first[k:]))
        after = values["target"].gather(-1, values["q"].argmax(-1, True))[1:].squeeze(-1) * ~batch.terminated[k:]
        q = values["q"][:-1].gather(-1, batch.action[k:].unsqueeze(-1)).squeeze(-1)
        error = (q - batch.reward[k:] - self.gamma * after) * batch.valid[k:]
        priority = 0.9 * error.abs().amax(0) + 0.1 * error.abs().mean(0)
        yield Loss((batch.weight * error**2).sum(), batch.valid[k:].sum(), priority=priority)

    def optimizers(self, net):
        return {"net": torch.optim.Adam(net["q"].parameters(), lr=1e-4)}

    def after_update(self, net, version):
        if version % 2 == 0:
            net["target"].load_state_dict(net["q"].state_dict())
