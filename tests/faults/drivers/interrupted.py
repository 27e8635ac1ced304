"""A driver that goes on after a Ctrl-C: interrupted.py loading|leaving says when it comes; then a new crew works."""

import gc
import os
import sys
import time

import psutil

from headrace import Processes

WHEN = sys.argv[1]


def stubborn(lane):
    lane.put("up")
    while True:
        time.sleep(1000)


def memory_files():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sum("memfd:headrace" in link for link in links)


try:
    if WHEN == "loading":
        print("now", flush=True)
    with Processes().crew(seed=1) as crew:
        lane = crew.channel()
        crew.start(stubborn, lane)
        lane.take()
        if WHEN == "leaving":
            print("now", flush=True)
    print("finished", flush=True)
except KeyboardInterrupt:
    print("caught", flush=True)
gc.collect()
print("memory-files", memory_files(), flush=True)
with Processes().crew(seed=1) as crew:
    lane = crew.channel()
    crew.start(lambda lane: lane.put("ok"), lane, name="again")
    print("again", lane.take(timeout=10), flush=True)
time.sleep(0.5)
living = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
print("children", len(living), flush=True)
