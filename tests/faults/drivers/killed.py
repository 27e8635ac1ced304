"""A driver that moves megabytes and waits: killed.py clean ends by itself, killed.py waits to be killed."""

import sys

import torch

from headrace import Processes


def fill(lane):
    while True:
        lane.put({"x": torch.ones(1 << 20)})


with Processes().crew(seed=1) as crew:
    lane = crew.channel(like={"x": torch.ones(1 << 20)})
    crew.start(fill, lane)
    print("sum", int(lane.take()["x"].sum()), flush=True)
    if len(sys.argv) == 1:
        while True:
            lane.take()
