"""Group: means summed in rank order, the same bits in every rank and on every placement; barriers."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace import Closed, ConfigError, RoleFailed, ShapeError, role

pytestmark = pytest.mark.timeout(60)

WEIGHTS = [1.0, 0.25, 3.0, 7.0, 0.1]


def vectors(size: int, length: int, dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * size + length + step)
    return [torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) * 10**rank for rank in range(size)]


def reference(parts: list[torch.Tensor], weights: list[float]) -> np.ndarray[Any, Any]:
    """The same sum by NumPy, one rank after the other."""
    total = sum(weights)
    mean = np.zeros_like(parts[0].numpy())
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            mean = mean + part.numpy() * mean.dtype.type(weight / total)
    return mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("size", "length"), [(1, 3), (2, 7), (3, 1001), (5, 2), (5, 64), (2, 0)])
def test_the_mean_is_summed_in_rank_order(
    everywhere: Any, ask: Any, size: int, length: int, dtype: torch.dtype
) -> None:
    weights = WEIGHTS[:size]

    def average(group: Any, parts: Any) -> bytes:
        digest = __import__("hashlib").sha256()
        assert (group.size, group.rank) == (role().of, role().rank)
        for step in range(3):
            mean = group.mean(parts[step][role().rank], weights[role().rank])
            digest.update(mean.numpy().tobytes())
            mean.fill_(-1.0)  # a copy of our own
        return digest.digest()

    parts = [vectors(size, length, dtype, step) for step in range(3)]

    def program(crew: Any) -> Any:
        return ask(crew, average, crew.group(size, like=torch.zeros(length, dtype=dtype)), parts, copies=size)

    digest = __import__("hashlib").sha256()
    for step in range(3):
        mean = reference(parts[step], weights)
        digest.update(mean.tobytes())
        true = sum(p.numpy().astype("float64") * w for p, w in zip(parts[step], weights, strict=True)) / sum(weights)
        scale = np.abs(true).max() if length else 1.0
        assert np.abs(mean - true).max(initial=0.0) <= 1e-6 * scale
    assert everywhere(program) == [digest.digest()] * size


def test_the_default_weight_is_one(place: Any, ask: Any) -> None:
    def average(group: Any) -> list[float]:
        return group.mean(torch.full((3,), float(role().rank))).tolist()

    with place.crew() as crew:
        assert ask(crew, average, crew.group(3, like=torch.zeros(3)), copies=3) == [[1.0] * 3] * 3


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_rank_of_weight_zero_adds_nothing(place: Any, ask: Any, poison: float) -> None:
    def average(group: Any) -> list[float]:
        rank = role().rank
        first = group.mean(torch.full((5,), poison if rank == 1 else rank + 1.0), 0.0 if rank == 1 else 1.0)
        second = group.mean(torch.full((5,), poison if rank != 1 else 8.0), 1.0 if rank == 1 else 0.0)
        return first.tolist() + second.tolist()

    with place.crew() as crew:
        assert ask(crew, average, crew.group(3, like=torch.zeros(5)), copies=3) == [[2.0] * 5 + [8.0] * 5] * 3


def test_all_weights_zero_is_an_error_in_every_rank_and_the_group_goes_on(place: Any, ask: Any) -> None:
    def average(group: Any) -> tuple[str, list[float]]:
        try:
            group.mean(torch.ones(2), 0.0)
        except ConfigError as error:
            return str(error), group.mean(torch.full((2,), 1.0 + role().rank)).tolist()
        return "no error", []

    with place.crew() as crew:
        for message, mean in ask(crew, average, crew.group(2, like=torch.zeros(2)), copies=2):
            assert "weight 0" in message
            assert mean == [1.5, 1.5]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_number_from_zero_on(place: Any, weight: float) -> None:
    with place.crew() as crew, pytest.raises(ConfigError, match="weight"):
        crew.group(1, like=torch.zeros(2)).mean(torch.zeros(2), weight)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.zeros(())], ids=repr
)
def test_a_wrong_vector_is_a_shape_error(place: Any, ask: Any, wrong: Any) -> None:
    def average(group: Any, wrong: Any) -> tuple[str, list[float]]:
        message = ""
        if role().rank == 0:
            try:
                group.mean(wrong)
            except ShapeError as error:
                message = str(error)
        return message, group.mean(torch.ones(2)).tolist()

    with place.crew() as crew:
        (message, mean), (_, other) = ask(crew, average, crew.group(2, like=torch.zeros(2)), wrong, copies=2)
    assert "float32 [2]" in message
    assert mean == other == [1.0, 1.0]


def test_a_strided_vector_with_a_gradient(place: Any, ask: Any) -> None:
    def average(group: Any) -> tuple[list[float], bool]:
        vector = (torch.arange(6.0).view(3, 2).requires_grad_() * 2)[:, 1]
        mean = group.mean(vector)
        return mean.tolist(), mean.requires_grad

    with place.crew() as crew:
        answers = ask(crew, average, crew.group(2, like=torch.zeros(3)), copies=2)
    assert answers == [([2.0, 6.0, 10.0], False)] * 2


def test_a_barrier_holds_until_all_have_come(place: Any, ask: Any) -> None:
    def meet(group: Any, arrivals: Any) -> tuple[float, float]:
        rank = role().rank
        role().sleep(0.1 * rank)
        arrivals[rank].put(role().clock())
        group.barrier()
        return role().clock(), role().rank

    with place.crew() as crew:
        group, arrivals = crew.group(3), crew.lanes(3)
        left = ask(crew, meet, group, arrivals, copies=3)
        came = arrivals.take_each(10.0)
    assert max(came) <= min(clock for clock, _ in left)


def test_barriers_count(place: Any) -> None:
    """No rank gets more than one barrier ahead."""

    def count(group: Any, lanes: Any) -> None:
        for k in range(30):
            lanes[role().rank].put(k)
            group.barrier()

    with place.crew() as crew:
        group, lanes = crew.group(2), crew.lanes(2, capacity=40)
        crew.start(count, group, lanes, copies=2)
        seen = [0, 0]
        with pytest.raises(Closed):
            while True:
                rank, k = lanes.take_any(10.0)
                assert k == seen[rank]
                seen[rank] += 1
        assert seen == [30, 30]


@pytest.mark.parametrize("when", ["at once", "after a mean"])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_has_returned_closes_the_others(place: Any, ask: Any, gone: int, when: str) -> None:
    def average(group: Any) -> str:
        if when == "after a mean":
            group.mean(torch.ones(2))
        if role().rank == gone:
            return ""
        try:
            group.mean(torch.ones(2))
        except Closed as error:
            return str(error)
        return "no error"

    with place.crew() as crew:
        answers = ask(crew, average, crew.group(3, like=torch.zeros(2)), copies=3, timeout=2.0)
    for rank, answer in enumerate(answers):
        if rank != gone:
            assert f"rank {gone}" in answer or f"average[{gone}]" in answer, answer


def test_a_rank_that_failed_is_the_failure(place: Any) -> None:
    def average(group: Any) -> None:
        group.mean(torch.ones(2))
        if role().rank == 1:
            raise ArithmeticError("rank 1")
        group.mean(torch.ones(2))

    with pytest.raises(RoleFailed, match="rank 1"), place.crew() as crew:
        crew.start(average, crew.group(3, like=torch.zeros(2)), copies=3)
        crew.join()


def test_ranks_get_closed_when_the_crew_stops(place: Any) -> None:
    def meet(group: Any, ready: Any) -> None:
        if role().rank == 0:
            ready.put(True)
            role().sleep(1000.0)
        group.barrier()

    with place.crew() as crew:
        ready = crew.channel()
        crew.start(meet, crew.group(2), ready, copies=2)
        ready.take(10.0)


def test_a_rank_belongs_to_one_role(place: Any) -> None:
    def meet(group: Any) -> None:
        group.barrier()

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        group = crew.group(2)
        crew.start(meet, group, name="first")
        crew.start(meet, group, name="second")
        crew.join(timeout=10.0)
    assert type(caught.value.__cause__) is ConfigError


def test_a_rank_beyond_the_size(place: Any) -> None:
    def meet(group: Any) -> None:
        group.barrier()

    with pytest.raises(RoleFailed) as caught, place.crew() as crew:
        crew.start(meet, crew.group(2), copies=3)
        crew.join(timeout=10.0)
    assert type(caught.value.__cause__) is ConfigError
    assert caught.value.rank == 2


def test_two_groups_at_once(everywhere: Any, ask: Any) -> None:
    def average(one: Any, two: Any) -> list[list[float]]:
        rank = role().rank
        return [
            (one if k % 2 else two).mean(torch.full((3 if k % 2 else 4,), float(rank * k))).tolist() for k in range(6)
        ]

    def program(crew: Any) -> Any:
        return ask(crew, average, crew.group(2, like=torch.zeros(3)), crew.group(2, like=torch.zeros(4)), copies=2)

    first, second = everywhere(program)
    assert first == second == [[k / 2] * (3 if k % 2 else 4) for k in range(6)]
