"""A driver that forks while a crew is open: forks.py exit|unwind says how the child leaves.

unwind: by sys.exit(), through the driver's with-block and its atexit functions. exit: by os._exit().
"""

import os
import sys
import time

from headrace import Processes


def echo(there, back):
    while True:
        back.put(there.take())


def fork(then):
    pid = os.fork()
    if pid == 0:
        then()
    return pid


def opened(crew):
    there, back = crew.channel(name="there"), crew.channel(name="back")
    crew.start(echo, there, back)
    return there, back


with Processes().crew(seed=1) as crew:
    there, back = opened(crew)
    there.put("before")
    assert back.take() == "before"
    os.waitpid(fork(lambda: sys.exit(0) if sys.argv[1] == "unwind" else os._exit(0)), 0)
    there.put("ok", timeout=5)
    print("after", back.take(timeout=5), flush=True)
with Processes().crew(seed=1) as crew:
    there, back = opened(crew)
    there.put("ok", timeout=5)
    print("left", back.take(timeout=5), flush=True)
    print("child", fork(lambda: time.sleep(1000)), flush=True)
    back.take()  # forever
