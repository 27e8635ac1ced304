"""A driver in 64 MB of /dev/shm with 256 descriptors: eight roles, and slots of 200 MB."""

import os
import resource

import torch

from headrace import Processes, role

SIZE = 200_000_000


def count(lanes):
    for number in range(100):
        lanes[role().rank].put((number, 0.5))


def fill(lane):
    slot = lane.reserve()
    slot["bytes"].fill_(7)
    lane.commit()


room = os.statvfs("/dev/shm")
print("limits", resource.getrlimit(resource.RLIMIT_NOFILE)[0], room.f_blocks * room.f_frsize, flush=True)
with Processes().crew(seed=1) as crew:
    lanes = crew.lanes(8, capacity=2, like=(0, 0.0))
    crew.start(count, lanes, copies=8)
    total = sum(number for _ in range(100) for number, _ in lanes.take_each())
    lane = crew.channel(like={"bytes": torch.empty(SIZE, dtype=torch.uint8)}, name="large")
    crew.start(fill, lane)
    large = int(lane.take()["bytes"].sum())
    crew.join()
print("moved", total, large, flush=True)
