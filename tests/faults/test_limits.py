"""Small limits: descriptors, /dev/shm, memory."""

from __future__ import annotations

import os
import re
import signal
import time

import psutil
import pytest
import torch

from headrace import ConfigError, Processes


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_HC_12_a_small_dev_shm_and_few_descriptors_are_enough(drivers, small_shm):
    driver = drivers.forked("limits.py", stage=small_shm)
    assert driver.says("limits") == "256 67108864"
    assert driver.says("moved") == f"{8 * sum(range(100))} {7 * 200_000_000}"
    assert driver.ends() == 0, driver.text()
    assert not driver.left()


@pytest.mark.timeout(60)
def test_HC_12_more_memory_than_there_is_is_refused_with_numbers(ran):
    total = psutil.virtual_memory().total
    slot = {"x": torch.empty(1).expand(total // 4)}  # 4 bytes each; nothing of it exists
    with Processes().crew(seed=1) as crew:
        began = time.monotonic()
        with pytest.raises(ConfigError, match="bytes available") as caught:
            crew.channel(like=slot)
        assert time.monotonic() - began < 5
        needed, available = (
            int(found.replace(",", "")) for found in re.findall(r"([\d,]{8,}) bytes", str(caught.value))[-2:]
        )
        assert 2 * total <= needed <= 2.1 * total
        assert 0.5 * psutil.virtual_memory().available < available <= total
        assert crew.members == ()
        assert not ran()
        assert os.fstat(crew.memory.descriptor).st_blocks * 512 < 2_000_000  # nothing was taken for it either
        small = crew.channel(like=(0,))  # the crew goes on
        crew.start(lambda lane: lane.put((1,)), small, name="small")
        assert small.take() == (1,)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_HC_12_twenty_killed_runs_and_a_clean_one_leave_dev_shm_as_it_was(drivers, small_shm):
    def used() -> tuple[int, list[str]]:
        shm = f"/proc/{small_shm.process.pid}/root/dev/shm"
        return os.statvfs(shm).f_bfree, sorted(os.listdir(shm))

    before = used()
    for _ in range(5):
        batch = [drivers.forked("killed.py", stage=small_shm) for _ in range(4)]
        for driver in batch:
            assert driver.says("sum") == str(1 << 20)
            driver.look()
            driver.send(signal.SIGKILL)
            driver.ends()
            assert not driver.left()
    clean = drivers.forked("killed.py", "clean", stage=small_shm)
    assert clean.ends(60) == 0, clean.text()
    assert not clean.left()
    assert used() == before
