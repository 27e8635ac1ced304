"""Group: means summed in rank order, the same bits in every rank and on every placement; barriers."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

from headrace import Closed, ConfigError, Processes, RoleFailed, ShapeError, role

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
@pytest.mark.parametrize(
    ("size", "length"),
    [(1, 3), (2, 7), (2, 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 1001), (5, 2), (5, 64)))],
)
def test_the_mean_is_summed_in_rank_order(
    everywhere: Any, ask: Any, size: int, length: int, dtype: torch.dtype
) -> None:
    weights = WEIGHTS[:size]

    def average(group: Any, parts: Any) -> bytes:
        digest = __import__("hashlib").sha256()
        assert (group.size, group.rank) == (role().of, role().rank)
        for step in range(3):
            vector = parts[step][role().rank].clone()
            mean = group.mean(vector, weights[role().rank], vector if step == 1 else None)
            assert (mean is vector) is (step == 1)
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_long_vector_is_summed_in_parts_with_the_same_bits(everywhere: Any, ask: Any, size: int) -> None:
    """Longer than what each rank sums by itself, and no multiple of anything."""
    length, weights = 200_003, WEIGHTS[:size]
    parts = vectors(size, length, torch.float32, 0)

    def average(group: Any, parts: Any) -> str:
        digest, rank = __import__("hashlib").sha256(), role().rank
        for k in (1, 2, 3):
            vector = parts[rank] * k
            out = (None, vector, torch.empty_like(vector))[k - 1]
            mean = group.mean(vector, weights[rank], out)
            assert out is None or mean is out
            digest.update(mean.numpy().tobytes())
        return digest.hexdigest()

    def program(crew: Any) -> Any:
        return ask(crew, average, crew.group(size, like=torch.zeros(length)), parts, copies=size)

    digest = __import__("hashlib").sha256()
    for k in (1, 2, 3):
        digest.update(reference([part * k for part in parts], weights).tobytes())
    assert everywhere(program) == [digest.hexdigest()] * size


def test_vectors_of_several_lengths_and_dtypes(everywhere: Any, ask: Any) -> None:
    """One after the other in one group, as long as none has more bytes than `like`."""

    def average(group: Any) -> list[Any]:
        rank, told = role().rank, []
        for length, dtype in ((3, torch.float32), (1, torch.float64), (0, torch.float32), (4, torch.float32)) * 3:
            told.append(group.mean(torch.full((length,), float(rank), dtype=dtype), 1.0 + rank).tolist())
            told.append(group.gather(torch.tensor([rank, 2**62 + rank])).tolist())
        return told

    third = [2 / 3] * 4
    given = everywhere(lambda crew: ask(crew, average, crew.group(2, like=torch.zeros(4)), copies=2))
    assert given[0] == given[1]
    assert given[0][1::2] == [[[0, 2**62], [1, 2**62 + 1]]] * 12
    for mean, length in zip(given[0][::2], (3, 1, 0, 4) * 3, strict=True):
        assert mean == pytest.approx(third[:length])


def test_gathered_vectors_stay_as_they_are(place: Any, ask: Any) -> None:
    def gather(group: Any) -> list[Any]:
        first = group.gather(torch.tensor([role().rank]))
        group.gather(torch.tensor([7]))
        group.gather(torch.tensor([8]))
        return first.tolist()

    with place.crew() as crew:
        assert ask(crew, gather, crew.group(3, like=torch.zeros(2)), copies=3) == [[[0], [1], [2]]] * 3


WRONG = {
    "length": lambda group, rank: group.mean(torch.zeros(2 + rank % 2)),
    "dtype": lambda group, rank: group.mean(torch.zeros(1, dtype=(torch.float32, torch.float64)[rank % 2])),
    "call": lambda group, rank: group.barrier() if rank % 2 else group.mean(torch.zeros(3)),
    "kind": lambda group, rank: group.gather(torch.zeros(3)) if rank % 2 else group.mean(torch.zeros(3)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_ranks_that_come_with_different_things_are_all_told(place: Any, ask: Any, wrong: str) -> None:
    def meet(group: Any, call: Any) -> str:
        try:
            call(group, role().rank)
        except ShapeError as error:
            return str(error)
        return "no error"

    with place.crew() as crew:
        first, *others = ask(crew, meet, crew.group(3, like=torch.zeros(4)), WRONG[wrong], copies=3)
    assert others == [first] * 2
    assert "the ranks came with different things: rank 0 with mean of torch.float32 " in first
    assert "rank 1 with" in first


def test_the_driver_is_the_last_rank(place: Any) -> None:
    def average(group: Any) -> None:
        group.mean(torch.full((2,), float(group.rank)))
        assert group.gather(torch.tensor([group.rank])).tolist() == [[0], [1], [2]]

    with place.crew() as crew:
        group = crew.group(3, like=torch.zeros(2))
        crew.start(average, group, copies=2)
        assert group.rank == 2
        assert group.mean(torch.full((2,), 2.0)).tolist() == [1.0, 1.0]
        assert group.gather(torch.tensor([2])).tolist() == [[0], [1], [2]]
        crew.join()


def test_how_many_have_arrived_is_seen_without_waiting(place: Any) -> None:
    def meet(group: Any, told: Any) -> None:
        if group.rank == 0:
            told.put(group.arrived)
        group.barrier()
        group.barrier()

    with place.crew() as crew:
        group, told = crew.group(3), crew.channel()
        crew.start(meet, group, told, copies=2)
        assert told.take(10.0) in (0, 1)
        deadline = time.monotonic() + 10.0
        while group.arrived < 2:
            assert time.monotonic() < deadline
            role().sleep(0.01)
        group.barrier()
        group.barrier()
        crew.join()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("driver", [True, False], ids=["driver", "roles"])
def test_a_rank_that_dies_or_stops_ends_the_wait_of_all_others(how: int, driver: bool) -> None:
    """Within 2 s of its death, or of `stall_after`; tripled for a busy machine. What is left is looked for after it."""

    def meet(group: Any, ready: Any) -> None:
        group.mean(torch.ones(3))
        if group.rank == 1:
            ready.put(True)
            role().sleep(60.0)
        group.mean(torch.ones(3))

    with pytest.raises(RoleFailed) as caught, Processes(stall_after=1.0).crew() as crew:
        group, ready = crew.group(3, like=torch.zeros(3), name="learners"), crew.channel()
        members = crew.start(meet, group, ready, copies=2 if driver else 3)
        if driver:
            group.mean(torch.ones(3))
        ready.take(10.0)
        os.kill(members[1].pid, how)
        began = time.monotonic()
        try:
            group.mean(torch.ones(3)) if driver else crew.join()
        finally:
            seconds = time.monotonic() - began
    assert (caught.value.role, caught.value.rank, caught.value.signal) == ("meet", 1, how)
    assert seconds <= 6.0 + (1.0 if how == signal.SIGSTOP else 0.0)
    if driver:
        (note,) = caught.value.__notes__
        assert note.startswith("driver[0] waited to meet rank")
        assert "rank 1 (" in note
        assert "in group 'learners' for mean of torch.float32 [3]" in note
    assert all(not _lives(member.pid) for member in members)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
