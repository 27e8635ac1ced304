"""A driver whose roles are hard to end: crowd.py MODE GO. It says what it does; the scene begins when file GO exists.

MODE: running (the driver waits in a take), leaving (it leaves the block), failing (a role raises), handled (as running;
SIGTERM raises SystemExit in the driver, as many schedulers' scripts do).
"""

import os
import signal
import subprocess
import sys
import time

from headrace import Processes, role

MODE, GO = sys.argv[1:]


def say(text):
    print(text, flush=True)


def wait_for_go():
    while not os.path.exists(GO):
        time.sleep(0.005)


def blocked(up, never):
    up[0].put("up")
    never.take()


def looping(up):
    up[1].put("up")
    wait_for_go()
    while True:
        pass


def computing(up):
    up[2].put("up")
    wait_for_go()
    sum(range(10**12))  # in C, holding the GIL


def sleeping(up):
    up[3].put("up")
    time.sleep(1000)


def family(up):
    children = [
        subprocess.Popen(["sleep", "1000"]),
        subprocess.Popen(["sleep", "1000"], start_new_session=True),
        subprocess.Popen(["/bin/sh", "-c", "trap '' TERM HUP INT; sleep 1000 & wait"], env={}),
    ]
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
    os.waitpid(pid, 0)
    up[4].put([child.pid for child in children])
    role().sleep(1000)


def failing(up):
    up[5].put("up")
    wait_for_go()
    raise ValueError("on purpose")


if MODE == "handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
say("loading")
with Processes().crew(seed=1) as crew:
    up = crew.lanes(6 if MODE == "failing" else 5, name="up")
    never = crew.channel(name="never")
    crew.start(blocked, up, never)
    crew.start(looping, up)
    crew.start(computing, up)
    crew.start(sleeping, up)
    crew.start(family, up)
    if MODE == "failing":
        crew.start(failing, up)
    up.take_each()
    say("running")
    if MODE == "leaving":
        wait_for_go()
        say("leaving")
    else:
        up[0].take()
say("left")
time.sleep(1000)
