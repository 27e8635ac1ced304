"""Saves and is killed, again and again; prints what was found after each kill.

killed.py FOLDER NAME…: at the first, second, … call of a function with one of these names, until there are no more.
The value found is that of the old checkpoint, 1, or of the new one, 2; first where one of the same step is replaced,
then where a newer one is added. killed.py FOLDER COUNT: at random moments; how many of those begun were not found.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from headrace import Checkpoints
from headrace.checkpoint import load

torch.set_num_threads(1)
folder, *arguments = sys.argv[1:]
runs = Path(folder)


def state(value):
    return {"learner": {"net": {"weight": torch.full((3,), float(value))}}, "lanes": [torch.ones(2)]}


def found():
    newest = Checkpoints(runs).latest()
    assert not newest.skipped, newest
    return int(load(newest.folder)["learner"]["net"]["weight"][0])


def killed_at(number, step):
    """Save, killed at this call; the exit status."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def kill(frame, event, function):
            nonlocal count
            if event == "c_call" and getattr(function, "__name__", "") in arguments:
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(kill)
        Checkpoints(runs, keep=1).save(step, state(2))
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def at_each_call(step):
    outcomes, status = [], signal.SIGKILL
    while status == signal.SIGKILL:
        shutil.rmtree(runs, ignore_errors=True)
        Checkpoints(runs).save(1, state(1))
        status = killed_at(len(outcomes) + 1, step)
        outcomes.append(found())
        Checkpoints(runs, keep=1).save(3, state(3))
        assert found() == 3
        assert os.listdir(runs) == ["step_000000003"], os.listdir(runs)
    assert status == 0, status
    return outcomes


def at_random_moments(count):
    lost, chance, value = [], random.Random(1), 1
    Checkpoints(runs).save(1, state(1))
    for _ in range(count):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            for next_value in range(value + 1, 10**6):
                os.write(writing, b".")
                Checkpoints(runs).save(next_value, state(next_value))
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(writing)
        begun = value
        while data := os.read(reading, 4096):
            begun += len(data)
        os.close(reading)
        value = found()
        lost.append(begun - value)
    Checkpoints(runs).save(value + 1, state(value + 1))
    assert len(os.listdir(runs)) == 3, os.listdir(runs)
    return lost


if arguments[0].isdigit():
    print(json.dumps(at_random_moments(int(arguments[0]))))
else:
    print(json.dumps([at_each_call(step=1), at_each_call(step=2)]))
