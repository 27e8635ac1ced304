"""Every kind of observation and action, feed-forward and recurrent, masked and not, on every placement."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from headrace import A2C, PPO, Actor, ConfigError, Gymnasium, Inline, Learner, Processes, SyncBatches, Threads
from headrace.methods.actor_critic import ActorCriticMethod
from headrace.spaces import MASK

pytestmark = pytest.mark.timeout(60)

OBSERVATIONS: dict[str, Callable[[], Any]] = {
    "float32": lambda: spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "float64": lambda: spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "float16": lambda: spaces.Box(np.float16(-1), np.float16(1), (2,), np.float16),
    "uint8": lambda: spaces.Box(0, 255, (4, 3, 1), np.uint8),
    "int32": lambda: spaces.Box(-5, 5, (2,), np.int32),
    "discrete": lambda: spaces.Discrete(4, start=-2),
    "multidiscrete": lambda: spaces.MultiDiscrete([2, 3], start=[1, -1]),
    "multibinary": lambda: spaces.MultiBinary([2, 2]),
    "dict": lambda: spaces.Dict(
        {
            "z": spaces.Box(-1, 1, (2,), np.float32),
            "a": spaces.Dict({"b": spaces.Discrete(3), "c": spaces.MultiBinary(2)}),
        }
    ),
    "tuple": lambda: spaces.Tuple((spaces.Discrete(2), spaces.Tuple((spaces.Box(0, 9, (1, 2), np.uint8),)))),
}
ACTIONS: dict[str, Callable[[], Any]] = {
    "box": lambda: spaces.Box(np.array([[-2.0, 0.0]], np.float32), np.array([[2.0, 5.0]], np.float32)),
    "discrete": lambda: spaces.Discrete(3, start=-1),
    "multidiscrete": lambda: spaces.MultiDiscrete([3, 2], start=[0, 4]),
    "multibinary": lambda: spaces.MultiBinary([3, 1]),
    "dict": lambda: spaces.Dict({"turn": spaces.Discrete(3), "push": spaces.Box(-1, 1, (2,), np.float32)}),
    "tuple": lambda: spaces.Tuple((spaces.MultiBinary(2), spaces.Dict({"x": spaces.MultiDiscrete([2, 2])}))),
}
MASKED = ["discrete", "multidiscrete", "multibinary", "dict", "tuple"]
LENGTH = 5


def choices(space: Any) -> int:
    """How many numbers a mask over these actions has."""
    match space:
        case spaces.Discrete():
            return int(space.n)
        case spaces.MultiDiscrete():
            return int(space.nvec.sum())
        case spaces.MultiBinary():
            return 2 * int(np.prod(space.shape))
        case spaces.Dict():
            return sum(choices(space[key]) for key in sorted(space.spaces))
        case spaces.Tuple():
            return sum(map(choices, space.spaces))
    return 0


def allowed(space: Any, mask: np.ndarray[Any, Any], action: Any) -> bool:
    """Whether this mask allows this action, worked out one number after the other."""
    match space:
        case spaces.Discrete():
            return bool(mask[action - space.start])
        case spaces.MultiDiscrete():
            ends = np.cumsum(space.nvec)
            return all(
                mask[end - n + a - s] for end, n, a, s in zip(ends, space.nvec, action, space.start, strict=True)
            )
        case spaces.MultiBinary():
            return all(mask[2 * place + on] for place, on in enumerate(np.asarray(action).flatten()))
        case spaces.Dict():
            names = sorted(space.spaces)
            inner, given = [space[name] for name in names], [action[name] for name in names]
        case spaces.Tuple():
            inner, given = space.spaces, action
        case _:
            return True
    start = 0
    for part, chosen in zip(inner, given, strict=True):
        if not allowed(part, mask[start : start + choices(part)], chosen):
            return False
        start += choices(part)
    return True


def random_mask(space: Any, rng: Any) -> np.ndarray[Any, Any]:
    """Forbids some, never all that there is of one choice."""
    match space:
        case spaces.Discrete():
            mask = rng.integers(0, 2, int(space.n))
            mask[rng.integers(space.n)] = 1
            return mask.astype(np.int8)
        case spaces.MultiDiscrete():
            return np.concatenate([random_mask(spaces.Discrete(int(n)), rng) for n in space.nvec])
        case spaces.MultiBinary():
            return np.concatenate([random_mask(spaces.Discrete(2), rng) for _ in range(int(np.prod(space.shape)))])
        case spaces.Dict():
            return np.concatenate([random_mask(space[key], rng) for key in sorted(space.spaces)])
        case spaces.Tuple():
            return np.concatenate([random_mask(part, rng) for part in space.spaces])
    return np.zeros(0, np.int8)


class Anything(gymnasium.Env[Any, Any]):
    """Shows what its space holds, refuses what it does not, and pays for small numbers."""

    def __init__(self, observation: str, action: str, masked: bool) -> None:
        self.action_space = ACTIONS[action]()
        self.shown = OBSERVATIONS[observation]()
        self.observation_space = self.shown
        if masked:
            self.observation_space = spaces.Dict(
                {"seen": self.shown, MASK: spaces.Box(0, 1, (choices(self.action_space),), np.int8)}
            )
        self.masked, self.mask = masked, np.zeros(0, np.int8)

    def _show(self) -> Any:
        shown = self.shown.sample()
        if not self.masked:
            return shown
        self.mask = random_mask(self.action_space, self.np_random)
        return {"seen": shown, MASK: self.mask}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.shown.seed(seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        assert not self.masked or allowed(self.action_space, self.mask, action), (action, self.mask)
        self.steps += 1
        reward = -float(np.mean([np.mean(np.asarray(leaf, float)) for leaf in torch_leaves(action)]))
        return self._show(), reward, self.steps == LENGTH, False, {}


def torch_leaves(action: Any) -> list[Any]:
    if isinstance(action, dict):
        return [leaf for key in sorted(action) for leaf in torch_leaves(action[key])]
    return [leaf for part in action for leaf in torch_leaves(part)] if isinstance(action, tuple) else [action]


def learned(method: ActorCriticMethod, env: Gymnasium, place: Any, digest: Any) -> str:
    learner = Learner(method, env.spec, seed=1)
    before = digest(learner)
    plan = SyncBatches(actors=2, num_envs=4, num_steps=7, max_lag=1)
    reports = list(plan.run(learner, env, place, env_steps=60))
    assert all(np.isfinite(value) for report in reports for value in report.metrics.values())
    assert digest(learner) != before
    return digest(learner)


def methods() -> list[ActorCriticMethod]:
    return [
        A2C(hidden=(8,), ent_coef=0.01),
        PPO(hidden=(8,), num_minibatches=2, update_epochs=2),
        A2C(hidden=(8,), memory="gru"),
        PPO(hidden=(8,), num_minibatches=2, update_epochs=2, memory="gru", ent_coef=0.01),
    ]


def case(observation: str, action: str, masked: bool) -> Gymnasium:
    return Gymnasium(Anything, observation=observation, action=action, masked=masked)


TABLE = [
    (observation, action, number, masked)
    for observation, action, number, masked in product(OBSERVATIONS, ACTIONS, range(4), (False, True))
    if not masked or action in MASKED
]
# Each observation, each action masked and not, each method several times.
COVERING = [
    (observation, list(ACTIONS)[place % 6], place % 4, place // 6 % 2 == 1 and list(ACTIONS)[place % 6] in MASKED)
    for place, observation in enumerate([*OBSERVATIONS, *reversed(OBSERVATIONS)])
]


def names(row: Any) -> str:
    return "-".join(map(str, row))


def test_the_covering_set_covers() -> None:
    assert {row[0] for row in COVERING} == set(OBSERVATIONS)
    assert {row[2] for row in COVERING} == set(range(4))
    assert {(row[1], row[3]) for row in COVERING} == {
        *((action, False) for action in ACTIONS),
        *((action, True) for action in MASKED),
    }


@pytest.mark.parametrize("row", COVERING, ids=names)
def test_one_hash(row: Any, digest: Any) -> None:
    observation, action, number, masked = row
    env = case(observation, action, masked)
    found = {learned(methods()[number], env, place, digest) for place in (Inline(), Processes())}
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("action", ACTIONS)
def test_one_hash_in_the_whole_table(observation: str, action: str, digest: Any) -> None:
    for row in TABLE:
        if row[:2] == (observation, action):
            env = case(observation, action, row[3])
            found = {learned(methods()[row[2]], env, place, digest) for place in (Inline(), Threads(), Processes())}
            assert len(found) == 1, row


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("squashed", [False, True])
def test_LC_24_the_ratio_is_one_before_the_first_gradient_step(action: str, squashed: bool) -> None:
    """Here for multi-discrete, multi-binary and trees of actions; 256 steps."""
    if squashed and action not in ("box", "dict"):
        with pytest.raises(ConfigError, match="squashed=True is for actions in a Box"):
            Learner(PPO(squashed=True), case("float32", action, False).spec)
        return
    env = case("dict", action, action in MASKED)
    learner = Learner(PPO(squashed=squashed, num_minibatches=1, update_epochs=1), env.spec, seed=3)
    with Actor(learner.method, learner.acting, env, range(4), 64) as actor:
        batch = learner.prepare(actor.rollout())
    (minibatch,) = learner.method.minibatches(batch, torch.Generator(), lambda vector, weight: vector)
    (loss,) = learner.method.losses(learner.net, minibatch, 0)
    log_prob = learner.method.evaluate(learner.net, batch)[0]  # type: ignore[attr-defined]
    ratio = (log_prob - batch.log_prob).exp()[batch.weight > 0]  # type: ignore[attr-defined]
    assert (ratio - 1).abs().max() <= 1e-5
    assert abs(float(loss.metrics["losses/approx_kl"] / loss.weight)) <= 1e-6
    assert float(loss.metrics["losses/clipfrac"]) == 0


def test_a_mask_of_another_shape_is_refused() -> None:
    class Wrong(Anything):
        def __init__(self) -> None:
            super().__init__("float32", "discrete", True)
            self.observation_space = spaces.Dict({"seen": self.shown, MASK: spaces.Box(0, 1, (2,), np.int8)})

    with pytest.raises(ConfigError, match=r"action_mask.*a mask of shape \(3,\) was expected"):
        Learner(PPO(), Gymnasium(Wrong).spec)


def test_where_a_mask_forbids_everything_it_is_void() -> None:
    env = case("float32", "discrete", True)
    learner = Learner(A2C(), env.spec, seed=1)
    observation = {"seen": torch.zeros(2, 3), MASK: torch.zeros(2, 3, dtype=torch.int8)}
    decision = learner.method.act(learner.net, observation, None, torch.zeros(2, 3))
    assert decision.logits is not None
    assert (learner.method.log_prob(learner.net, decision.logits, decision.action).detach() > -2).all()
