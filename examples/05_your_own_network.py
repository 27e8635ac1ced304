"""A network of your own: PPO with residual towers, and everything else as it is.

    python examples/05_your_own_network.py --place inline|threads|processes

A method is a dataclass: override `build`, and its fields are hyperparameters beside PPO's own.
"""

import argparse
from dataclasses import dataclass

from torch import nn

from headrace import PPO, Gymnasium, Inline, Processes, Run, SyncBatches, Threads
from headrace.nets import linear


class Block(nn.Module):
    def __init__(self, units, rng):
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(units),
            linear(units, units, 1, rng),
            linear(units, units, 1, rng),
        )

    def forward(self, x):
        return x + self.outer(self.inner(self.norm(x)).relu())


def tower(inputs, units, outputs, blocks, gain, rng):
    inner = [Block(units, rng) for _ in range(blocks)]
    return nn.Sequential(linear(inputs, units, 1, rng), *inner, linear(units, outputs, gain, rng))


@dataclass(frozen=True)
class ResidualPPO(PPO):
    units: int = 64
    """Units of a layer."""
    blocks: int = 2
    """Residual blocks of a tower."""

    def build(self, spec, rng):
        net = super().build(spec, rng)  # what encodes observations, the distribution, normalisers
        inputs = net.encoder.outputs
        net.policy = tower(inputs, self.units, net.distribution.size, self.blocks, 0.01, rng)  # small: begin at random
        net.value = tower(inputs, self.units, 1, self.blocks, 1, rng)
        return net


def main(place, env_steps=60_000, seed=1):
    method = ResidualPPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, update_epochs=10)
    run = Run(
        method, Gymnasium("CartPole-v1"), SyncBatches(num_steps=64), place(), total_timesteps=env_steps, seed=seed
    )
    with run.reports() as reports:
        for report in reports:
            if report.version % 20 == 0 and report.episode_returns.size:
                print(f"{report.env_steps:7,} steps   mean return {report.episode_returns.mean():5.1f}", flush=True)
    print("weights:", run.learner.digest())


if __name__ == "__main__":
    places = {"inline": Inline, "threads": Threads, "processes": Processes}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", choices=places, default="inline")
    main(places[parser.parse_args().place])
