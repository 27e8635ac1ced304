"""A driver that keeps a view of an item after the crew has ended, and looks at it."""

import gc
import os

import torch

from headrace import Processes


def fill(lane):
    lane.put({"x": torch.ones(512, 512)})


def view():
    with Processes().crew(seed=1) as crew:
        lane = crew.channel(like={"x": torch.ones(512, 512)})
        crew.start(fill, lane)
        return lane.take()


first = view()
before = len(os.listdir("/proc/self/fd"))
second = view()
gc.collect()
print("sum", float(first["x"].sum()) if bool((first["x"] == second["x"]).all()) else "differs", flush=True)
second["x"].add_(1)  # writable still
print("descriptors", "same" if len(os.listdir("/proc/self/fd")) == before else "more", flush=True)
