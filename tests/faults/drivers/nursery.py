"""A driver that goes on when its nursery is killed: nursery.py GO."""

import os
import sys
import time

from headrace import Processes


def echo(there, back):
    while True:
        back.put(there.take())


def asked(crew):
    there, back = crew.channel(name="there"), crew.channel(name="back")
    crew.start(echo, there, back)

    def ask():
        there.put("ok")
        return back.take(timeout=5)

    return ask


with Processes().crew(seed=1) as crew:
    ask = asked(crew)
    print("first", ask(), flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.005)
    time.sleep(0.3)
    print("second", ask(), flush=True)
with Processes().crew(seed=1) as crew:
    print("third", asked(crew)(), flush=True)
