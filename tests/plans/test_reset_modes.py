"""The three auto-reset modes of gymnasium: the same episodes give the same targets, returns, counters, transitions.

What is expected is worked out from the script of the episodes, step by step, and not from another mode.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from headrace import A2C, Gymnasium, Spec
from headrace.envs.gymnasium_vector import GymnasiumVector

pytestmark = pytest.mark.timeout(60)

LENGTHS = (3, 1, 4, 2, 5)
KINDS = ["loop", *(mode.value for mode in AutoresetMode)]
GAMMA, LAMBDA = 0.9, 0.8


@pytest.fixture(scope="module")
def play() -> Any:
    """play(kind, lengths, shortest): the scripted episodes in this reset mode; "loop" is the library's own."""

    class Turns(gymnasium.Env):
        """Episodes of these lengths, ended by termination and truncation in turn, which say where they are."""

        observation_space, action_space = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(2)

        def __init__(self, lengths: Any, rewards: float | None) -> None:
            self.lengths, self.rewards, self.episode = lengths, rewards, -1

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.episode, self.count = self.episode + 1, 0
            return self.show(self.episode, 0), {}

        @staticmethod
        def show(episode: int, step: int) -> Any:
            return np.array([np.sin(episode), np.cos(3 * step + episode)], np.float32)

        @staticmethod
        def reward(episode: int, step: int) -> float:
            return float(np.sin(7 * episode + step))

        def step(self, action: Any) -> Any:
            self.count += 1
            end, odd = self.count == self.lengths[self.episode % len(self.lengths)], self.episode % 2 == 1
            reward = self.reward(self.episode, self.count) if self.rewards is None else self.rewards
            return self.show(self.episode, self.count), reward, end and not odd, end and odd, {}

    def env(kind: str, lengths: Any = LENGTHS, rewards: float | None = None, shortest: int = 1) -> Any:
        if kind == "loop":
            return Gymnasium(Turns, lengths=lengths, rewards=rewards)

        def make(num_envs: int) -> Any:
            return SyncVectorEnv([lambda: Turns(lengths, rewards)] * num_envs, autoreset_mode=AutoresetMode(kind))

        return GymnasiumVector(make, shortest_truncation=shortest)

    env.turns = Turns  # type: ignore[attr-defined]
    return env


class Taken(NamedTuple):
    """One environment step."""

    observation: list[float]
    reward: float
    terminated: bool
    truncated: bool
    next_observation: list[float] | None
    """None where the task ended: nothing comes after."""
    advantage: float
    target: float


def scripted(turns: Any, net: Any, episodes: int) -> list[list[Taken]]:
    """The steps of so many episodes, each looked at alone: values first, then sums of temporal differences."""
    found = []
    for episode in range(episodes):
        length, odd = LENGTHS[episode % len(LENGTHS)], episode % 2 == 1
        shown = [turns.show(episode, step) for step in range(length + 1)]
        rewards = [turns.reward(episode, step) for step in range(1, length + 1)]
        values, memory = [], None if net.gru is None else torch.zeros(1, net.gru.cell.hidden_size)
        with torch.no_grad():
            for observation in shown:
                row = torch.from_numpy(observation)[None]
                if net.gru is None:
                    features = net.features(row)
                else:
                    memory = net.gru.cell(net.encoder(row), memory)
                    features = net.above(memory)
                values.append(float(net.values(features)))
        values[-1] = values[-1] if odd else 0.0
        deltas = [
            reward + GAMMA * after - value for reward, value, after in zip(rewards, values, values[1:], strict=False)
        ]
        steps = []
        for step in range(length):
            advantage = sum((GAMMA * LAMBDA) ** n * delta for n, delta in enumerate(deltas[step:]))
            last = step == length - 1
            steps.append(
                Taken(
                    shown[step].tolist(),
                    float(np.float32(rewards[step])),
                    last and not odd,
                    last and odd,
                    None if last and not odd else shown[step + 1].tolist(),
                    advantage,
                    advantage + values[step],
                )
            )
        found.append(steps)
    return found


def taken(rollout: Any, batch: Any, b: int) -> list[list[Taken]]:
    """The steps of environment b's finished episodes, as the learner got them."""
    finals = {}
    if rollout.final_step is not None:
        finals = {int(t): line for line, t in enumerate(rollout.final_step[:, b]) if t >= 0}
    found: list[list[Taken]] = [[]]
    for t in range(rollout.size("T")):
        if not rollout.valid[t, b]:
            continue
        terminated, truncated = bool(rollout.terminated[t, b]), bool(rollout.truncated[t, b])
        following = rollout.final_observation[finals[t], b] if t in finals else rollout.observation[t + 1, b]
        found[-1].append(
            Taken(
                rollout.observation[t, b].tolist(),
                float(rollout.reward[t, b]),
                terminated,
                truncated,
                None if terminated else following.tolist(),
                float(batch.advantage[t, b]),
                float(batch.target[t, b]),
            )
        )
        if terminated or truncated:
            found.append([])
    return found[:-1]


@pytest.mark.parametrize("memory", [None, "gru"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_episodes_give_the_same_targets(kind: str, memory: Any, play: Any, train: Any, places: Any) -> None:
    method = A2C(hidden=(6,), gamma=GAMMA, gae_lambda=LAMBDA, memory=memory, learning_rate=0.0)
    run = train(method, play(kind), places["inline"], updates=1, num_envs=4, actors=2, num_steps=60)
    (rollout,), (batch,) = run.rollouts, run.batches
    within = kind not in ("loop", AutoresetMode.NEXT_STEP.value)
    assert (rollout.final_step is not None) is within
    # 15 steps in five episodes, and a row after each that resets, where they do.
    episodes = 20 if within else 15
    expected = scripted(play.turns, run.learner.net, episodes)
    for b in range(4):
        got = taken(rollout, batch, b)
        assert len(got) == episodes
        for episode, steps in zip(got, expected, strict=True):
            for mine, reference in zip(episode, steps, strict=True):
                assert mine[:5] == reference[:5]
                assert mine[5:] == pytest.approx(reference[5:], abs=2e-6)
    (report,) = run.reports
    assert report.env_steps == 4 * (60 if within else 45) == int(rollout.valid.sum()) == report.samples_learned
    lengths = list(LENGTHS * 4)[:episodes]
    returns = [sum(step.reward for step in episode) for episode in expected]
    ended = rollout.terminated | rollout.truncated
    for b in range(4):
        assert rollout.episode_length[ended[:, b], b].tolist() == lengths
        assert rollout.episode_return[ended[:, b], b].tolist() == pytest.approx(returns, abs=1e-5)
    assert sorted(report.episode_lengths.tolist()) == sorted(lengths * 4)
    assert sorted(report.episode_returns.tolist()) == pytest.approx(sorted(returns * 4), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_go_on_over_cuts(kind: str, play: Any, train: Any, places: Any) -> None:
    """Rollouts shorter than episodes: what each row says is still its own, and no end is lost or seen twice."""
    method = A2C(hidden=(4,), gamma=GAMMA, gae_lambda=0.0, learning_rate=0.0)
    run = train(method, play(kind), places["inline"], updates=20, num_envs=2, actors=1, num_steps=3)
    rows, b = [], 1
    for rollout, batch in zip(run.rollouts, run.batches, strict=True):
        rows += [
            (float(batch.target[t, b]), int(rollout.episode_length[t, b])) for t in range(3) if rollout.valid[t, b]
        ]
    steps = [
        (step, len(episode) * (step is episode[-1]))
        for episode in scripted(play.turns, run.learner.net, 20)
        for step in episode
    ]
    net = run.learner.net
    assert len(rows) == (45 if kind in ("loop", AutoresetMode.NEXT_STEP.value) else 60)
    for (target, length), (step, expected_length) in zip(rows, steps, strict=False):
        value = 0.0
        if step.next_observation is not None:
            with torch.no_grad():
                value = float(net.values(net.features(torch.tensor([step.next_observation]))))
        assert target == pytest.approx(step.reward + GAMMA * value, abs=2e-6)
        assert length == expected_length


@pytest.mark.parametrize("kind", KINDS)
def test_LC_44_every_episode_is_reported_once_with_its_own_numbers(
    kind: str, play: Any, train: Any, places: Any
) -> None:
    run = train(
        A2C(hidden=(4,)), play(kind, (3,), 1.0), places["inline"], updates=3, num_envs=2, actors=2, num_steps=10
    )
    finished = sum(int((rollout.terminated | rollout.truncated).sum()) for rollout in run.rollouts)
    lengths = np.concatenate([report.episode_lengths for report in run.reports])
    returns = np.concatenate([report.episode_returns for report in run.reports])
    assert lengths.tolist() == [3] * finished
    assert returns.tolist() == [3.0] * finished
    # In 30 steps: three of four are environment steps where the fourth resets.
    assert finished == 2 * (7 if kind in ("loop", AutoresetMode.NEXT_STEP.value) else 10)


def test_the_table_of_final_observations_travels(play: Any, train: Any, places: Any, digest: Any) -> None:
    hashes = {}
    for name, place in places.items():
        env = play(AutoresetMode.SAME_STEP.value)
        hashes[name] = digest(train(A2C(hidden=(4,), learning_rate=0.01), env, place, actors=2).learner)
    assert len(set(hashes.values())) == 1


def test_the_longest_shortest_truncation_makes_the_table_short(play: Any, train: Any, places: Any) -> None:
    env = play(AutoresetMode.SAME_STEP.value, (4,), shortest=4)
    assert isinstance(env.spec, Spec)
    run = train(A2C(hidden=(4,)), env, places["inline"], updates=2, num_envs=2, num_steps=9)
    assert [rollout.final_step.shape for rollout in run.rollouts] == [(3, 2)] * 2
    for b in range(2):  # truncated were episodes 1, 3, …, in their rows 7, 15 of 18
        kept = [int(t) + 9 * k for k, rollout in enumerate(run.rollouts) for t in rollout.final_step[:, b] if t >= 0]
        assert kept == [7, 15]
