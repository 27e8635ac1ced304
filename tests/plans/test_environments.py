"""What environments return, and what they do wrong, through the whole plan on every placement."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from headrace import A2C, Gymnasium, RoleFailed
from headrace.envs.base import environment_seed
from headrace.errors import EnvironmentFault
from headrace.struct import NAMESPACE

pytestmark = pytest.mark.timeout(60)


def joined(rollouts: list[Any]) -> bytes:
    """All bytes of all that was observed and rewarded."""
    found = hashlib.sha256()
    for rollout in rollouts:
        for leaf in optree.tree_leaves((rollout.observation, rollout.reward), namespace=NAMESPACE):
            found.update(leaf.numpy().tobytes())
    return found.digest()


@pytest.fixture(scope="module")
def Bad() -> Any:
    class Bad(gymnasium.Env):
        """Does something wrong in step `at` of its life, in environment `odd` of the run."""

        observation_space, action_space = spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(2)

        def __init__(self, index: int, odd: int, at: int, result: Any = None) -> None:
            self.wrong, self.at, self.result, self.steps = index == odd, at, result, 0

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(2, np.float32), {}

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.wrong and self.steps == self.at:
                if self.result is None:
                    raise ValueError("bad state 42")
                return self.result
            return np.zeros(2, np.float32), 0.0, False, False, {}

    return Bad


def test_HC_01_what_an_environment_raises_reaches_the_driver(beside: Any, train: Any, Bad: Any) -> None:
    env = Gymnasium(Bad, odd=5, at=100)
    begun = time.monotonic()
    with pytest.raises(RoleFailed) as caught:
        train(A2C(hidden=(4,)), env, beside, updates=20, num_envs=8, actors=4)
    assert time.monotonic() - begun < 10
    failed = caught.value
    assert (failed.role, failed.rank) == ("collect", 2)
    for part in ("ValueError", "bad state 42", "[2]", "environment 5", "env 1 of this actor's 2", "step 100"):
        assert part in str(failed)
    assert "BrokenPipe" not in str(failed)
    assert "EOF" not in str(failed)
    assert 'raise ValueError("bad state 42")' in failed.traceback
    fault = failed.__cause__
    assert isinstance(fault, EnvironmentFault)
    assert (fault.environment, fault.episode, fault.step) == (5, 0, 100)


@pytest.mark.parametrize(
    ("field", "result"),
    [
        ("reward nan", (np.zeros(2, np.float32), float("nan"), False, False, {})),
        ("observation[1] = inf", (np.array([0, np.inf], np.float32), 0.0, False, False, {})),
    ],
)
def test_HC_15_no_number_reaches_the_weights(field: str, result: Any, train: Any, places: Any, Bad: Any) -> None:
    env = Gymnasium(Bad, odd=3, at=500, result=result)
    seen: list[Any] = []

    def note(report: Any) -> None:
        seen.append(report.version)

    with pytest.raises(RoleFailed) as caught:
        train(A2C(hidden=(4,)), env, places["inline"], updates=20, num_envs=4, actors=2, num_steps=100, each=note)
    for part in ("collect[1]", "environment 3", "step 500", field):
        assert part in str(caught.value)
    assert seen == [1, 2, 3, 4]  # and then came the step


def test_LC_34_a_reward_of_two_numbers_is_the_same_error_everywhere(place: Any, train: Any, Bad: Any) -> None:
    env = Gymnasium(Bad, odd=2, at=3, result=(np.zeros(2, np.float32), np.zeros(2), False, False, {}))
    with pytest.raises(RoleFailed) as caught:
        train(A2C(hidden=(4,)), env, place, num_envs=4, actors=2)
    text = str(caught.value.__cause__)
    assert "environment 2 (env 0 of this actor's 2): step() gave as reward float64 (2,): expected one number" in text


# The same bytes everywhere --------------------------------------------------------------------------------------------

FORMS = (float, np.array, lambda value: np.array([value], np.float32))


@pytest.fixture(scope="module")
def Forms() -> Any:
    """Observations in a Dict, a Tuple and a Discrete, rewards in another form in each environment."""
    forms = FORMS

    class Forms(gymnasium.Env):
        observation_space = spaces.Dict(
            {
                "one": spaces.Discrete(50),
                "two": spaces.Tuple((spaces.Box(0, 50, (2,), np.float32), spaces.Discrete(50))),
            }
        )
        action_space = spaces.Discrete(2)

        def __init__(self, index: int) -> None:
            self.form = forms[index % 3]

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.steps = 0
            return self._show(), {}

        def _show(self) -> Any:
            return {"two": (np.full(2, self.steps / 3, np.float32), np.int64(self.steps)), "one": self.steps}

        def step(self, action: Any) -> Any:
            self.steps += 1
            return self._show(), self.form(self.steps / 3), self.steps == 5, False, {}

    return Forms


def test_LC_34_rewards_and_trees_are_the_same_bytes_everywhere(train: Any, places: Any, Forms: Any) -> None:
    hashes = set()
    for place in places.values():
        run = train(A2C(hidden=(4,)), Gymnasium(Forms), place, updates=2, num_envs=6, actors=2)
        rollout = run.rollouts[1]
        for b in range(1, 6):  # whatever the form
            assert torch.equal(rollout.reward[:, b], rollout.reward[:, 0])
        assert rollout.reward.abs().sum() > 0
        assert torch.equal(rollout.observation["one"], rollout.observation["two"][1])
        hashes.add(joined(run.rollouts))
    assert len(hashes) == 1


LEAVES = {
    "float16": spaces.Box(-9, 9, (2,), np.float16),
    "float64": spaces.Box(-9, 9, (2,), np.float64),
    "bool": spaces.Box(np.zeros(3, bool), np.ones(3, bool), (3,), np.bool_),
    "int8": spaces.Box(-128, 127, (2,), np.int8),
    "uint16": spaces.Box(0, 65535, (2,), np.uint16),
    "int64": spaces.Box(-(2**62), 2**62, (2,), np.int64),
    "scalar": spaces.Box(-9, 9, (), np.float32),
    "none": spaces.Box(-9, 9, (0,), np.float32),
    "five": spaces.Box(-9, 9, (2, 1, 3, 1, 2), np.float32),
}


@pytest.fixture(scope="module")
def Dtypes() -> Any:
    """Observations of every dtype: random bytes of the environment's own generator."""
    kinds = LEAVES

    class Dtypes(gymnasium.Env):
        observation_space, action_space = spaces.Dict(kinds), spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return self.show(self.np_random), {}

        @staticmethod
        def show(rng: Any) -> Any:
            def one(space: Any) -> Any:
                if space.dtype.kind == "f":
                    return np.asarray(rng.uniform(-9, 9, space.shape), space.dtype)
                return np.asarray(rng.integers(space.low, space.high, endpoint=True), space.dtype)

            return {name: one(space) for name, space in kinds.items()}

        def step(self, action: Any) -> Any:
            return self.show(self.np_random), 0.0, False, False, {}

    return Dtypes


def test_US_09_every_dtype_and_shape_is_the_same_bytes_everywhere(train: Any, places: Any, Dtypes: Any) -> None:
    env, hashes = Gymnasium(Dtypes), set()
    for name, space in env.spec.observation.items():
        assert space.shape == LEAVES[name].shape
        assert str(space.dtype).removeprefix("torch.") == str(LEAVES[name].dtype)
    for place in places.values():
        run = train(A2C(hidden=(4,)), env, place, updates=1, num_envs=2, actors=2, num_steps=3, seed=1)
        (rollout,) = run.rollouts
        hashes.add(joined(run.rollouts))
    assert len(hashes) == 1
    word = int(np.random.SeedSequence((1, 0, 0)).generate_state(1, np.uint64)[0])  # of seed, version and life
    for b in range(2):  # and they are what the environment gave, from its own generator
        rng = np.random.default_rng(int(environment_seed(word, b).generate_state(1)[0] >> 1))
        given = [Dtypes.show(rng) for _ in range(4)]
        for name in LEAVES:
            rows = rollout.observation[name][:, b].numpy()
            expected = np.stack([shown[name] for shown in given])
            assert rows.dtype == expected.dtype
            assert rows.tobytes() == expected.tobytes(), name


# Orders of keys -------------------------------------------------------------------------------------------------------

KEYS = """
import hashlib, random, sys
import gymnasium, numpy as np, optree, torch
from gymnasium import spaces
from headrace import A2C, Gymnasium

class Shuffled(gymnasium.Env):
    observation_space = spaces.Dict(
        b=spaces.Discrete(200), a=spaces.Box(0, 1, (1,)), n=spaces.Dict(z=spaces.Discrete(30), y=spaces.Box(2, 3, (2,)))
    )
    action_space = spaces.Discrete(2)

    def __init__(self, order):
        self.random = random.Random(order)

    def reset(self, *, seed=None, options=None):
        shuffled = lambda items: dict(self.random.sample(list(items.items()), len(items)))
        inner = shuffled({"z": 26, "y": np.array([2.25, 2.75], np.float32)})
        return shuffled({"a": np.array([0.5], np.float32), "b": 111, "n": inner}), {}

def seen(order):
    env = Gymnasium(Shuffled, order=order)
    net = A2C(hidden=(8,)).build(env.spec, torch.Generator().manual_seed(1))
    keys = " ".join(net.state_dict())
    shown = env.make(range(2)).reset(seed=1)
    inputs = []
    net.encoder.register_forward_hook(lambda module, given, result: inputs.append(result))
    method = A2C(hidden=(8,))
    tree = optree.tree_map(torch.from_numpy, shown)
    with torch.no_grad():
        method.act(net, tree, None, None)
    return hashlib.sha256(keys.encode() + inputs[0].numpy().tobytes()).hexdigest()
"""


@pytest.mark.slow
def test_LC_33_the_network_sees_the_same_whatever_the_order_of_keys() -> None:
    """In one process, and in others with other hashes of strings."""
    script = KEYS + "print(*(seen(order) for order in range(5)))"
    found = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        found |= set(ran.stdout.split())
    assert len(found) == 1
