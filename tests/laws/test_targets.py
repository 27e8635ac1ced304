"""Laws of the targets: what must hold whatever the numbers are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.targets import VTrace, gae, next_value, standardized, vtrace


@dataclasses.dataclass(frozen=True)
class Stream:
    """Random steps, as next-step auto-reset gives them: the row after an end is a reset row."""

    reward: Tensor
    value: Tensor  # [T+1, B]
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    log_ratio: Tensor

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated

    @property
    def after(self) -> Tensor:
        return next_value(self.value, self.terminated)

    @property
    def goes_on(self) -> Tensor:
        return self.valid & ~self.ended

    def map(self, function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The arguments that `gae` and `vtrace` share, each changed by a function."""
        shared = {"reward": self.reward, "value": self.value[:-1], "next_value": self.after}
        shared |= {"ended": self.ended, "valid": self.valid}
        return {name: function(tensor) for name, tensor in shared.items()}

    @property
    def shared(self) -> dict[str, Tensor]:
        return self.map(lambda tensor: tensor)


@st.composite
def streams(draw: st.DrawFn, columns: int = 4, rows: int = 40) -> Stream:
    shape = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    terminated, truncated = rng.random((2, *shape)) < draw(st.sampled_from([0, 0.05, 0.2, 0.5]))
    valid = np.ones(shape, bool)
    valid[0] = rng.random(shape[1]) < 0.5
    for t in range(shape[0]):
        terminated[t] &= valid[t]
        truncated[t] &= valid[t]
        if t + 1 < shape[0]:
            valid[t + 1] = ~(terminated[t] | truncated[t])
    reward, log_ratio = rng.normal(size=(2, *shape))
    value = rng.normal(size=(shape[0] + 1, shape[1]))
    return Stream(*map(torch.tensor, (reward, value, terminated, truncated, valid, log_ratio)))


discounts = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
bars = st.sampled_from([0.5, 1.0, 1.2])


def close(given: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-10)


def all_close(given: VTrace, expected: VTrace) -> None:
    close(given.target, expected.target)
    close(given.advantage, expected.advantage)


# The recurrence -------------------------------------------------------------------------------------------------------


@given(streams(), discounts)
def test_gae_with_lambda_0_is_the_temporal_difference(s: Stream, gamma: float) -> None:
    close(gae(**s.shared, gamma=gamma, gae_lambda=0.0), (s.reward + gamma * s.after - s.value[:-1]) * s.valid)


@given(streams(), discounts)
def test_gae_with_lambda_1_is_monte_carlo_minus_the_value(s: Stream, gamma: float) -> None:
    monte_carlo = torch.zeros_like(s.reward)
    following = s.value[-1]
    for t in reversed(range(len(s.reward))):
        following = torch.where(s.ended[t], s.after[t], following)
        following = torch.where(s.valid[t], s.reward[t] + gamma * following, s.value[t])
        monte_carlo[t] = following
    close(gae(**s.shared, gamma=gamma, gae_lambda=1.0) + s.value[:-1], monte_carlo)


@given(streams(), discounts, discounts)
def test_vtrace_on_policy_is_gae_plus_the_value(s: Stream, gamma: float, lam: float) -> None:
    given = vtrace(torch.zeros_like(s.reward), **s.shared, gamma=gamma, lambda_=lam)
    close(given.target, gae(**s.shared, gamma=gamma, gae_lambda=lam) + s.value[:-1])
    if lam == 1.0:
        close(given.advantage, gae(**s.shared, gamma=gamma, gae_lambda=1.0))


@given(streams(), discounts)
def test_ratios_above_the_bars_count_as_the_bars(s: Stream, gamma: float) -> None:
    given = vtrace(s.log_ratio.abs() * 30, **s.shared, gamma=gamma)
    all_close(given, vtrace(torch.zeros_like(s.reward), **s.shared, gamma=gamma))


@given(streams(), discounts)
def test_vtrace_of_actions_that_the_target_policy_never_takes_is_the_value(s: Stream, gamma: float) -> None:
    given = vtrace(torch.full_like(s.reward, -torch.inf), **s.shared, gamma=gamma)
    all_close(given, VTrace(s.value[:-1], torch.zeros_like(s.reward)))


# Cutting and joining --------------------------------------------------------------------------------------------------


@given(streams(columns=1), discounts, st.integers(0, 40))
def test_environments_side_by_side_equal_each_one_alone(s: Stream, gamma: float, shift: int) -> None:
    """To the bit: what shares a batch never changes a target."""
    wide = s.map(lambda tensor: torch.cat([tensor, tensor.roll(shift, 0), tensor], 1))
    wide["valid"][:, 1] = True
    log_ratio = torch.cat([s.log_ratio] * 3, 1)
    assert torch.equal(
        gae(**wide, gamma=gamma, gae_lambda=0.9)[:, ::2], gae(**s.shared, gamma=gamma, gae_lambda=0.9).expand(-1, 2)
    )
    for many, one in zip(
        vtrace(log_ratio, **wide, gamma=gamma), vtrace(s.log_ratio, **s.shared, gamma=gamma), strict=True
    ):
        assert torch.equal(many[:, ::2], one.expand(-1, 2))


@given(streams(), discounts, discounts, st.data())
def test_a_cut_changes_nothing_when_it_bootstraps_from_what_follows(
    s: Stream, gamma: float, lam: float, data: st.DataObject
) -> None:
    """Anywhere: the later part is that of the whole, and so is the earlier one, given V + λ·A of the row after it."""
    cut = data.draw(st.integers(0, len(s.reward)))
    whole = gae(**s.shared, gamma=gamma, gae_lambda=lam)
    later = gae(**s.map(lambda tensor: tensor[cut:]), gamma=gamma, gae_lambda=lam)
    close(later, whole[cut:])
    earlier = s.map(lambda tensor: tensor[:cut].clone())
    if 0 < cut < len(s.reward):
        earlier["next_value"][-1] += lam * later[0] * s.goes_on[cut - 1]
    close(gae(**earlier, gamma=gamma, gae_lambda=lam), whole[:cut])


@given(streams(), discounts, bars, st.data())
def test_a_cut_changes_nothing_in_vtrace_when_it_bootstraps_from_what_follows(
    s: Stream, gamma: float, bar: float, data: st.DataObject
) -> None:
    """With ρ̄ = c̄ and λ = 1, where v of the row after the cut is all that the row before it needs."""
    cut = data.draw(st.integers(0, len(s.reward)))
    bounds = {"gamma": gamma, "rho_bar": bar, "c_bar": bar}
    whole = vtrace(s.log_ratio, **s.shared, **bounds)
    later = vtrace(s.log_ratio[cut:], **s.map(lambda tensor: tensor[cut:]), **bounds)
    all_close(later, VTrace(whole.target[cut:], whole.advantage[cut:]))
    earlier = s.map(lambda tensor: tensor[:cut].clone())
    if 0 < cut < len(s.reward):
        earlier["next_value"][-1] = torch.where(s.goes_on[cut - 1], later.target[0], s.after[cut - 1])
    all_close(vtrace(s.log_ratio[:cut], **earlier, **bounds), VTrace(whole.target[:cut], whole.advantage[:cut]))


@given(streams(columns=1), discounts, discounts)
def test_a_cut_where_an_episode_ends_changes_no_bit(s: Stream, gamma: float, lam: float) -> None:
    lengths = torch.cat([s.ended[:, 0].nonzero().squeeze(1) + 1, torch.tensor([0, len(s.reward)])]).sort().values.diff()
    parts = [{} for _ in lengths]
    for name, tensor in (s.shared | {"log_ratio": s.log_ratio}).items():
        for part, piece in zip(parts, tensor.split(lengths.tolist()), strict=True):
            part[name] = piece
    both = vtrace(s.log_ratio, **s.shared, gamma=gamma, lambda_=lam)
    apart = [vtrace(**part, gamma=gamma, lambda_=lam) for part in parts]
    for whole, pieces in zip(both, zip(*apart, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces))
    for part in parts:
        del part["log_ratio"]
    pieces = [gae(**part, gamma=gamma, gae_lambda=lam) for part in parts]
    assert torch.equal(gae(**s.shared, gamma=gamma, gae_lambda=lam), torch.cat(pieces))


@given(streams(columns=1), discounts, discounts)
def test_reset_rows_can_be_left_out(s: Stream, gamma: float, lam: float) -> None:
    keep = s.valid[:, 0]
    kept = s.map(lambda tensor: tensor[keep])
    close(gae(**s.shared, gamma=gamma, gae_lambda=lam)[keep], gae(**kept, gamma=gamma, gae_lambda=lam))
    whole = vtrace(s.log_ratio, **s.shared, gamma=gamma, lambda_=lam)
    part = vtrace(s.log_ratio[keep], **kept, gamma=gamma, lambda_=lam)
    all_close(VTrace(whole.target[keep], whole.advantage[keep]), part)


@given(streams(), discounts, discounts)
def test_what_a_reset_row_holds_reaches_no_other_row(s: Stream, gamma: float, lam: float) -> None:
    """Its value alone is kept, since the row before a reset row may bootstrap from it."""
    skipped = ~s.valid
    spoilt = s.shared
    for name in ("reward", "next_value"):
        spoilt[name] = spoilt[name].masked_fill(skipped, torch.nan)
    given = gae(**spoilt, gamma=gamma, gae_lambda=lam)
    assert torch.equal(given, gae(**s.shared, gamma=gamma, gae_lambda=lam))
    assert (given[skipped] == 0).all()
    both = vtrace(s.log_ratio.masked_fill(skipped, torch.nan), **spoilt, gamma=gamma, lambda_=lam)
    for one, other in zip(both, vtrace(s.log_ratio, **s.shared, gamma=gamma, lambda_=lam), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(both.target[skipped], s.value[:-1][skipped])
    assert (both.advantage[skipped] == 0).all()


@given(streams(columns=1))
def test_a_table_of_final_values_equals_the_same_episodes_with_reset_rows(s: Stream) -> None:
    keep = s.valid[:, 0]
    rows, final = keep.nonzero().squeeze(1), s.ended[:, 0][keep].nonzero().squeeze(1)
    # Without reset rows an ended step is followed by the first observation of the next episode.
    after_cut = (
        torch.full((1, 1), 9.0, dtype=torch.float64) if len(final) and final[-1] == len(rows) - 1 else s.value[-1:]
    )
    value = torch.cat([s.value[:-1][keep], after_cut])
    index = torch.stack([final, torch.zeros_like(final)], 1)
    given = next_value(value, s.terminated[keep], s.value[1:, 0][rows[final]], index)
    assert torch.equal(given, s.after[keep])


# Standardized ---------------------------------------------------------------------------------------------------------


def alone(vector: Tensor, weight: float) -> Tensor:
    return vector


@st.composite
def weighted(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    count = draw(st.integers(2, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Well apart, so that no pair of them is equal but for rounding.
    values = rng.permutation(count) + rng.uniform(-0.3, 0.3, count)
    values = values * draw(st.sampled_from([0.1, 1.0, 1e3])) + draw(st.sampled_from([0.0, 3.0, -100.0]))
    some = rng.random(count) < 0.7
    weight = draw(st.sampled_from([np.ones(count), some * 1.0, some * rng.uniform(0.01, 1, count)]))
    return torch.tensor(values), torch.tensor(weight)


@given(weighted())
def test_the_weighted_moments_are_0_and_1(pair: tuple[Tensor, Tensor]) -> None:
    values, weight = pair
    x, total = standardized(values, weight, alone), weight.sum()
    torch.testing.assert_close((weight * x).sum(), torch.zeros_like(total), atol=1e-6, rtol=0)
    if (weight > 0).sum() > 1:
        torch.testing.assert_close((weight * x * x).sum() / total, torch.ones_like(total), atol=1e-6, rtol=0)
    assert (x[weight == 0] == 0).all()


@given(weighted(), st.floats(0.01, 100), st.floats(-10, 10))
def test_scale_and_offset_are_forgotten(pair: tuple[Tensor, Tensor], scale: float, offset: float) -> None:
    values, weight = pair
    x = standardized(values, weight, alone)
    torch.testing.assert_close(standardized(values * scale + offset, weight, alone), x, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(standardized(values * 1e-30, weight, alone), x, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(standardized(values, weight * scale, alone), x, atol=1e-6, rtol=1e-6)


@given(weighted())
def test_elements_of_weight_0_may_hold_anything(pair: tuple[Tensor, Tensor]) -> None:
    values, weight = pair
    spoilt = values.masked_fill(weight == 0, torch.nan)
    assert torch.equal(standardized(spoilt, weight, alone), standardized(values, weight, alone))


@given(weighted(), st.integers(1, 4))
def test_a_whole_weight_is_that_many_elements(pair: tuple[Tensor, Tensor], times: int) -> None:
    values, weight = pair[0], (pair[1] > 0.3) * times
    index = torch.tensor(np.repeat(np.arange(len(values)), weight.numpy()))
    once = standardized(values[index], torch.ones_like(index), alone)
    torch.testing.assert_close(standardized(values, weight, alone)[index], once, atol=1e-6, rtol=1e-6)


@given(weighted(), st.data(), st.sampled_from([1.0, 0.5]))
def test_workers_together_equal_one_that_holds_all(
    pair: tuple[Tensor, Tensor], data: st.DataObject, share: float
) -> None:
    """share: what `mean` makes of the sum over the workers; the parts may be of any sizes, and of any weights."""
    values, weight = pair
    cut = data.draw(st.integers(0, len(values)))
    parts = [(values[:cut], weight[:cut]), (values[cut:], weight[cut:])]
    sent: list[Tensor] = []

    def send(vector: Tensor, weight: float) -> Tensor:
        assert weight == 1.0
        assert vector.shape == (3,)
        assert vector.dtype is torch.float64
        sent.append(vector)
        return vector

    for part in parts:
        standardized(*part, send)
    assert len(sent) == len(parts)
    together = [standardized(*part, lambda vector, weight: (sent[0] + sent[1]) * share) for part in parts]
    torch.testing.assert_close(torch.cat(together), standardized(*pair, alone), atol=1e-6, rtol=1e-6)


@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False), max_size=6),
    st.lists(st.sampled_from([0.0, 1.0, 0.25, 1e-6]), min_size=6, max_size=6),
)
def test_standardized_is_always_finite(numbers: list[float], weights: list[float]) -> None:
    values, weight = torch.tensor(numbers), torch.tensor(weights[: len(numbers)])
    assert standardized(values, weight, alone).isfinite().all()
