"""Numbers that are not finite: an update that meets one is named or left out, and nothing of it stays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace import A2C, PPO, Box, ConfigError, Discrete, Env, Inline, Learner, Spec, SyncBatches
from headrace.envs.base import CheckedVectorEnv
from headrace.envs.toy import Target
from headrace.errors import NonFinite

pytestmark = pytest.mark.timeout(60)

LENGTH = 300  # steps of an episode
AT = 500


@pytest.fixture(scope="module")
def Broken() -> Any:
    """Broken(field, value): the vector of environment 1 gives this value once, in its step 500."""

    @dataclasses.dataclass(frozen=True)
    class Broken(Env):
        field: str = ""
        value: float = math.nan
        endless: bool = False

        @property
        def spec(self) -> Spec:
            return Spec(Box(np.full(2, -np.inf), np.full(2, np.inf)), Discrete(2))

        def make(self, indices: range) -> Any:
            return _Broken(self, indices)

    class _Broken(CheckedVectorEnv):
        def __init__(self, env: Any, indices: range) -> None:
            super().__init__(len(indices), env.spec.action)
            self.env, self.indices = env, list(indices)

        def _reset(self, seed: int) -> Any:
            self.rng = np.random.default_rng((seed, *self.indices))
            self.calls = self.steps = 0
            return self._show()

        def _show(self) -> Any:
            return self.rng.normal(size=(self.num_envs, 2)).astype(np.float32)

        def _step(self, action: Any) -> Any:
            self.calls += 1
            self.steps += 1
            observation, reward = self._show(), action.astype(np.float32)
            if not self.env.endless and self.steps == LENGTH + 1:
                self.steps = 0
                reward[:] = 0
            if self.calls == AT and 1 in self.indices:
                held = observation[:, 1] if self.env.field == "observation" else reward
                held[self.indices.index(1)] = self.env.value
            ended, never = np.full((2, self.num_envs), [[self.steps == LENGTH and not self.env.endless], [False]])
            return observation, reward, never, ended

    return Broken


PLAN = SyncBatches(actors=2, num_envs=4, num_steps=110)
VARIANTS = [("reward", math.nan), ("reward", -math.inf), ("observation", math.nan), ("observation", math.inf)]
METHODS = {
    "a2c": lambda: A2C(hidden=(8,), normalize_observation=True, normalize_reward=True),
    "ppo": lambda: PPO(hidden=(8,), num_minibatches=2, update_epochs=2, normalize_reward=True),
    "ppo-gru": lambda: PPO(hidden=(8,), num_minibatches=1, update_epochs=1, memory="gru"),
}


def numbers(state: Any) -> Iterator[torch.Tensor]:
    """All tensors of floats in a state."""
    if isinstance(state, dict):
        for value in state.values():
            yield from numbers(value)
    elif isinstance(state, torch.Tensor) and state.is_floating_point():
        yield state


def assert_finite(state: Any) -> None:
    for tensor in numbers({**state, "net": {k: v for k, v in state["net"].items() if k[-4:] not in (".low", "high")}}):
        assert tensor.isfinite().all()


def assert_same(state: Any, other: Any) -> None:
    pairs = list(zip(numbers(state), numbers(other), strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("field", "value"), VARIANTS)
def test_HC_15_the_first_offender_is_named_before_a_weight_has_changed(field: str, value: float, Broken: Any) -> None:
    learner = Learner(METHODS["ppo"](), Broken().spec, seed=1)
    reports = PLAN.run(learner, Broken(field, value), Inline(), env_steps=10**9)
    for report in reports:
        if report.version == 4:
            break
    before = learner.state()
    with pytest.raises(NonFinite) as caught:
        next(reports)
    # Step 500 is in row 59 of rollout 4; what it showed is the observation of the row after it.
    row = 59 + (field == "observation")
    assert str(caught.value).startswith(
        f"{field} of environment 1 is {value}, in row {row} of rollout 4 of actor 0, made with version 4; nothing was"
    )
    assert learner.version == before["counters"]["version"] == 4
    assert_same(learner.state(), before)
    assert_finite(before)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("reward", math.nan, "a2c"),
        ("observation", math.nan, "ppo"),
        ("observation", math.inf, "ppo-gru"),
        *(
            pytest.param(*variant, name, marks=pytest.mark.slow)
            for name, variants in (("a2c", VARIANTS[1:]), ("ppo", VARIANTS[::2]), ("ppo-gru", VARIANTS[:2]))
            for variant in variants
        ),
    ],
)
def test_HC_15_skip_leaves_the_batch_out_and_goes_on(field: str, value: float, name: str, Broken: Any) -> None:
    learner = Learner(METHODS[name](), Broken().spec, seed=1, non_finite="skip")
    states, reports = [], []
    for report in PLAN.run(learner, Broken(field, value), Inline(), env_steps=10**9):
        states.append(learner.state())
        reports.append(report)
        assert_finite(states[-1])
        assert report.version == len(states)
        if report.version == 8:
            break
    skipped = [report.version for report in reports if not report.metrics]
    # With a memory the rest of its episode is unknown too: the row that resets is 50 of the next rollout.
    remembers = name == "ppo-gru" and field == "observation" and math.isnan(value)  # a gate turns ∞ into 1
    assert skipped == ([5, 6] if remembers else [5])
    for part in ("net", "optimizers"):
        assert_same({part: states[4][part]}, {part: states[3][part]})
    assert reports[3].dropped == {}
    steps = sum(reports[version - 1].env_steps - reports[version - 2].env_steps for version in skipped)
    assert reports[-1].dropped == {"non_finite": steps}
    assert reports[4].samples_learned == reports[3].samples_learned
    assert reports[-1].samples_learned > reports[3].samples_learned
    assert not all(torch.equal(a, b) for a, b in zip(numbers(states[-1]), numbers(states[4]), strict=True))
    resumed = Learner(METHODS[name](), Broken().spec, seed=2)
    resumed.load_state(states[-1])
    assert resumed.dropped == reports[-1].dropped


def test_HC_15_a_running_return_that_is_not_finite_begins_anew(Broken: Any) -> None:
    """In an episode without an end, whose every later return would be NaN."""
    learner = Learner(METHODS["a2c"](), Broken().spec, seed=1, non_finite="skip")
    plan = SyncBatches(num_envs=4, num_steps=50)
    for report in plan.run(learner, Broken("reward", endless=True), Inline(), env_steps=10**9):
        if report.version == 14:
            break
    assert report.dropped == {"non_finite": 200}
    assert learner.net.reward_normalizer.moments.count == 13 * 200  # type: ignore[union-attr]
    assert_finite(learner.state())


MILLION = PPO(hidden=(8,), num_minibatches=2, update_epochs=4, learning_rate=1e6, anneal_lr=False)
"""The first step makes standard deviations of e to the power of a million, and the second one a loss that is NaN."""


@pytest.mark.parametrize("at_once", [True, False], ids=["looking", "accelerator"])
def test_HC_15_a_learning_rate_of_a_million_is_named(at_once: bool) -> None:
    env = Target(dimensions=2)
    learner = Learner(MILLION, env.spec, seed=1)
    learner._looks = at_once
    before = learner.state()
    with pytest.raises(NonFinite, match="gradient of group 'net' has norm nan, in update 1, at a learning rate of 1e"):
        next(SyncBatches(num_envs=4, num_steps=32).run(learner, env, Inline(), env_steps=10**9))
    after = learner.state()
    assert_finite(after)
    if not at_once:  # then all steps were taken, and taken back
        assert_same({"net": after["net"]}, {"net": before["net"]})


@pytest.mark.parametrize("at_once", [True, False], ids=["looking", "accelerator"])
def test_HC_15_a_learning_rate_of_a_million_is_left_out_update_by_update(at_once: bool) -> None:
    env = Target(dimensions=2)
    learner = Learner(MILLION, env.spec, seed=1, non_finite="skip", devices=("cpu", "cpu"))
    learner._looks = at_once
    before, reports = learner.state(), []
    for report in SyncBatches(num_envs=4, num_steps=32).run(learner, env, Inline(), env_steps=10**9):
        reports.append(report)
        assert report.dropped == {"non_finite": report.env_steps}
        assert report.gradient_steps == report.samples_learned == 0
        for part in ("net", "optimizers"):
            assert_same({part: learner.state()[part], "": torch.zeros(1)}, {part: before[part], "": torch.zeros(1)})
        for replica in learner._replicas:
            assert_same({"net": replica.net.state_dict()}, {"net": before["net"]})
        if report.version == 3:
            break
    learner.method = learner._annealed = dataclasses.replace(MILLION, learning_rate=1e-3)  # as a schedule would
    learner._learn_by(learner.method)
    for report in SyncBatches(num_envs=4, num_steps=32).run(learner, env, Inline(), env_steps=10**9):
        assert report.metrics
        break
    assert report.gradient_steps == 8


def test_which_row_of_a_batch_is_named(Broken: Any) -> None:
    learner = Learner(A2C(hidden=(4,)), Broken().spec, seed=1)
    rollout = learner.example(5, 3)
    rollout.valid.fill_(True)
    batch = learner.prepare(rollout)
    batch.target[3, 1] = math.inf  # type: ignore[attr-defined]
    batch.advantage[4, 0] = math.nan  # type: ignore[attr-defined]
    with pytest.raises(NonFinite, match=r"^target at \[3, 1\] of the batch is inf, before update 1; nothing"):
        learner.update(batch)
    assert learner.version == 0


def test_large_numbers_are_numbers(Broken: Any) -> None:
    """A sum that overflows is looked at more closely."""
    learner = Learner(A2C(hidden=(4,), vf_coef=0.0), Broken().spec, seed=1)
    rollout = learner.example(5, 3)
    rollout.valid.fill_(True)
    batch = learner.prepare(rollout)
    batch.value.fill_(3e38)  # type: ignore[attr-defined]
    assert batch.value.sum().isinf()  # type: ignore[attr-defined]
    assert learner.update(batch).version == 1


def test_learners_leave_an_update_out_together(Broken: Any) -> None:
    """One whose own batch is finite hears of the other's."""
    learner = Learner(A2C(hidden=(4,)), Broken().spec, seed=1, non_finite="skip")
    rollout = learner.example(5, 3)
    rollout.valid.fill_(True)
    rollout.env_steps.fill_(5)

    def other_fails(vector: Any, weight: Any) -> Any:
        assert vector.shape == (1,)
        return (vector + 1) / 2

    report = learner.update(learner.prepare(rollout), other_fails)
    assert report.dropped == {"non_finite": 15}
    assert report.metrics == {}


def test_a_gradient_that_is_not_finite_is_not_applied(Broken: Any) -> None:
    for non_finite in ("raise", "skip"):
        learner = Learner(A2C(hidden=(4,)), Broken().spec, seed=1, non_finite=non_finite)  # type: ignore[arg-type]
        rollout = learner.example(5, 3)
        rollout.valid.fill_(True)
        gradient, _ = learner.gradient(learner.prepare(rollout))
        gradient.flat[3] = math.nan
        before = learner.state()
        if non_finite == "raise":
            with pytest.raises(NonFinite, match="the gradient of group 'net' has norm nan"):
                learner.apply(gradient)
        else:
            learner.apply(gradient)
            assert learner.dropped == {"non_finite": 0}
        assert_same({"net": learner.state()["net"]}, {"net": before["net"]})
        assert learner.gradient_steps == 0


def test_an_unknown_policy_is_refused(Broken: Any) -> None:
    with pytest.raises(ConfigError, match=r"non_finite='ignore': choose \"raise\" or \"skip\""):
        Learner(A2C(), Broken().spec, non_finite="ignore")  # type: ignore[arg-type]
