"""A policy from a run's folder: what it does, what it remembers, what it refuses."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headrace
from headrace import (
    PPO,
    Box,
    CheckpointError,
    Checkpoints,
    ConfigError,
    Discrete,
    Env,
    Gymnasium,
    Learner,
    Method,
    MultiBinary,
    MultiDiscrete,
    Policy,
    ShapeError,
    Spec,
    evaluate,
    load,
)
from headrace.envs.toy import Recall, Target

NewRun = Callable[..., tuple[Path, Learner]]

VECTOR = Spec(Box(np.full(4, -np.inf), np.full(4, np.inf)), Discrete(3))
TREE = Spec(
    {
        "action_mask": Box(np.zeros(4), np.ones(4), torch.int8),
        "place": (Discrete(5, start=2), MultiDiscrete((2, 3))),
        "speed": Box(np.full(2, -1.0), np.ones(2)),
    },
    Discrete(4, start=10),
)


def decisive(net: Any) -> None:
    """Let what a fresh network chooses depend on what it sees: its last layer begins near 0."""
    with torch.no_grad():
        for parameter in net.policy.parameters():
            parameter.mul_(30 if parameter.ndim == 2 else 1)


def policy_of(method: Method, env: Env | Spec, change: Any = None, seed: int = 0) -> tuple[Policy, Any]:
    """A policy without a folder, and its network."""
    learner = Learner(method, env if isinstance(env, Spec) else env.spec, seed=3)
    if change is not None:
        change(learner.net)
    return Policy(method, learner.spec, learner.net, seed=seed), learner.net


def seen(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


def tree(mask: list[int], place: int = 2, speed: float = 0.5) -> dict[str, Any]:
    return {"speed": [speed, -speed], "place": (place, [1, 2]), "action_mask": mask}


def test_acts_as_the_network_of_the_run_does(new_run: NewRun) -> None:
    folder, learner = new_run(PPO(hidden=(16,)), VECTOR, decisive)
    policy, observations = load(folder), seen(50)
    with torch.no_grad():
        expected = learner.net.policy(torch.from_numpy(observations)).argmax(-1).numpy()  # type: ignore[operator]
    assert set(expected) == {0, 1, 2}
    batch = policy.act(observations)
    assert batch.dtype == np.int64
    np.testing.assert_array_equal(batch, expected)
    for observation, action in zip(observations, expected, strict=True):
        one = policy.act(observation)
        assert type(one) is np.int64
        assert one == action
    assert policy.checkpoint is not None
    assert policy.checkpoint.step == 128


@pytest.mark.parametrize(
    "given", [lambda rows: rows.tolist(), torch.from_numpy, lambda rows: rows.astype(np.float64), lambda rows: [*rows]]
)
def test_takes_arrays_lists_and_tensors(given: Callable[[Any], Any]) -> None:
    (policy, _), observations = policy_of(PPO(hidden=(16,)), VECTOR, decisive), seen(20)
    np.testing.assert_array_equal(policy.act(given(observations)), policy.act(observations))


def test_continuous_actions_are_the_environments() -> None:
    spec = Target(dimensions=2, low=-3.0, high=5.0).spec
    policy, net = policy_of(PPO(hidden=(8,)), spec)
    observations = np.random.default_rng(0).uniform(-1, 1, (6, 2)).astype(np.float32)
    with torch.no_grad():
        mean = net.policy(torch.from_numpy(observations)).numpy()
    expected = np.clip(1 + 4 * mean, -3, 5)  # the middle of the box, and half its width
    actions = policy.act(observations)
    assert actions.dtype == np.float32
    np.testing.assert_allclose(actions, expected, rtol=1e-5)
    one = policy.act(observations[0])
    assert one.shape == (2,)
    np.testing.assert_allclose(one, expected[0], rtol=1e-5)
    drawn = policy.act(np.tile(observations[0], (200, 1)), greedy=False)
    assert (np.abs(drawn - expected[0]).max(0) > 0.5).all()
    assert (drawn >= -3).all()
    assert (drawn <= 5).all()


def test_actions_that_are_dicts_come_without_the_axis_of_the_batch() -> None:
    action = {"arm": Box(np.zeros((2, 1)), np.ones((2, 1))), "keys": MultiBinary((3,)), "gear": Discrete(2)}
    policy, _ = policy_of(PPO(), Spec(VECTOR.observation, action))
    one, batch = policy.act(seen(1)[0]), policy.act(seen(3))
    assert {key: np.shape(part) for key, part in one.items()} == {"arm": (2, 1), "keys": (3,), "gear": ()}
    assert {key: np.shape(part) for key, part in batch.items()} == {"arm": (3, 2, 1), "keys": (3, 3), "gear": (3,)}
    assert {key: part.dtype for key, part in one.items()} == {"arm": np.float32, "keys": np.int8, "gear": np.int64}


def test_the_mask_is_obeyed() -> None:
    policy, _ = policy_of(PPO(), TREE, decisive)
    free = policy.act(tree([1, 1, 1, 1]))
    forbidden = [int(10 + place != free) for place in range(4)]
    assert policy.act(tree(forbidden)) not in (free, None)
    assert policy.act(tree([0, 0, 1, 0])) == 12
    drawn = {int(policy.act(tree([1, 0, 1, 0], speed=0.0), greedy=False)) for _ in range(100)}
    assert drawn <= {10, 12}
    mixed = {
        "speed": np.zeros((2, 2)),
        "place": ([2, 6], [[0, 0], [1, 2]]),
        "action_mask": [[0, 1, 0, 0], [0, 0, 0, 1]],
    }
    assert policy.act(mixed).tolist() == [11, 13]


def test_draws_from_the_policys_distribution_and_no_other_generator() -> None:
    method = PPO(hidden=(16,))
    policy, net = policy_of(method, VECTOR, decisive, seed=5)
    rows = np.tile(seen(1), (20_000, 1))
    with torch.no_grad():
        chances = net.policy(torch.from_numpy(rows[:1])).softmax(-1)[0].numpy()
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index, union-attr]
    drawn = policy.act(rows, greedy=False)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), before[2])
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    np.testing.assert_allclose(shares, chances, atol=5 * np.sqrt(chances.max() / len(drawn)))
    assert (Policy(method, VECTOR, net, seed=5).act(rows, greedy=False) == drawn).all()
    assert (Policy(method, VECTOR, net, seed=6).act(rows, greedy=False) != drawn).any()


@dataclass(frozen=True)
class Watched(Env):
    """Recall, and what it showed and was told."""

    shown: list[Any]
    told: list[Any]

    @property
    def spec(self) -> Spec:
        return Recall().spec

    def make(self, indices: range) -> Any:
        vector = Recall().make(indices)
        step = vector.step

        def watched(action: Any) -> Any:
            self.told.append(action.copy())
            result = step(action)
            self.shown.append(result[0].copy())
            return result

        vector.step = watched  # type: ignore[method-assign]
        reset = vector.reset

        def first(seed: int) -> Any:
            self.shown.append(reset(seed).copy())
            return self.shown[-1]

        vector.reset = first  # type: ignore[method-assign]
        return vector


def test_remembers_as_evaluate_does() -> None:
    method = PPO(memory="gru", hidden=(16,))

    def forgetful(net: Any) -> None:
        decisive(net)
        with torch.no_grad():
            net.gru.cell.weight_ih.mul_(3)

    (policy, net), (without, _) = policy_of(method, Recall(), forgetful), policy_of(method, Recall(), forgetful)
    env = Watched([], [])
    evaluate(method, net, env, episodes=8, seed=2)
    forgot = []
    for observation, expected in zip(env.shown, env.told, strict=False):
        np.testing.assert_array_equal(policy.act(observation), expected)
        without.reset()
        forgot.append(without.act(observation))
    assert not np.array_equal(forgot, env.told), "the memory made no difference: this would find nothing"

    policy.reset()  # the same again, one environment alone
    for observation, expected in zip(env.shown, env.told, strict=False):
        assert policy.act(observation[3]) == expected[3]


def test_forgets_in_the_rows_that_begin_an_episode() -> None:
    (policy, _), (fresh, _), (alone, _) = (
        policy_of(PPO(memory="gru", hidden=(16,)), VECTOR, decisive) for _ in range(3)
    )
    before, after = seen(3), [seen(3, seed) for seed in range(1, 12)]
    policy.act(before)
    fresh.act(before)
    policy.reset(where=[False, True, False])
    kept = []
    for row in after:
        actions = policy.act(row)
        np.testing.assert_array_equal(actions[[0, 2]], fresh.act(row)[[0, 2]])
        kept.append(actions[1])
    begun = [alone.act(row[1]) for row in after]
    assert kept == begun
    policy.reset(where=np.zeros(3, bool))
    with pytest.raises(ShapeError, match="remembers 3 episodes that go on, and was given 2"):
        policy.act(before[:2])
    with pytest.raises(ShapeError, match=r"expected bool \(3,\), got bool \(2,\)"):
        policy.reset(where=[True, False])
    with pytest.raises(ShapeError, match=r"expected bool \(3,\), got int64"):
        policy.reset(where=[0, 1, 0])
    policy.reset()
    assert policy.act(before[:2]).shape == (2,)


GOOD = tree([1, 1, 1, 1])


@pytest.mark.parametrize(
    ("observation", "error", "says"),
    [
        ([0.0] * 4, ShapeError, "expected a dict with the keys ['action_mask', 'place', 'speed'], got a list"),
        ({"speed": [0, 0]}, ShapeError, "got ['speed']"),
        ({**GOOD, "place": (2,)}, ShapeError, "observation['place']: expected a tuple of 2, got 1"),
        ({**GOOD, "speed": [0.0]}, ShapeError, "observation['speed']: expected float32 (2,), or a batch"),
        ({**GOOD, "speed": np.zeros((0, 2))}, ShapeError, "float64 (0, 2)"),
        ({**GOOD, "speed": ["a", "b"]}, ShapeError, "got <U1 (2,)"),
        ({**GOOD, "speed": [[0.0, 1.0], [0.0]]}, ShapeError, "which is no array"),
        ({**GOOD, "speed": [[0.0, 1.0]]}, ShapeError, "observation['place'][0]: one"),
        ({**GOOD, "place": (2.5, [1, 2])}, ShapeError, "observation['place'][0]: expected int64 ()"),
        ({**GOOD, "action_mask": [300, 0, 0, 0]}, ShapeError, "with values that int8 cannot hold"),
        ({**GOOD, "place": (1, [1, 2])}, ConfigError, "observation['place'][0] is 1: expected a value of Discrete"),
        ({**GOOD, "place": (2, [1, 3])}, ConfigError, "observation['place'][1][1] is 3"),
        ({**GOOD, "speed": [0.0, np.nan]}, ConfigError, "observation['speed'][1] is nan"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused(observation: Any, error: type[Exception], says: str) -> None:
    policy, _ = policy_of(PPO(), TREE)
    with pytest.raises(error) as caught:
        policy.act(observation)
    assert says in str(caught.value)
    policy.act(GOOD)


def test_normalisers_are_frozen(new_run: NewRun) -> None:
    def moved(net: Any) -> None:
        net.encoder.move(torch.from_numpy(seen(100) * 3 + 1), torch.ones(100), lambda vector, weight: vector)

    folder, learner = new_run(PPO(normalize_observation=True), VECTOR, moved)
    policy = load(folder)
    assert not any(parameter.requires_grad for parameter in policy.net.parameters())
    held = {key: value.clone() for key, value in policy.net.state_dict().items()}
    assert all(torch.equal(value, learner.net.state_dict()[key]) for key, value in held.items())
    assert any("count" in key and value.sum() == 100 for key, value in held.items())
    for seed in range(5):
        policy.act(seen(10, seed) * 100)
    assert all(torch.equal(value, policy.net.state_dict()[key]) for key, value in held.items())


def test_a_policy_of_a_learner_leaves_its_network_trainable() -> None:
    policy, net = policy_of(PPO(), VECTOR)
    policy.act(seen(1)[0], greedy=False)
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert net.training


# Which checkpoint, of which folder


def test_the_last_the_best_or_one_by_its_step(new_run: NewRun) -> None:
    folder, learner = new_run(PPO(), VECTOR)
    with pytest.raises(ConfigError, match=r"has no best checkpoint. None was evaluated"):
        load(folder, "best")
    checkpoints = Checkpoints(folder / "checkpoints")
    for step, score in ((256, 9.0), (384, 5.0)):
        checkpoints.save(step, {"learner": learner.state()}, score=score)
    assert [_step(load(folder, which)) for which in ("last", "best", 128)] == [384, 256, 128]  # type: ignore[arg-type]
    assert _step(load(folder / "checkpoints" / "step_000000256")) == 256
    with pytest.raises(ConfigError, match=r"has no checkpoint of step 5. There are: step_000000128, step_000000256"):
        load(folder, 5)
    with pytest.raises(ConfigError, match='choose "last", "best", or the step'):
        load(folder, "first")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is one checkpoint"):
        load(folder / "checkpoints" / "step_000000256", "best")


def _step(policy: Policy) -> int:
    assert policy.checkpoint is not None
    return policy.checkpoint.step


def test_a_damaged_checkpoint_is_never_passed_over_in_silence(new_run: NewRun) -> None:
    folder, learner = new_run(PPO(), VECTOR)
    Checkpoints(folder / "checkpoints").save(256, {"learner": learner.state()})
    weights = folder / "checkpoints" / "step_000000256" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"weights.safetensors is damaged.* Give checkpoint=128"):
        load(folder)
    assert _step(load(folder, 128)) == 128
    with pytest.raises(CheckpointError, match="is damaged"):
        load(folder, 256)


def test_weights_of_another_network_are_refused(new_run: NewRun) -> None:
    folder, _ = new_run(PPO(hidden=(16,)), VECTOR)
    with pytest.raises(CheckpointError, match=r"is of another network.*policy\.hidden\.0\.weight"):
        load(folder, method=PPO(hidden=(32,)))
    with pytest.raises(CheckpointError, match=r"is of another network.*gru\.cell\.weight_ih"):
        load(folder, method=PPO(hidden=(16,), memory="gru"))
    other, _ = new_run(PPO(hidden=(16,)), Spec(VECTOR.observation, Discrete(5)))
    shutil.copy(other / "spec.json", folder / "spec.json")
    with pytest.raises(CheckpointError, match="is of another network"):
        load(folder)


@dataclass(frozen=True)
class Own(PPO):
    """A method of one's own, with a field that is a function."""

    shape: Callable[[float], float] = abs
    """Of the rewards."""


def test_a_method_of_ones_own_is_imported_or_given(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Own(hidden=(16, 8), gamma=0.5, clip_range_vf=0.25)
    folder, _ = new_run(method, VECTOR)
    written = json.loads((folder / "config.json").read_text())

    def loaded(**config: Any) -> Policy:
        (folder / "config.json").write_text(json.dumps({**written, **config}))
        return load(folder)

    assert load(folder, method=method).method is method
    with pytest.raises(ConfigError, match=r"cannot be imported: .*give load\(…, method=…\)"):
        loaded(classes={"method": "package.that_is_not_there:Own"})
    with pytest.raises(ConfigError, match="which is no Method but <class 'dict'>"):
        loaded(classes={"method": "builtins:dict"})
    name = "a_module_of_ones_own"
    monkeypatch.setitem(sys.modules, name, sys.modules[Own.__module__])
    named = {"classes": {"method": f"{name}:Own"}}
    with pytest.raises(ConfigError, match=r"cannot hold what shape of Own was. Give load\(…, method=Own\(…\)\)"):
        loaded(**named, opaque=["shape", "env"])
    assert loaded(**named).method == method  # tuples are tuples again, the function is the function
    with pytest.raises(ConfigError, match=r"config.json has no Own that can be made: gamma=99"):
        loaded(**named, gamma=99)


def test_a_folder_of_no_run_is_refused(new_run: NewRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is no folder. Give that of a run"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"it has no config.json, spec.json, checkpoints"):
        load(tmp_path)
    folder, _ = new_run(PPO(), VECTOR)
    (folder / "spec.json").write_text("{")
    with pytest.raises(ConfigError, match=r"spec.json is no JSON"):
        load(folder)
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"has no last checkpoint. It has none."):
        load(folder)


WITHOUT = """
import json, sys
for name in ("gymnasium", "ale_py", "envpool"):
    sys.modules[name] = None
import headrace
policy = headrace.load(sys.argv[1])
print(json.dumps([int(policy.act(row)) for row in json.loads(sys.argv[2])]))
"""


@pytest.mark.slow
def test_needs_no_package_of_environments(new_run: NewRun) -> None:
    folder, _ = new_run(PPO(), Gymnasium("CartPole-v1"), decisive)
    rows = seen(30)
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(folder), json.dumps(rows.tolist())],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert told.stderr == ""
    assert json.loads(told.stdout) == headrace.load(folder).act(rows).tolist()
    assert len(set(json.loads(told.stdout))) == 2
