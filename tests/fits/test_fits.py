"""Seven known methods, each written against `Method` in a file of at most 60 lines, make one update.

What these tests prove is the abstraction: that each method says what it needs with what `Method`, `Rollout`, `Loss`,
`Learner` and `Decision` offer, and that the learner does with it what the paper means. They do not prove that the
methods learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace import Actor, Learner
from headrace.envs.toy import Recall, Target

FITS = ["a2c", "dqn", "ppo", "r2d2", "sac", "td3", "vtrace"]

Fits = Callable[[str], Any]


def copied(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def moved(net: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}


def steps_of(learner: Learner, group: str) -> int:
    """How many steps an optimizer has taken, by its own count."""
    return max((int(held["step"]) for held in learner.state()["optimizers"][group].values()), default=0)


@pytest.mark.parametrize("name", FITS)
def test_a_method_has_at_most_60_lines(fits: Fits, name: str) -> None:
    assert len(fits(name).path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", FITS)
def test_one_update_on_random_data(fits: Fits, name: str) -> None:
    fit = fits(name)
    learner = fit.learner()
    before = copied(learner.net)
    batch = fit.batch(learner, rows=64)
    held = batch.clone()
    report = learner.update(batch)
    assert batch.equal(held)  # what is replayed must be as it was
    assert all(map(math.isfinite, report.metrics.values()))
    assert all(torch.isfinite(tensor).all() for tensor in learner.net.state_dict().values())
    # All but targets, which have tests of their own, and the policy that TD3 does not step yet.
    later = {key for key in before if "target" in key or (name == "td3" and "policy" in key)}
    assert moved(learner.net, before) >= before.keys() - later
    assert report.version == learner.version == 1
    assert report.gradient_steps == (4 if name == "ppo" else 1)  # 4 epochs of one minibatch


@pytest.mark.parametrize("name", FITS)
def test_without_noise_acting_is_a_function(fits: Fits, name: str) -> None:
    fit = fits(name)
    learner = fit.learner()
    net, size = learner.acting, 5
    observation = torch.randn(size, *fit.spec.observation.shape, generator=torch.Generator().manual_seed(3))
    memory = fit.method.initial_memory(net, size)
    with torch.no_grad():
        global_state = torch.get_rng_state()
        first, again = (fit.method.act(net, observation, memory, None) for _ in range(2))
        assert torch.equal(global_state, torch.get_rng_state())
    assert first.check().equal(again)
    assert first.size("B") == size
    assert first.action.shape == (size, *fit.spec.action.shape)
    assert first.action.dtype == fit.spec.action.dtype
    assert (first.memory is None) == (memory is None)
    if memory is not None:
        assert first.memory.shape == memory.shape


@pytest.mark.parametrize("name", FITS)
def test_an_actor_makes_rollouts_with_it(fits: Fits, name: str) -> None:
    """The lane's slots are shaped like `example`, so a rollout must have its shapes and dtypes."""
    env = Target(dimensions=6, length=4) if name in ("ppo", "sac", "td3") else Recall(length=4, cues=3)
    method = fits(name).method
    learner = Learner(method, env.spec, seed=1)
    behaving = method.behaviour(range(2, 5), 8)
    with Actor(behaving, learner.acting, env, range(2, 5), num_steps=9) as actor:
        rollout = actor.rollout().check()
    slot = learner.example(9, 3)
    assert slot.copy_(rollout).equal(rollout)
    assert rollout.env_steps.tolist() == [8, 8, 8]  # 9 rows, of which row 4 resets
    learner.prepare(rollout)
    assert learner.env_steps == 24


# On-policy


def test_ppo_learns_every_row_in_every_epoch(fits: Fits, random_rollout: Any) -> None:
    fit = fits("ppo")
    learner = fit.learner()
    rollout = random_rollout(learner, 32, 5)  # 160 rows: minibatches of 64, 64 and 32
    report = learner.update(learner.prepare(rollout))
    assert report.gradient_steps == 4 * 3
    assert report.samples_learned == 4 * int(rollout.valid.sum()) < 4 * 160
    assert report.env_steps == int(rollout.valid.sum())


@pytest.mark.parametrize("name", ["a2c", "ppo", "vtrace"])
def test_a_reset_row_teaches_nothing(fits: Fits, name: str, random_rollout: Any) -> None:
    """What a reset row holds (its action, its reward) changes no bit of what is learned."""
    fit = fits(name)
    one, other = fit.learner(), fit.learner()
    rollout = random_rollout(one, 16, 4)
    resets = ~rollout.valid
    assert resets.any()
    altered = rollout.clone()
    altered.reward[resets] = 7.0
    altered.log_prob[resets] = -3.0
    altered.action[resets] = 0
    one.update(one.prepare(rollout))
    other.update(other.prepare(altered))
    assert not moved(other.net, copied(one.net))


def test_vtrace_weighs_by_the_policy_as_it_is(fits: Fits, random_rollout: Any) -> None:
    """The target policy's probabilities come from the network that learns, the behaviour's from the rollout."""
    fit = fits("vtrace")
    learner = fit.learner()
    rollout = random_rollout(learner, 16, 4)
    learner.update(learner.prepare(rollout))
    other = fit.learner()
    other.update(other.prepare(rollout.replace(log_prob=rollout.log_prob + 1.0)))  # ratios of 1/e
    assert moved(other.net, copied(learner.net))


# Replayed


def test_dqn_says_how_much_to_replay_each_row(fits: Fits) -> None:
    fit = fits("dqn")
    learner = fit.learner()
    batch = fit.batch(learner, rows=64)
    net, rows = copied(learner.net), batch.size("B")
    report = learner.update(batch)
    assert report.samples_learned == rows  # rows, not the sum of their importance weights
    assert report.priorities is not None
    assert report.priorities.shape == (rows,)
    assert not report.priorities.requires_grad
    # In the order of the batch, against the formula, under the weights that the update began with.
    learner.net.load_state_dict(net)
    q, target = learner.net["q"], learner.net["target"]
    with torch.no_grad():
        for row, priority in zip(batch, report.priorities.tolist(), strict=True):
            best = int(q(row.next_observation).argmax())
            after = 0.0 if row.terminated else 0.99 * float(target(row.next_observation)[best])
            error = float(q(row.observation)[row.action]) - (float(row.reward) + after)
            assert priority == pytest.approx(abs(error), abs=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [{"microbatch_size": 7}, {"devices": ("cpu", "cpu")}, {"devices": ("cpu", "cpu"), "microbatch_size": 7}],
)
@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_priorities_keep_the_order_of_rows_when_a_batch_is_split(fits: Fits, name: str, arguments: Any) -> None:
    fit = fits(name)
    whole, split = fit.learner(), fit.learner(**arguments)
    batch = fit.batch(whole, rows=48 if name == "dqn" else 6)
    one, other = whole.update(batch).priorities, split.update(batch).priorities
    assert one is not None
    assert other is not None
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


def test_dqn_ignores_rows_of_importance_0(fits: Fits) -> None:
    fit = fits("dqn")
    one, other = fit.learner(), fit.learner()
    batch = fit.batch(one, rows=64)
    batch.weight[:10] = 0
    altered = batch.clone()
    altered.reward[:10] = 100.0
    one.update(batch)
    other.update(altered)
    assert not moved(other.net, copied(one.net))


def test_dqn_prepares_transitions_of_valid_rows(fits: Fits, random_rollout: Any) -> None:
    learner = fits("dqn").learner()
    rollout = random_rollout(learner, 16, 4)
    kept = learner.prepare(rollout).check()
    at = [(t, b) for t in range(16) for b in range(4) if rollout.valid[t, b]]
    assert kept.size("B") == len(at) == learner.env_steps < 64
    for row, (t, b) in zip(kept, at, strict=True):
        assert torch.equal(row.observation, rollout.observation[t, b])
        assert torch.equal(row.next_observation, rollout.observation[t + 1, b])
        assert row.reward == rollout.reward[t, b]


def test_dqn_explores_by_environment(fits: Fits) -> None:
    """An environment explores alike whichever actor has it."""
    method = fits("dqn").method
    all_of_them = method.behaviour(range(8), 8).epsilon
    assert method.behaviour(range(0, 4), 8).epsilon + method.behaviour(range(4, 8), 8).epsilon == all_of_them
    assert all_of_them[0] == pytest.approx(0.4)
    assert all_of_them[-1] == pytest.approx(0.4**8)


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_a_target_network_is_copied_every_second_update(fits: Fits, name: str) -> None:
    fit = fits(name)
    learner = fit.learner()
    batch = fit.batch(learner, rows=16)
    before = copied(learner.net["target"])
    learner.update(batch)
    assert not moved(learner.net["target"], before)
    learner.update(batch)
    assert moved(learner.net["target"], before)
    assert not moved(learner.net["target"], copied(learner.net["q"]))


def test_sac_moves_its_targets_a_little_towards_its_critics(fits: Fits) -> None:
    fit = fits("sac")
    learner = fit.learner()
    before = copied(learner.net["targets"])
    learner.update(fit.batch(learner))
    for name, critic in learner.net["critics"].state_dict().items():
        expected = before[name] + 0.005 * (critic - before[name])
        torch.testing.assert_close(learner.net["targets"].state_dict()[name], expected)
    assert moved(learner.net["targets"], before)


def test_sac_has_a_temperature_with_an_optimizer_of_its_own(fits: Fits) -> None:
    fit = fits("sac")
    learner = fit.learner()
    assert set(learner.state()["optimizers"]) == {"critics", "policy", "temperature"}
    (before,) = copied(learner.net["temperature"]).values()
    learner.update(fit.batch(learner))
    assert [steps_of(learner, group) for group in ("critics", "policy", "temperature")] == [1, 1, 1]
    (after,) = copied(learner.net["temperature"]).values()
    # The policy begins with more entropy than −dim(action): the temperature falls, by Adam's first step.
    assert float(after - before) == pytest.approx(-3e-4, rel=1e-3)


def test_the_losses_of_sac_move_only_their_own_group(fits: Fits) -> None:
    """The policy's loss is differentiated through the critics, and the temperature's through the policy's entropy."""
    fit = fits("sac")
    learner = fit.learner()
    (batch,) = fit.method.minibatches(
        fit.batch(learner), torch.Generator().manual_seed(0), lambda vector, weight: vector
    )
    losses = fit.method.losses(learner.net, batch, 0)
    before = copied(learner.net)
    for group in ("critics", "policy", "temperature"):
        assert next(losses).group == group
        assert not moved(learner.net, before)  # a loss itself steps nothing
    assert next(losses, None) is None
    # The learner steps a group before it asks for the next loss: the policy's loss sees critics that have learned.
    learner.update(fit.batch(learner))
    seen = []

    class Watching(type(fit.method)):  # type: ignore[misc]
        def losses(self, net: nn.Module, batch: Any, step: int) -> Any:
            for loss in super().losses(net, batch, step):
                yield loss
                seen.append((loss.group, {key.partition(".")[0] for key in moved(net, before)}))

    before = copied(learner.net)
    watched = fit.learner(method=Watching())
    watched.net.load_state_dict(before)
    watched.update(fit.batch(learner))
    assert seen == [
        ("critics", {"critics"}),
        ("policy", {"critics", "policy"}),
        ("temperature", {"critics", "policy", "temperature"}),
    ]


def test_td3_updates_its_policy_every_second_step_only(fits: Fits) -> None:
    fit = fits("td3")
    learner = fit.learner()
    batch = fit.batch(learner)
    for update in range(1, 5):
        policy, critics = (copied(learner.net["online"][name]) for name in ("policy", "critics"))
        target = copied(learner.net["target"])
        learner.update(batch)
        delayed = update % 2 == 0
        assert moved(learner.net["online"]["critics"], critics) == set(critics)
        assert moved(learner.net["online"]["policy"], policy) == (set(policy) if delayed else set())
        assert bool(moved(learner.net["target"], target)) == delayed
        assert steps_of(learner, "critics") == update
        assert steps_of(learner, "policy") == update // 2  # skipped, not stepped with a gradient of 0
        assert learner.samples_learned == update * batch.size("B")  # the policy's rows count no second time


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_noise_in_a_loss_is_the_learners_own(fits: Fits, name: str) -> None:
    """Equal seeds learn equally, other seeds do not, and the global generator is left alone."""
    fit = fits(name)
    learners = [fit.learner() for _ in range(3)]
    learners[2].load_state(learners[2].state() | {"rng": torch.Generator().manual_seed(99).get_state()})
    state = torch.get_rng_state()
    for learner in learners:
        learner.update(fit.batch(learner))
    assert torch.equal(state, torch.get_rng_state())
    assert not moved(learners[1].net, copied(learners[0].net))
    assert moved(learners[2].net, copied(learners[0].net))


def test_r2d2_takes_no_gradient_from_burning_in(fits: Fits) -> None:
    fit = fits("r2d2")
    learner = fit.learner()
    batch = fit.batch(learner, rows=4)
    observation, memory = batch.observation.requires_grad_(), batch.memory.requires_grad_()
    (loss,) = fit.method.losses(learner.net, batch, 0)
    loss.total.backward()
    rows = observation.grad.abs().sum((1, 2))
    assert rows[:10].eq(0).all()
    assert rows[10:].gt(0).all()
    assert memory.grad is None
    assert loss.priority.shape == (4,)
    assert float(loss.weight) == float(batch.valid[10:].sum())


def test_r2d2_burns_in_what_it_remembers(fits: Fits) -> None:
    """The stored memory and the burnt-in observations reach the loss; the burnt-in rewards do not."""
    fit = fits("r2d2")

    def learned(**fields: Any) -> dict[str, Tensor]:
        learner = fit.learner()
        batch = fit.batch(learner, rows=4)
        batch.valid[:], batch.terminated[:] = True, False  # no episode ends: nothing is forgotten on the way
        learner.update(batch.replace(**{name: change(getattr(batch, name)) for name, change in fields.items()}))
        return copied(learner.net)

    plain = learned()

    def differs(other: dict[str, Tensor]) -> bool:
        return any(not torch.equal(tensor, plain[name]) for name, tensor in other.items())

    def early(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:10] + 1, tensor[10:]])

    assert differs(learned(memory=lambda memory: memory + 1))
    assert differs(learned(observation=early))
    assert not differs(learned(reward=early))


def test_r2d2_forgets_between_episodes(fits: Fits) -> None:
    fit = fits("r2d2")
    learner = fit.learner()
    batch = fit.batch(learner, rows=4)
    batch.valid[:], batch.terminated[:] = True, False
    batch.terminated[4], batch.valid[5] = True, False  # row 5 resets, row 6 begins an episode
    (first,) = fit.method.losses(learner.net, batch, 0)
    (other,) = fit.method.losses(learner.net, batch.replace(memory=batch.memory + 1), 0)
    assert torch.equal(first.total, other.total)
