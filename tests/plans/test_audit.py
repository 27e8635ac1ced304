"""No step is lost and none is used twice, from the environment to the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from headrace import A2C, PPO, Inline, Learner
from headrace.envs.toy import Identity, Sleepy

pytestmark = pytest.mark.timeout(60)

LENGTHS = (3, 5, 1)
METHODS: dict[str, tuple[type, dict[str, Any], int]] = {
    "a2c": (A2C, {}, 1),
    "ppo": (PPO, {"update_epochs": 3, "num_minibatches": 4}, 3),
    "recurrent": (PPO, {"update_epochs": 2, "num_minibatches": 3, "memory": "gru"}, 2),
}


def rows(rank: int, index: int) -> Iterator[tuple[Any, ...]]:
    """What environment `index` does, row after row: (observation, the next one, reward, terminated, truncated, valid).

    From what its docstring says, by itself.
    """
    episode = 0
    while True:
        length = LENGTHS[(index + episode) % len(LENGTHS)]
        for step in range(length):
            last = step == length - 1
            yield (
                [rank, index, episode, step],
                [rank, index, episode, step + 1],
                step + 1,
                last and episode % 2 == 0,
                last and episode % 2 == 1,
                True,
            )
        episode += 1
        yield [rank, index, episode - 1, length], [rank, index, episode, 0], 0, False, False, False


@pytest.mark.parametrize(("max_lag", "actors", "method"), [(0, 3, "a2c"), (1, 2, "recurrent"), (2, 3, "ppo")])
def test_every_step_comes_once_and_enters_as_many_minibatches_as_there_are_epochs(
    place: Any, max_lag: int, actors: int, method: str, train: Any, spied: Any
) -> None:
    base, fields, epochs = METHODS[method]
    env = Identity(LENGTHS)
    given = spied(base)(hidden=(4,), **fields)
    run = train(given, Sleepy(env, 0.0005), place, updates=4, actors=actors, max_lag=max_lag)

    # From the environments to the learner: the rollouts, put together, are what the environments did from the start.
    width = 6 // actors
    for b in range(6):
        expected = list(islice(rows(b // width, b), 4 * 8))
        got = [
            (o.tolist(), following.tolist(), float(reward), bool(terminated), bool(truncated), bool(valid))
            for rollout in run.rollouts
            for o, following, reward, terminated, truncated, valid in zip(
                rollout.observation[:-1, b],
                rollout.observation[1:, b],
                rollout.reward[:, b],
                rollout.terminated[:, b],
                rollout.truncated[:, b],
                rollout.valid[:, b],
                strict=True,
            )
        ]
        assert got == expected
    total = 0
    for k, (rollout, report) in enumerate(zip(run.rollouts, run.reports, strict=True)):
        assert rollout.environment.tolist() == list(range(6))
        assert rollout.rank.tolist() == [b // width for b in range(6)]
        assert rollout.sequence.tolist() == [k] * 6
        assert torch.equal(rollout.env_steps, rollout.valid.sum(0))
        total += int(rollout.valid.sum())
        assert report.env_steps == total
        assert report.samples_learned == epochs * total

    # From the learner to the losses.
    assert [step for step, _ in given.seen] == list(range(len(given.seen)))
    assert run.reports[-1].gradient_steps == len(given.seen)
    each = len(given.seen) // 4
    for k, rollout in enumerate(run.rollouts):
        counted: Counter[tuple[float, ...]] = Counter()
        for _, minibatch in given.seen[k * each : (k + 1) * each]:
            counted.update(map(tuple, minibatch.observation[minibatch.weight > 0].tolist()))
        came = set(map(tuple, rollout.observation[:-1][rollout.valid].tolist()))
        assert counted == dict.fromkeys(came, epochs)


def test_what_a_microbatch_learner_learns_from_is_the_same(train: Any, spied: Any) -> None:
    given = spied(PPO)(hidden=(4,), update_epochs=2, num_minibatches=2)
    env = Identity(LENGTHS)
    run = train(given, env, Inline(), learner=Learner(given, env.spec, microbatch_size=5), actors=3, updates=3)
    valid = sum(int(rollout.valid.sum()) for rollout in run.rollouts)
    assert run.reports[-1].samples_learned == 2 * valid
    assert run.reports[-1].gradient_steps == 3 * 2 * 2
    assert sum(int(part.weight.sum()) for _, part in given.seen) == 2 * valid
    assert all(part.weight.numel() <= 5 for _, part in given.seen)
