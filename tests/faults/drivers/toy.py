"""The toy with four actors, timed: toy.py TOY REPETITIONS CPU. CPU -1: on all."""

import importlib.util
import os
import sys
import time

path, repetitions, cpu = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if cpu >= 0:
    os.sched_setaffinity(0, {cpu})
spec = importlib.util.spec_from_file_location("toy", path)
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)
sys.modules["toy"] = toy
began = time.monotonic()
for repetition in range(-1, repetitions):
    began = time.monotonic()
    toy.main("processes", 4)
    if repetition >= 0:  # the nursery loads in the first
        print(f"seconds-{repetition} {time.monotonic() - began:.3f}", flush=True)
