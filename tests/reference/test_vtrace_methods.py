"""IMPALA and APPO against slow loops in NumPy and float64, which look at one step of one episode after the other."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import (
    A2C,
    PPO,
    Box,
    ConfigError,
    Discrete,
    Gymnasium,
    Inline,
    Learner,
    NonFinite,
    Processes,
    Rollout,
    Spec,
    SyncBatches,
    Threads,
)
from headrace.envs.toy import Recall, Target
from headrace.methods import impala
from headrace.methods.appo import APPO
from headrace.methods.impala import IMPALA
from headrace.targets import vtrace

WIDTH, STEPS, ENVS = 3, 12, 5
GAMMA = 0.9
SPECS = {
    "next-step": Spec(Box(np.full(WIDTH, -np.inf), np.full(WIDTH, np.inf)), Discrete(3)),
    "same-step": Spec(Box(np.full(WIDTH, -np.inf), np.full(WIDTH, np.inf)), Discrete(3), shortest_truncation=1),
    "continuous": Spec(Box(np.full(WIDTH, -np.inf), np.full(WIDTH, np.inf)), Box(np.full(2, -1.0), np.full(2, 1.0))),
}
IMPALAS = {
    "plain": IMPALA(hidden=(8, 8), gamma=GAMMA, ent_coef=0.03),
    "bars": IMPALA(hidden=(8,), gamma=GAMMA, rho_bar=1.5, c_bar=0.8, gae_lambda=0.7, shared=True),
    "gru": IMPALA(hidden=(8,), gamma=GAMMA, ent_coef=0.03, memory="gru", reward_scale=0.5, reward_clip=1.0),
}
APPOS = {
    "plain": APPO(hidden=(8, 8), gamma=GAMMA, target_update_interval=2),
    "bars": APPO(hidden=(8,), gamma=GAMMA, rho_bar=1.5, c_bar=0.8, gae_lambda=0.7, shared=True),
    "gru": APPO(hidden=(8,), gamma=GAMMA, gae_lambda=1.0, memory="gru", reward_scale=0.5, reward_clip=1.0),
}
ONE_STEP = {name: replace(method, update_epochs=1, num_minibatches=1) for name, method in APPOS.items()}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(learner: Learner, seed: int = 0, steps: int = STEPS, envs: int = ENVS, ends: float = 0.3) -> Rollout:
    """A rollout of random data: episodes that terminate, that are truncated and that go on; actions of another policy.

    Environment 2 ends in its last row. Where environments reset in the next step, environment 3 begins with a reset.
    """
    rng = np.random.default_rng((seed, steps))
    within = learner.spec.shortest_truncation is not None
    rollout = learner.example(steps, envs)
    valid = np.ones((steps, envs), bool)
    terminated, truncated = np.zeros((2, steps, envs), bool)
    for b in range(envs):
        resets = b == 3 and not within
        for t in range(steps):
            valid[t, b] = not resets
            end = not resets and (rng.random() < ends or (b == 2 and t == steps - 1))
            kind = rng.random() < 0.5
            terminated[t, b], truncated[t, b] = end and kind, end and not kind
            resets = end and not within
    if rollout.final_step is not None:
        assert rollout.final_observation is not None
        rollout.final_observation.fill_(1e3)  # what nobody uses would show
        rollout.final_step.fill_(-1)
        for b in range(envs):
            for line, row in enumerate(np.flatnonzero(truncated[:, b])):
                rollout.final_step[line, b] = int(row)
                rollout.final_observation[line, b] = torch.tensor(rng.normal(size=WIDTH), dtype=torch.float32)
    for held, value in ((rollout.valid, valid), (rollout.terminated, terminated), (rollout.truncated, truncated)):
        held.copy_(torch.tensor(value))
    rollout.observation.copy_(torch.tensor(rng.normal(size=(steps + 1, envs, WIDTH))))
    assert rollout.log_prob is not None
    rollout.reward.copy_(torch.tensor(rng.normal(size=(steps, envs))))
    if isinstance(learner.spec.action, Discrete):
        rollout.action.copy_(torch.tensor(rng.integers(learner.spec.action.n, size=(steps, envs))))
        rollout.log_prob.fill_(-math.log(3)).add_(torch.tensor(0.4 * rng.normal(size=(steps, envs))))
    else:
        rollout.action.copy_(torch.tensor(rng.normal(size=(steps, envs, 2))))
        rollout.log_prob.copy_(torch.tensor(rng.normal(size=(steps, envs)) - 2.5))
    if rollout.memory is not None:
        rollout.memory.copy_(torch.tensor(rng.normal(size=rollout.memory.shape)))
    rollout.env_steps.copy_(rollout.valid.sum(0))
    return rollout.check()


class Step(NamedTuple):
    """A step of an episode, as a network in float64 sees it."""

    row: int
    log_prob: Tensor
    entropy: Tensor
    value: Tensor


class Episode(NamedTuple):
    column: int
    steps: list[Step]
    tail: float
    """The value of what follows the last step."""


def episodes(net: Any, rollout: Rollout) -> list[Episode]:
    """What a network in float64 says of every episode or piece of one, row by row."""
    finals = {}
    if rollout.final_step is not None:
        for line, b in np.argwhere(rollout.final_step.numpy() >= 0):
            finals[int(rollout.final_step[line, b]), int(b)] = rollout.final_observation[line, b]  # type: ignore[index]
    found = []
    for b in range(rollout.size("B")):
        memory = None if rollout.memory is None else rollout.memory[b : b + 1].double()
        steps: list[Step] = []

        def see(observation: Tensor, memory: Tensor | None) -> tuple[Any, Tensor | None]:
            row = observation.double()[None]
            if memory is not None:
                row = memory = net.gru.cell(row, memory)
            return net.above(row), memory

        for t in range(rollout.size("T")):
            features, memory = see(rollout.observation[t, b], memory)
            ended = bool(rollout.terminated[t, b] | rollout.truncated[t, b])
            if rollout.valid[t, b]:
                action: Tensor = rollout.action[t, b][None]
                logits = net.logits(features)
                if action.is_floating_point():
                    log_std = net.distribution.log_std
                    densities = -0.5 * ((action - logits) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
                    log_prob = densities.sum()
                    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
                else:
                    chances = logits[0].exp() / logits[0].exp().sum()
                    log_prob, entropy = chances[action[0]].log(), -(chances * chances.log()).sum()
                steps.append(Step(t, log_prob, entropy, net.values(features)[0]))
            if steps and (ended or t == rollout.size("T") - 1):
                following, _ = see(finals.get((t, b), rollout.observation[t + 1, b]), memory)
                tail = 0.0 if rollout.terminated[t, b] else float(net.values(following).detach())
                found.append(Episode(b, steps, tail))
                steps = []
            if memory is not None and (ended if rollout.final_step is not None else not rollout.valid[t, b]):
                memory = torch.zeros_like(memory)
    return found


class Aim(NamedTuple):
    """What V-trace gives for one step."""

    target: float
    advantage: float
    """Without the ratio of the step itself."""
    ratio: float


def slow_vtrace(method: Any, episode: Episode, rollout: Rollout, mix: bool) -> list[Aim]:
    """By explicit products. mix: whether λ also weighs the value that follows against its target, in the advantage."""
    bound = method.reward_clip or math.inf
    b, lam = episode.column, method.gae_lambda
    rows = [step.row for step in episode.steps]
    values = [float(step.value.detach()) for step in episode.steps] + [episode.tail]
    rewards = [min(max(float(rollout.reward[t, b]), -bound), bound) * method.reward_scale for t in rows]
    ratios = [
        float(np.exp(float(step.log_prob.detach()) - float(rollout.log_prob[t, b])))  # type: ignore[index]
        for step, t in zip(episode.steps, rows, strict=True)
    ]
    rho = [min(method.rho_bar, ratio) for ratio in ratios]
    c = [lam * min(method.c_bar, ratio) for ratio in ratios]
    count, gamma = len(rows), method.gamma
    delta = [rho[i] * (rewards[i] + gamma * values[i + 1] - values[i]) for i in range(count)]
    targets = [
        values[i] + sum(gamma ** (j - i) * float(np.prod(c[i:j])) * delta[j] for j in range(i, count))
        for i in range(count)
    ] + [episode.tail]
    after = [(1 - lam) * values[i] + lam * targets[i] if mix else targets[i] for i in range(count + 1)]
    return [Aim(targets[i], rewards[i] + gamma * after[i + 1] - values[i], ratios[i]) for i in range(count)]


# Against the loops ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", IMPALAS)
def test_the_gradient_of_impala_is_that_of_a_slow_loop(name: str, kind: str) -> None:
    """The loss, its metrics and its gradient in every parameter, against autograd through single steps in float64."""
    method = IMPALAS[name]
    learner = Learner(method, SPECS[kind], seed=3)
    rollout = made(learner)
    (loss,) = method.losses(learner.net, learner.prepare(rollout), 0)
    loss.total.backward()  # type: ignore[no-untyped-call]
    net = copy.deepcopy(learner.net).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    sums = dict.fromkeys(("policy_loss", "value_loss", "entropy", "rho", "clipfrac", "approx_kl"), 0.0)
    for episode in episodes(net, rollout):
        for step, aim in zip(episode.steps, slow_vtrace(method, episode, rollout, mix=False), strict=True):
            rho = min(method.rho_bar, aim.ratio)
            policy_loss, value_loss = -step.log_prob * rho * aim.advantage, (step.value - aim.target) ** 2
            total = total + policy_loss + method.vf_coef * value_loss - method.ent_coef * step.entropy
            count += 1
            seen = (policy_loss.detach(), value_loss.detach(), step.entropy.detach())
            clipped, kl = aim.ratio > method.rho_bar, aim.ratio - 1 - math.log(aim.ratio)
            for key, value in zip(sums, (*map(float, seen), rho, float(clipped), kl), strict=True):
                sums[key] += value
    net.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    assert float(loss.weight) == count == rollout.valid.sum()
    assert float(loss.total.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    assert loss.metrics.keys() == {f"losses/{key}" for key in sums}
    for key, expected in sums.items():
        assert float(loss.metrics[f"losses/{key}"]) == pytest.approx(expected, rel=1e-4, abs=1e-4), key
    assert 0 < sums["clipfrac"] < count
    for (key, slow), parameter in zip(net.named_parameters(), learner.net.parameters(), strict=True):
        assert slow.grad is not None
        assert parameter.grad is not None
        assert slow.grad.abs().max() > 1e-3
        torch.testing.assert_close(parameter.grad.double(), slow.grad, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", APPOS)
def test_the_batch_of_appo_is_that_of_a_slow_loop(name: str, kind: str) -> None:
    """All of it from the target network, which is another one than the one that learns."""
    method = APPOS[name]
    learner = Learner(method, SPECS[kind], seed=3)
    with torch.no_grad():
        for parameter in learner.acting.parameters():
            parameter.add_(0.1)
    rollout = made(learner)
    batch: Any = learner.prepare(rollout)
    net = copy.deepcopy(learner.net["target"]).double()  # type: ignore[index]
    target, advantage, value = torch.zeros(3, STEPS, ENVS)
    for episode in episodes(net, rollout):
        for step, aim in zip(episode.steps, slow_vtrace(method, episode, rollout, mix=True), strict=True):
            place = step.row, episode.column
            target[place], advantage[place], value[place] = aim.target, aim.advantage, step.value.detach()
    valid = rollout.valid
    assert torch.equal(batch.weight, valid.float())
    for given, expected in ((batch.target, target), (batch.value, value), (batch.advantage, advantage)):
        torch.testing.assert_close(given[valid], expected[valid], rtol=1e-5, atol=1e-5)
    assert not batch.advantage[~valid].any()
    assert batch.log_prob is rollout.log_prob  # the surrogate's ratio is to the policy that acted
    (given,), (expected,) = (
        asked.losses(net, batch, 0) for asked, net in ((method, learner.net), (ppo_of(method), learner.acting))
    )
    assert torch.equal(given.total, expected.total)  # of the network that learns


def ppo_of(method: APPO, **fields: Any) -> PPO:
    """PPO with the same settings."""
    return PPO(**{name: getattr(method, name) for name in PPO.__dataclass_fields__} | fields)


# On-policy ------------------------------------------------------------------------------------------------------------


def acted(learner: Learner, seed: int = 0, **sizes: int) -> Rollout:
    """The same random data, whose actions are said to be those of the network as it is."""
    rollout = made(learner, seed, **sizes)
    net: Any = learner.acting
    with torch.no_grad():
        seen = impala.look(learner.method, net, rollout)  # type: ignore[arg-type]
    return rollout.replace(log_prob=seen.log_prob)


@pytest.mark.parametrize("kind", SPECS)
def test_on_policy_the_targets_of_impala_are_n_step_returns(kind: str) -> None:
    """With ρ = c = λ = 1: discounted rewards up to the end or the cut, and the value there."""
    method = IMPALA(hidden=(8,), gamma=GAMMA, ent_coef=0.0)
    learner = Learner(method, SPECS[kind], seed=3)
    rollout = acted(learner)
    (loss,) = method.losses(learner.net, learner.prepare(rollout), 0)
    errors = 0.0
    for episode in episodes(copy.deepcopy(learner.net).double(), rollout):
        following = episode.tail
        for step in reversed(episode.steps):
            following = float(rollout.reward[step.row, episode.column]) + GAMMA * following
            errors += (float(step.value.detach()) - following) ** 2
    assert float(loss.metrics["losses/value_loss"]) == pytest.approx(errors, rel=1e-5)
    # And so a step of IMPALA is one of A2C, whose advantages are n-step returns minus values.
    a2c = Learner(A2C(hidden=(8,), gamma=GAMMA, max_grad_norm=None), SPECS[kind], seed=3)
    given, expected = (each.gradient(each.prepare(rollout))[0].flat for each in (learner, a2c))
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("memory", [None, "gru"])
def test_on_policy_appo_is_ppo(memory: str | None, kind: str) -> None:
    """With a target network that is copied after every update, update after update."""
    method = APPO(hidden=(8,), update_epochs=2, num_minibatches=1, memory=memory, normalize_reward=True)
    learner = Learner(method, SPECS[kind], seed=3)
    ppo = Learner(ppo_of(method), SPECS[kind], seed=3)
    for seed in range(3):
        rollout = acted(learner, seed)
        learner.update(learner.prepare(rollout))
        ppo.update(ppo.prepare(rollout))
    for name, tensor in ppo.net.state_dict().items():
        torch.testing.assert_close(learner.acting.state_dict()[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def test_what_normalises_moves_as_that_of_a2c() -> None:
    fields = {"hidden": (8,), "normalize_observation": True, "normalize_reward": True}
    nets = []
    for method in (A2C(**fields), IMPALA(**fields), APPO(**fields, num_minibatches=1)):  # type: ignore[arg-type]
        learner = Learner(method, SPECS["next-step"], seed=3)
        rollout = made(learner)
        rollout.discounted_return.copy_(torch.arange(ENVS))  # type: ignore[union-attr]
        learner.update(learner.prepare(rollout))
        nets.append(dict(learner.acting.named_buffers()))
    assert {name for name in nets[0] if "moments" in name}
    for buffers in nets[1:]:
        assert buffers.keys() == nets[0].keys()
        for name, buffer in buffers.items():
            assert torch.equal(buffer, nets[0][name]), name


# Boundaries -----------------------------------------------------------------------------------------------------------


class Told(torch.nn.Module):
    """A critic that takes the value from the observation, and a policy that is indifferent."""

    gru = reward_normalizer = None

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.distribution, self.encoder = net.distribution, net.encoder

    def features(self, observation: Tensor) -> Tensor:
        return observation

    def logits(self, features: Tensor, observation: Tensor) -> Tensor:
        return torch.zeros(*features.shape[:-1], 2)

    def values(self, features: Tensor) -> Tensor:
        return features[..., 0]


@pytest.mark.parametrize("within", [True, False], ids=["same-step", "next-step"])
def test_LC_07_no_advantage_contains_the_value_of_the_next_episode(
    within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec(Box(np.full(1, -np.inf), np.full(1, np.inf)), Discrete(2), shortest_truncation=2 if within else None)
    rows = [0, 1, 2, 3] if within else [0, 1, 3, 4]  # else row 2 resets, and shows what the episode ended with
    for method in (IMPALA(gamma=0.9, ent_coef=0.0), APPO(gamma=0.9, gae_lambda=1.0)):
        learner = Learner(method, spec, seed=1)
        net: Any = Told(learner.acting)
        rollout = learner.example(rows[-1] + 1, 1)
        rollout.observation[:, 0, 0] = torch.tensor([2.0, 2, *[3] * (not within), 50, 50, 50])
        rollout.log_prob.fill_(math.log(0.5))  # type: ignore[union-attr]
        rollout.valid[rows], rollout.reward[rows], rollout.truncated[1] = True, 1.0, True
        if rollout.final_step is not None:
            rollout.final_step[0], rollout.final_observation[0] = 1, 3.0  # type: ignore[index]
        if isinstance(method, APPO):
            batch: Any = method.prepare(torch.nn.ModuleDict({"online": net, "target": net}), rollout)
            target, advantage = batch.target, batch.advantage
        else:
            seen: list[Any] = []

            def noted(*given: Any, seen: list[Any] = seen) -> Any:
                seen.append(vtrace(*given))
                return seen[-1]

            monkeypatch.setattr(impala, "vtrace", noted)
            list(method.losses(net, method.prepare(net, rollout), 0))
            ((target, advantage),) = seen
        assert target[rows, 0].tolist() == pytest.approx([4.33, 3.7, 42.4, 46.0], abs=1e-5)
        assert advantage[rows, 0].tolist() == pytest.approx([2.33, 1.7, -7.6, -4.0], abs=1e-5)


@pytest.mark.parametrize(
    "method", [IMPALAS["plain"], replace(ONE_STEP["plain"], normalize_advantage=False)], ids=["impala", "appo"]
)
@pytest.mark.parametrize("kind", ["next-step", "same-step"])
def test_every_step_is_learned_from_and_no_reset_row(kind: str, method: Any) -> None:
    """The last row as well: another reward in a row changes the gradient, if the row is a step."""
    learner = Learner(method, SPECS[kind], seed=3)
    rollout = made(learner, steps=5, envs=4)
    state = learner.state()

    def gradient(rollout: Rollout) -> Tensor:
        learner.load_state(state)
        return learner.gradient(learner.prepare(rollout))[0].flat

    before = gradient(rollout)
    for t, b in np.ndindex(5, 4):
        other = rollout.clone()
        other.reward[t, b] += 1.0
        moved = not torch.equal(gradient(other), before)
        assert moved == rollout.valid[t, b], (t, b)
    assert rollout.valid[4].any()
    assert rollout.valid.all() == (kind == "same-step")


# Parts ----------------------------------------------------------------------------------------------------------------


SPLIT: dict[str, Any] = {
    "impala": IMPALAS["plain"],
    "impala-gru": IMPALAS["gru"],
    "appo": ONE_STEP["plain"],
    "appo-gru": ONE_STEP["gru"],
}


@pytest.mark.parametrize(
    "arguments", [{"microbatch_size": 2 * STEPS}, {"devices": ("cpu", "cpu")}], ids=["microbatches", "devices"]
)
@pytest.mark.parametrize("name", SPLIT)
def test_microbatches_and_devices_give_the_gradient_of_the_whole(name: str, arguments: Any) -> None:
    method, spec = SPLIT[name], SPECS["same-step"]
    whole, split = Learner(method, spec, seed=3), Learner(method, spec, seed=3, **arguments)
    rollout = made(whole)
    expected, given = [each.gradient(each.prepare(rollout))[0] for each in (whole, split)]
    assert expected.flat.abs().max() > 1e-2
    torch.testing.assert_close(given.flat, expected.flat, rtol=1e-6, atol=1e-6)
    assert torch.equal(given.weight, expected.weight)


@pytest.mark.parametrize("kind", ["next-step", "same-step"])
def test_cut_where_all_episodes_end_the_parts_give_the_whole(kind: str) -> None:
    """In time, where nothing is lost by it, and by environments."""
    learner = Learner(IMPALAS["plain"], SPECS[kind], seed=3)
    halves = [made(learner, seed, ends=0.0) for seed in (1, 2)]
    halves[0].valid[:], halves[1].valid[:] = True, True
    for half in halves:
        half.terminated.zero_()
        half.truncated.zero_()
    halves[0].terminated[-1] = True
    if halves[0].final_step is None:  # the row after the end resets
        halves[1].valid[0] = False
    halves[1].observation[0] = halves[0].observation[-1]
    names = ("action", "log_prob", "reward", "terminated", "truncated", "valid", "version")
    rows = {
        name: torch.cat([getattr(half, name) for half in halves])
        for name in (*names, "episode_return", "episode_length")
    }
    observation = torch.cat([halves[0].observation[:-1], halves[1].observation])
    whole = learner.example(2 * STEPS, ENVS).replace(observation=observation, **rows).check()
    by_environment = [whole.at(B=slice(0, 2)), whole.at(B=slice(2, ENVS))]
    expected, _ = learner.gradient(learner.prepare(whole))
    for parts in (halves, by_environment):
        gradients = [learner.gradient(learner.prepare(part))[0] for part in parts]
        assert sum(gradient.weight for gradient in gradients) == expected.weight
        mean = sum(gradient.flat * (gradient.weight / expected.weight).float() for gradient in gradients)
        torch.testing.assert_close(mean, expected.flat, rtol=1e-5, atol=1e-6)


# The target network ---------------------------------------------------------------------------------------------------


def copied(net: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("interval", [1, 3])
def test_the_target_network_is_a_copy_of_every_so_many_updates(interval: int) -> None:
    method = replace(ONE_STEP["plain"], target_update_interval=interval, normalize_observation=True)
    learner = Learner(method, SPECS["next-step"], seed=3, devices=("cpu", "cpu"))
    net: Any = learner.net
    online = {0: copied(learner.acting)}
    assert equal(copied(net["target"]), online[0])
    for version in range(1, 8):
        learner.update(learner.prepare(made(learner, version)))
        online[version] = copied(learner.acting)
        assert not equal(online[version], online[version - 1])
        assert equal(copied(net["target"]), online[version // interval * interval])
    for replica in learner._replicas:
        assert equal(copied(replica.net), copied(net))


def test_a_run_that_goes_on_keeps_the_target_network() -> None:
    method = replace(ONE_STEP["plain"], target_update_interval=3)
    learner, later = (Learner(method, SPECS["next-step"], seed=seed) for seed in (3, 4))
    for seed in range(2):
        learner.update(learner.prepare(made(learner, seed)))
    later.load_state(learner.state())
    for seed in range(2, 4):
        for each in (learner, later):
            each.update(each.prepare(made(each, seed)))
        assert later.digest() == learner.digest()


def test_the_target_network_is_neither_stepped_nor_sent() -> None:
    learner = Learner(APPO(hidden=(8,)), SPECS["next-step"], seed=3)
    ppo = Learner(PPO(hidden=(8,)), SPECS["next-step"], seed=3)
    assert equal(copied(learner.acting), copied(ppo.acting))
    assert len(learner._replicas[0].groups["net"].parameters) == len(list(ppo.net.parameters()))
    assert not any(parameter.requires_grad for parameter in learner.net["target"].parameters())  # type: ignore[index]


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [IMPALAS["plain"], APPOS["plain"]], ids=["impala", "appo"])
def test_a_final_observation_that_is_not_finite_counts_where_it_is_used(method: Any) -> None:
    learner = Learner(method, SPECS["same-step"], seed=3)
    rollout = made(learner)
    assert rollout.final_step is not None
    assert rollout.final_observation is not None
    used = rollout.final_step >= 0
    rollout.final_observation[~used] = math.nan
    learner.update(learner.prepare(rollout))
    before = learner.state()
    line, column = used.nonzero()[0].tolist()
    rollout.final_observation[line, column, 1] = math.nan
    with pytest.raises(NonFinite, match="nothing was learned from it"):
        learner.update(learner.prepare(rollout))
    assert equal(learner.state()["net"], before["net"])


@pytest.mark.parametrize("method", [IMPALAS["plain"], APPOS["plain"]], ids=["impala", "appo"])
@pytest.mark.parametrize("name", ["reward", "log_prob", "observation"])
def test_a_rollout_that_is_not_finite_is_refused_or_skipped(name: str, method: Any) -> None:
    raising, skipping = Learner(method, SPECS["next-step"]), Learner(method, SPECS["next-step"], non_finite="skip")
    rollout = made(raising)
    getattr(rollout, name)[4, 1] = math.nan
    with pytest.raises(NonFinite, match=rf"{name} of environment 0 is nan, in row 4"):
        raising.prepare(rollout)
    before = copied(skipping.net)
    report = skipping.update(skipping.prepare(rollout))
    assert equal(copied(skipping.net), before)
    assert report.dropped == {"non_finite": int(rollout.valid.sum())}
    skipping.update(skipping.prepare(made(skipping)))
    assert not equal(copied(skipping.net), before)


@pytest.mark.parametrize("method", [IMPALA, APPO])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rho_bar": 0.0}, r"rho_bar=0.0: give a number above 0"),
        ({"rho_bar": math.nan}, r"rho_bar=nan: give a number above 0"),
        ({"c_bar": -1.0}, r"c_bar=-1.0: give a number above 0"),
        ({"gamma": 1.1}, r"gamma=1.1: give a number from 0 to 1"),
        ({"gae_lambda": -0.1}, r"gae_lambda=-0.1: give a number from 0 to 1"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0.0: give a number above 0, or None"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_fields_out_of_range_are_refused(method: Any, fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        method(**fields)


def test_what_only_one_of_them_refuses() -> None:
    with pytest.raises(ConfigError, match=r"^normalize_advantage=True: IMPALA computes advantages within its loss"):
        IMPALA(normalize_advantage=True)
    with pytest.raises(ConfigError, match=r"^target_update_interval=0: give at least 1"):
        APPO(target_update_interval=0)
    with pytest.raises(ConfigError, match=r"^num_minibatches=0: give at least 1"):
        APPO(num_minibatches=0)


# Placements -----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"hidden": (8,), "learning_rate": 1e-2}
TASKS: dict[str, Any] = {
    "impala": (IMPALA(**SMALL), Gymnasium("CartPole-v1")),
    "appo": (APPO(**SMALL, update_epochs=2, num_minibatches=1, target_update_interval=2), Target(2, length=5)),
    "impala-gru": (IMPALA(**SMALL, memory="gru"), Recall(length=4)),
    "appo-gru": (APPO(**SMALL, num_minibatches=2, memory="gru"), Recall(length=4)),
}


def trained(name: str, max_lag: int, place: Any, seed: int = 1) -> str:
    """The hash of the weights after five updates or more."""
    method, env = TASKS[name]
    learner = Learner(method, env.spec, seed=seed)
    plan = SyncBatches(actors=2, num_envs=4, num_steps=8, max_lag=max_lag)
    lags = []
    for report in plan.run(learner, env, place, env_steps=5 * 32 - 16):
        lags.append(report.lag.max)
        assert all(map(math.isfinite, report.metrics.values()))
    assert lags == [min(k, max_lag) for k in range(len(lags))]
    assert len(lags) >= 5
    return learner.digest()


@pytest.mark.parametrize("max_lag", [0, 1, 4])
@pytest.mark.parametrize("name", ["impala", "appo"])
def test_one_hash_within_a_process(name: str, max_lag: int) -> None:
    assert trained(name, max_lag, Inline()) == trained(name, max_lag, Threads())


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1, 4])
@pytest.mark.parametrize("name", TASKS)
def test_one_hash_on_all_placements(name: str, max_lag: int) -> None:
    found = {trained(name, max_lag, place) for place in (Inline(), Threads(), Processes())}
    assert len(found) == 1
    assert trained(name, max_lag, Inline(), seed=2) not in found
