"""A rollout that is handed in early: cut anywhere, its pieces tell the same as one that nobody cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from headrace import A2C, Gymnasium, Rollout
from headrace.actor import Actor
from headrace.envs.gymnasium_vector import GymnasiumVector

ROWS = 40
CUTS = [1, 2, 5, 3, 8, 1, 4, 7, 6, 3]  # rows of each piece


def env(same_step: bool) -> Any:
    """Episodes of known lengths, ended in turn by termination and truncation; actions are ignored."""

    class Turns(gymnasium.Env):
        observation_space, action_space = spaces.Box(-9, 99, (2,), np.float32), spaces.Discrete(2)
        episode, count = -1, 0

        def show(self) -> Any:
            return np.array([self.episode, self.count], np.float32)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.episode, self.count = self.episode + 1, 0
            return self.show(), {}

        def step(self, action: Any) -> Any:
            self.count += 1
            end, odd = self.count == (3, 2, 4, 1, 5)[self.episode % 5], self.episode % 2 == 1
            return self.show(), float(10 * self.episode + self.count), end and not odd, end and odd, {}

    if not same_step:
        return Gymnasium(Turns)
    return GymnasiumVector(
        lambda num_envs: SyncVectorEnv([Turns] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP),
        shortest_truncation=1,
    )


@pytest.mark.parametrize("same_step", [False, True])
def test_pieces_tell_what_the_whole_tells(same_step: bool) -> None:
    method = A2C(hidden=(3,), memory="gru", normalize_reward=True)
    made = env(same_step)
    net = method.build(made.spec, torch.Generator().manual_seed(0))
    with Actor(method, net, made, range(2), ROWS) as actor:
        whole = actor.rollout().clone()
    pieces = []
    with Actor(method, net, made, range(2), 8) as actor:
        actor.version = 7
        for rows in CUTS:
            rollout = actor.rollout(len(pieces), stop=lambda count, rows=rows: count >= rows).check().clone()
            cut = rollout.at(T=slice(0, rows))
            rest = rollout.at(T=slice(rows, 8))
            assert (cut.version == 7).all()
            assert (rest.version == -1).all()
            for flags in (rest.valid, rest.terminated, rest.truncated):
                assert not flags.any()
            assert rest.observation.eq(cut.observation[-1]).all()
            assert rollout.env_steps.tolist() == cut.valid.sum(0).tolist()
            pieces.append(cut)
    assert sum(CUTS) == ROWS
    for name in ("reward", "terminated", "truncated", "valid", "episode_return", "episode_length"):
        joined = torch.cat([getattr(piece, name) for piece in pieces])
        assert torch.equal(joined, getattr(whole, name)), name
    rows = torch.cat([piece.observation[:-1] for piece in pieces])
    assert torch.equal(rows, whole.observation[:-1])
    for before, after in pairwise(pieces):
        assert torch.equal(before.observation[-1], after.observation[0])
    assert torch.equal(pieces[-1].observation[-1], whole.observation[-1])
    for name in ("running_return", "running_length"):
        assert torch.equal(getattr(pieces[-1], name), getattr(whole, name)), name
    discounted(pieces, whole)
    if same_step:
        assert finals(pieces) == finals([whole])
    assert_memory(method, net, pieces, same_step)


def discounted(pieces: list[Rollout], whole: Rollout) -> None:
    """The running sums before each piece, worked out from the rewards of the whole."""
    running, at = np.zeros(2), 0
    for piece in pieces:
        np.testing.assert_allclose(piece.discounted_return, running, rtol=1e-12)
        for _ in range(piece.size("T")):
            ended = (whole.terminated | whole.truncated)[at].numpy()
            running = np.where(ended, 0.0, 0.99 * running + whole.reward[at].numpy())
            at += 1


def finals(pieces: list[Rollout]) -> list[Any]:
    """(row, environment, final observation) of all truncated episodes."""
    found, at = [], 0
    for piece in pieces:
        for line, column in (piece.final_step >= 0).nonzero().tolist():
            row = at + int(piece.final_step[line, column])
            found.append((row, column, piece.final_observation[line, column].tolist()))
        at += piece.size("T")
    return sorted(found)


def assert_memory(method: Any, net: Any, pieces: list[Rollout], same_step: bool) -> None:
    """What the policy remembers before each piece: worked out from all observations before it, episode by episode."""
    memory = torch.zeros(2, 3)
    with torch.no_grad():
        for piece in pieces:
            torch.testing.assert_close(piece.memory, memory)
            for t in range(piece.size("T")):
                memory = net.gru.cell(net.encoder(piece.observation[t]), memory)
                ended = piece.terminated[t] | piece.truncated[t]
                forgets = ended if same_step else ~piece.valid[t]
                memory = memory * ~forgets.unsqueeze(-1)
