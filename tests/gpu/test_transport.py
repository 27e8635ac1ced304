"""The ends of channels and weights on a device. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headrace import Inline, Processes, Struct, Threads, axes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Pair(Struct):
    left: Tensor = axes("T B")
    right: Tensor = axes("B")


def pair(device: str) -> Pair:
    left = torch.arange(12, dtype=torch.float32, device=device).reshape(3, 4)
    return Pair(left=left, right=torch.arange(4, device=device))


@pytest.fixture(params=[Inline, Threads, Processes])
def place(request: pytest.FixtureRequest):
    return request.param()


def test_put_copies_from_a_device_and_take_copies_to_one(place) -> None:
    with place.crew() as crew:
        channel = crew.channel(like=pair("cpu"), capacity=2)
        channel.put(pair("cuda"))
        channel.put(pair("cuda"))
        assert channel.take().equal(pair("cpu"))
        taken = channel.take(device="cuda")
    assert taken.left.is_cuda
    assert taken.right.is_cuda
    assert taken.to("cpu").equal(pair("cpu"))


def test_weights_go_from_a_device_to_a_device(place) -> None:
    source, target = nn.Linear(3, 2).cuda(), nn.Linear(3, 2).cuda()
    with place.crew() as crew:
        weights = crew.weights(source, banks=2)
        weights.publish(source, version=1)
        weights.pull(target, version=1)
    assert torch.equal(source.weight, target.weight)


def test_a_role_in_a_process_uses_its_device() -> None:
    def work(results) -> None:
        from headrace import role

        results.put((float(torch.ones(3, device=role().device).sum()),))

    with Processes().crew() as crew:
        results = crew.channel(like=(0.0,))
        crew.start(work, results, device="cuda:0")
        assert results.take() == (3.0,)
