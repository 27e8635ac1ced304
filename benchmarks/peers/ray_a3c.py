"""Ray: A3C as a loop on actors, as its own documentation writes it. Runs in RLlib's environment.

Each actor steps CartPole-v1 and computes the gradient of its five steps; the driver applies each gradient as it comes
and sends that actor the new weights. Network, losses and optimizer are those of `headrace.A2C`, written with
torch.nn and torch.distributions.
"""

import tempfile

import gymnasium
import numpy as np
import ray
import torch
from torch import nn

from benchmarks.report import rate, report

GAMMA, STEPS, WORKERS = 0.99, 5, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def arrays(self):
        return [parameter.detach().numpy() for parameter in self.parameters()]

    def load(self, arrays):
        with torch.no_grad():
            for parameter, array in zip(self.parameters(), arrays, strict=True):
                parameter.copy_(torch.from_numpy(np.array(array)))


@ray.remote(num_cpus=1)
class Worker:
    def __init__(self, seed):
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.env, self.net = gymnasium.make("CartPole-v1"), Net()
        self.observation, _ = self.env.reset(seed=seed)

    def gradient(self, arrays):
        self.net.load(arrays)
        observations, actions, rewards, ended = [], [], [], False
        for _ in range(STEPS):
            seen = torch.from_numpy(self.observation)
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=self.net.policy(seen)).sample()
            observations.append(seen)
            actions.append(action)
            self.observation, reward, terminated, truncated, _ = self.env.step(int(action))
            rewards.append(float(reward))
            if ended := terminated or truncated:
                self.observation, _ = self.env.reset()
                break
        with torch.no_grad():
            running = 0.0 if ended else float(self.net.value(torch.from_numpy(self.observation)))
        targets = []
        for reward in reversed(rewards):
            running = reward + GAMMA * running
            targets.insert(0, running)
        batch, target = torch.stack(observations), torch.tensor(targets)
        value = self.net.value(batch).squeeze(1)
        log_prob = torch.distributions.Categorical(logits=self.net.policy(batch)).log_prob(torch.stack(actions))
        loss = -(log_prob * (target - value.detach())).mean() + 0.5 * (target - value).square().mean()
        self.net.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        return [parameter.grad.numpy() for parameter in self.net.parameters()]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hr-ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False,
            object_store_memory=100 * 2**20, _temp_dir=folder,
        )  # fmt: skip
        net = Net()
        optimizer = torch.optim.RMSprop(net.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
        workers = [Worker.remote(seed) for seed in range(WORKERS)]
        running = {worker.gradient.remote(net.arrays()): worker for worker in workers}

        def step(_):
            (done,), _ = ray.wait(list(running), timeout=60)
            worker = running.pop(done)
            for parameter, array in zip(net.parameters(), ray.get(done), strict=True):
                parameter.grad = torch.from_numpy(np.array(array))
            optimizer.step()
            running[worker.gradient.remote(net.arrays())] = worker

        speed = rate(step, 1500, 200)
        ray.shutdown()
    report("ray_a3c", speed, ray.__version__, workers=WORKERS, num_envs=WORKERS, num_steps=STEPS, gradients=1500)


if __name__ == "__main__":
    main()
