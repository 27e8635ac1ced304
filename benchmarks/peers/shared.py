"""Plain shared memory: a flat vector that a writer copies in and two readers copy out, signalled in two ways."""

import ctypes
import multiprocessing
import os
import sys
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import torch

from benchmarks.report import rate, report
from benchmarks.versions import PARAMETERS, READERS, VERSIONS, WARM_UP

TRIES = 200  # how often a wait looks again before it blocks: an idle core takes long to wake


class Semaphore:
    """A bell between two processes: the fastest that plain Python has."""

    def __init__(self) -> None:
        semaphore = multiprocessing.Semaphore(0)
        self.ring, self._acquire = semaphore.release, semaphore.acquire

    def wait(self) -> None:
        for _ in range(TRIES):
            if self._acquire(False):
                return
            os.sched_yield()
        if not self._acquire(timeout=60):
            raise TimeoutError("nobody rang for 60 s")


class Pipe:
    """A byte through a pipe."""

    def __init__(self) -> None:
        self._reading, self._writing = multiprocessing.Pipe(duplex=False)

    def ring(self) -> None:
        self._writing.send_bytes(b"!")

    def wait(self) -> None:
        if not self._reading.poll(60):
            raise TimeoutError("nobody rang for 60 s")
        self._reading.recv_bytes()


def vector() -> np.ndarray:
    """A flat vector on the pages that torch asks for, as a network's parameters are; NumPy would ask for huge ones."""
    return torch.ones(PARAMETERS).numpy()


def read(source: int, published: Semaphore | Pipe, pulled: Semaphore | Pipe) -> None:
    mine = vector()
    target = mine.ctypes.data
    for version in range(1, WARM_UP + VERSIONS + 1):
        published.wait()
        ctypes.memmove(target, source, mine.nbytes)
        if mine[0] != version or mine[-1] != version:
            raise RuntimeError(f"version {version} came as {mine[0]}, {mine[-1]}")
        pulled.ring()


def main(bell: str) -> None:
    kind = {"semaphore": Semaphore, "pipe": Pipe}[bell]
    mine = vector()
    memory = SharedMemory(create=True, size=mine.nbytes)
    memory.unlink()  # the readers are forked and have it mapped; no name stays behind, whatever happens
    shared = np.frombuffer(memory.buf, np.float32, PARAMETERS)
    target, source = shared.ctypes.data, mine.ctypes.data
    bells = [(kind(), kind()) for _ in range(READERS)]
    readers = [multiprocessing.Process(target=read, args=(target, *pair), daemon=True) for pair in bells]
    for reader in readers:
        reader.start()

    def publish(version):
        mine[0] = mine[-1] = version
        ctypes.memmove(target, source, mine.nbytes)
        for published, _ in bells:
            published.ring()
        for _, pulled in bells:
            pulled.wait()

    speed = rate(publish, VERSIONS, WARM_UP)
    for reader in readers:
        reader.join(timeout=60)
    report(f"shared_{bell}", speed, bell=bell, bytes=mine.nbytes, readers=READERS, versions=VERSIONS)
    del shared  # or the memory could not be closed
    memory.close()


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")  # one thread, no library that minds
    main(sys.argv[1])
