"""multiprocessing.Pipe between two processes: the toy, and the arrays of `transport` in two forms."""

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.founding import act, learn
from benchmarks.item import COUNTS, SOURCES, WARM_UPS, arrays, item_bytes, look, stamp
from benchmarks.report import rate, report


def toy(steps: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_toy_actor, args=(ours, theirs), daemon=True)
    process.start()
    theirs.close()
    policy, speed = learn(ours.send, ours.recv, steps)
    process.join(timeout=60)
    report("pipe", speed, steps=steps, policy=policy)


def _toy_actor(ours: Connection, theirs: Connection) -> None:
    ours.close()
    act(theirs.recv, theirs.send)


def transport(size: str, form: str) -> None:
    reading, writing = multiprocessing.Pipe(duplex=False)
    writer = multiprocessing.Process(target=FORMS[form], args=(reading, writing, size), daemon=True)
    writer.start()
    writing.close()
    if form == "tuple":

        def take(number):
            item = reading.recv()
            look(item[0], item[-1], number)

    else:
        buffer = bytearray(item_bytes(size))
        views = _views(buffer, size)

        def take(number):
            reading.recv_bytes_into(buffer)
            look(views[0], views[-1], number)

    speed = rate(take, COUNTS[size], WARM_UPS[size])
    writer.join(timeout=60)
    report(f"pipe_{form}_{size}", speed, form=form, bytes=item_bytes(size), items=COUNTS[size])


def _write_tuple(reading: Connection, writing: Connection, size: str) -> None:
    reading.close()
    sources = [arrays(size) for _ in range(SOURCES[size])]
    for number in range(1, WARM_UPS[size] + COUNTS[size] + 1):
        item = sources[number % len(sources)]
        stamp(item[0], item[-1], number)
        writing.send(item)


def _write_bytes(reading: Connection, writing: Connection, size: str) -> None:
    reading.close()
    sources = [arrays(size) for _ in range(SOURCES[size])]
    buffer = bytearray(item_bytes(size))
    views = _views(buffer, size)
    for number in range(1, WARM_UPS[size] + COUNTS[size] + 1):
        item = sources[number % len(sources)]
        stamp(item[0], item[-1], number)
        for view, array in zip(views, item, strict=True):
            view[...] = array
        writing.send_bytes(buffer)


def _views(buffer: bytearray, size: str) -> list[np.ndarray]:
    views, offset = [], 0
    for array in arrays(size):
        views.append(np.frombuffer(buffer, array.dtype, array.size, offset).reshape(array.shape))
        offset += array.nbytes
    return views


FORMS = {"tuple": _write_tuple, "bytes": _write_bytes}

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")  # one thread, no library that minds
    if sys.argv[1] == "toy":
        toy(int(sys.argv[2]))
    else:
        transport(*sys.argv[2:])
