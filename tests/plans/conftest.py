"""What the tests of the plans share: the placements, a training run that is looked at from all sides, environments.

Classes that travel to roles are made inside functions: such a class travels by value on every placement, so that a
role's process need not import the test module (and pytest with it) first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import A2C, PPO, Box, Discrete, Env, Gymnasium, Inline, Learner, Processes, Spec, SyncBatches, Threads
from headrace.channel import role
from headrace.envs.base import CheckedVectorEnv
from headrace.envs.toy import Recall, Target

PLACES = {"inline": Inline(), "threads": Threads(), "processes": Processes()}

METHODS: Mapping[str, tuple[type, dict[str, Any]]] = {
    "a2c": (A2C, {}),
    "ppo": (PPO, {"update_epochs": 2, "num_minibatches": 2}),
}
KINDS: Mapping[str, tuple[Env, dict[str, Any]]] = {
    "discrete": (Gymnasium("CartPole-v1"), {}),
    "continuous": (Target(dimensions=2, length=5), {}),
    "recurrent": (Recall(length=4), {"memory": "gru"}),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Any:
    """Every placement in turn."""
    return PLACES[request.param]


@pytest.fixture(params=["threads", "processes"])
def beside(request: pytest.FixtureRequest) -> Any:
    """The placements on which roles run beside each other and clocks are real."""
    return PLACES[request.param]


@pytest.fixture(params=["inline", "threads"])
def within(request: pytest.FixtureRequest) -> Any:
    """The placements on which roles share the driver's process."""
    return PLACES[request.param]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests compute with one torch thread, unless they say otherwise: two wait for each other on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def places() -> Mapping[str, Any]:
    return PLACES


@pytest.fixture(scope="session")
def task() -> Callable[..., tuple[Any, Env]]:
    """task("ppo", "recurrent", **fields): a small method of this name, and an environment of this kind for it."""

    def make(method: str, kind: str, **fields: Any) -> tuple[Any, Env]:
        build, given = METHODS[method]
        env, needed = KINDS[kind]
        return build(**{"hidden": (8,), "learning_rate": 1e-2, **given, **needed, **fields}), env

    return make


@pytest.fixture(scope="session")
def digest() -> Callable[[Learner], str]:
    """The SHA-256 of all bytes of a learner's network, in order."""

    def sha256(learner: Learner) -> str:
        found = hashlib.sha256()
        for name, tensor in learner.net.state_dict().items():
            found.update(name.encode())
            found.update(tensor.detach().contiguous().numpy().tobytes())
        return found.hexdigest()

    return sha256


@dataclasses.dataclass
class Run:
    """What one training run was given, what it did, and what came of it."""

    learner: Learner
    reports: list[Any] = dataclasses.field(default_factory=list)
    rollouts: list[Any] = dataclasses.field(default_factory=list)
    """Copies of what every update got, all actors joined."""
    batches: list[Any] = dataclasses.field(default_factory=list)
    """What the method prepared of them."""
    weights: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    """Copies of the network's state by version."""


@pytest.fixture(scope="session")
def train() -> Callable[..., Run]:
    """train(method, env, place, updates=5, …): run SyncBatches and note everything.

    each(report): called in the caller's loop. learner: to be used instead of a new one. state: a snapshot. anneal:
    whether the run is as long as its schedule, and not just the begin of an endless one; then a few updates more or
    less come of it, by how many rows are resets.
    """

    def run(
        method: Any,
        env: Env,
        place: Any,
        *,
        updates: int = 5,
        seed: int = 1,
        learner: Learner | None = None,
        state: Any = None,
        each: Callable[[Any], None] = lambda report: None,
        anneal: bool = False,
        **plan: Any,
    ) -> Run:
        plan = {"num_envs": 6, "num_steps": 8, **plan}
        learner = learner or Learner(method, env.spec, seed=seed)
        run = Run(learner)
        if state is None:
            run.weights[learner.version] = _copied(learner)
        prepare, update = learner.prepare, learner.update

        def prepared(rollout: Any) -> Any:
            if not run.weights:  # a resumed run: its state is loaded by now
                run.weights[learner.version] = _copied(learner)
            run.rollouts.append(rollout.clone())
            batch = prepare(rollout)
            run.batches.append(batch.clone())
            return batch

        def updated(batch: Any) -> Any:
            report = update(batch)
            run.weights[learner.version] = _copied(learner)
            return report

        learner.prepare, learner.update = prepared, updated  # type: ignore[method-assign]
        try:
            steps = int((updates - 0.5) * plan["num_envs"] * plan["num_steps"]) if anneal else 10**9
            for report in SyncBatches(**plan).run(learner, env, place, env_steps=steps, state=state):
                run.reports.append(report)
                each(report)
                if not anneal and len(run.reports) == updates:
                    break
        finally:
            del learner.prepare, learner.update
        return run

    return run


def _copied(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.net.state_dict().items()}


@pytest.fixture(scope="session")
def log_probs() -> Callable[..., torch.Tensor]:
    """log_probs(method, spec, weights, rollout): of the rollout's actions under these weights, [T, B].

    Worked out row by row, from the layers and not from what the method's `act` or `prepare` does.
    """

    nets: dict[int, tuple[Any, Any]] = {}  # building one takes longer than all that is done with it

    def compute(method: Any, spec: Spec, weights: Mapping[str, torch.Tensor], rollout: Any) -> torch.Tensor:
        _, net = nets.get(id(method)) or nets.setdefault(id(method), (method, method.build(spec, torch.Generator())))
        net.load_state_dict(weights)
        memory, rows = rollout.memory, []
        with torch.no_grad():
            for t in range(rollout.size("T")):
                x = net.encoder(rollout.observation[t])
                if net.gru is not None:
                    if t:  # what follows a reset row begins an episode
                        memory = memory * rollout.valid[t - 1].unsqueeze(-1)
                    x = memory = net.gru.cell(x, memory)
                rows.append(net.distribution.evaluate(net.logits(x), rollout.action[t])[0])
        return torch.stack(rows)

    return compute


@pytest.fixture(scope="session")
def spied() -> Callable[[type], type]:
    """spied(PPO): the same method, whose field `seen` lists the (step, minibatch) of all its calls of `losses`."""

    def subclass(base: Any) -> type:
        @dataclasses.dataclass(frozen=True)
        class Spied(base):  # type: ignore[misc]
            seen: list[Any] = dataclasses.field(default_factory=list, compare=False)

            def losses(self, net: Any, batch: Any, step: int) -> Any:
                self.seen.append((step, batch.clone()))
                yield from base.losses(self, net, batch, step)

        return Spied

    return subclass


# Environments around another one --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def Noted() -> Any:
    """Noted(env, folder): leaves a file named by the actor's rank, which says in which process and thread it is made.

    What it leaves is "process, thread, torch threads of that thread".
    """

    @dataclasses.dataclass(frozen=True)
    class Noted(Env):
        env: Env
        folder: Path

        @property
        def spec(self) -> Spec:
            return self.env.spec

        def make(self, indices: range) -> Any:
            text = f"{os.getpid()} {threading.get_native_id()} {torch.get_num_threads()}"
            (self.folder / str(role().rank)).write_text(text)
            return self.env.make(indices)

    return Noted


@pytest.fixture(scope="session")
def Failing() -> Any:
    """Failing(env, index, at, how): the actor of environment `index` fails in its vector's step number `at`.

    how: "raise", or "kill" for SIGKILL, or "reset" to raise at the first reset.
    """

    @dataclasses.dataclass(frozen=True)
    class Failing(Env):
        env: Env
        index: int
        at: int = 0
        how: str = "raise"

        @property
        def spec(self) -> Spec:
            return self.env.spec

        def make(self, indices: range) -> Any:
            return _Failing(self, indices)

    class _Failing(CheckedVectorEnv):
        def __init__(self, env: Any, indices: range) -> None:
            super().__init__(len(indices), env.spec.action)
            self.vector, self.asked, self.steps = env.env.make(indices), env, 0
            self.mine = env.index in indices

        def _reset(self, seed: int) -> Any:
            if self.mine and self.asked.how == "reset":
                raise ValueError("the maze has no door")
            return self.vector.reset(seed)

        def _step(self, action: Any) -> Any:
            self.steps += 1
            if self.mine and self.steps == self.asked.at and self.asked.how != "reset":
                if self.asked.how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("the ball rolled off the table")
            return self.vector.step(action)

    return Failing


@pytest.fixture(scope="session")
def Endless() -> Any:
    """Endless(reward): an episode without end, whose every step gives this reward; the observation is always 1."""

    @dataclasses.dataclass(frozen=True)
    class Endless(Env):
        reward: float = 1.0

        @property
        def spec(self) -> Spec:
            return Spec(observation=Box(np.ones(1), np.ones(1), torch.float32), action=Discrete(2))

        def make(self, indices: range) -> Any:
            return _Endless(self, indices)

    class _Endless(CheckedVectorEnv):
        def __init__(self, env: Any, indices: range) -> None:
            super().__init__(len(indices), env.spec.action)
            self.reward = env.reward

        def _reset(self, seed: int) -> Any:
            return np.ones((self.num_envs, 1), np.float32)

        def _step(self, action: Any) -> Any:
            no = np.zeros(self.num_envs, np.bool_)
            return self._reset(0), np.full(self.num_envs, self.reward, np.float32), no, no

    return Endless
