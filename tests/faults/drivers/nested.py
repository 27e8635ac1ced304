"""A driver with a role that has a crew of its own: nested.py Inline|Processes finish|wait."""

import sys
import time

import headrace
from headrace import Processes

INNER = getattr(headrace, sys.argv[1])


def leaf(lane, ever):
    lane.put((1,))
    lane.put((2,))
    if ever:
        time.sleep(1000)


def branch(inner, out, ever):
    with inner().crew(seed=2) as crew:
        lane = crew.channel(name="lane", like=(0,))
        crew.start(leaf, lane, ever and inner is Processes)
        out.put(lane.take()[0] + lane.take()[0])
        if ever:
            time.sleep(1000)


with Processes().crew(seed=1) as crew:
    out = crew.channel(name="out")
    crew.start(branch, INNER, out, sys.argv[2] == "wait")
    print("sum", out.take(), flush=True)
    crew.join()
