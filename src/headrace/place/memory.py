"""A crew's memory: one file without a name, sub-allocated, mapped piece by piece without a descriptor each."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import psutil

from headrace.errors import ConfigError

__all__ = ["Memory", "PrivateMemory", "SharedMemory", "aligned"]

LINE = 64  # bytes of a cache line; fields of a slot start on one


def aligned(nbytes: int, to: int = LINE) -> int:
    """The next multiple of `to`."""
    return -(-nbytes // to) * to


class Memory(Protocol):
    """Bytes that every role of a crew can reach: allocated by the driver, viewed by anybody at the same offset."""

    def allocate(self, nbytes: int, what: str, prefault: bool = True) -> int:
        """Room for `nbytes` zeros; returns the offset. Raises ConfigError, with numbers, when there is not so much."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes there, writable; they stay mapped as long as anything made of this view lives."""

    def exclusive(self, offset: int) -> AbstractContextManager[None]:
        """A lock on that offset, which the kernel lets go if its holder is killed. For rare things only."""

    def close(self) -> None:
        """Hand out no more; what is viewed stays valid."""


def require(nbytes: int, what: str) -> None:
    """Refuse what would not fit into this machine's free memory (or this container's), before touching any of it."""
    available, where = psutil.virtual_memory().available, "this machine"
    limit = _container_headroom()
    if limit is not None and limit < available:
        available, where = limit, "this container"
    if nbytes > available:
        raise ConfigError(
            f"{what} needs {nbytes:,} bytes; {where} has {available:,} bytes available. Nothing was started. "
            "Give fewer or smaller slots (capacity, banks, the shapes in like=), or more memory."
        )


def _container_headroom() -> int | None:
    """Bytes left under the memory limit of our cgroup (version 2), None without one."""
    try:
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].split("::")[1]
        folder = Path("/sys/fs/cgroup" + group)
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, IndexError, ValueError):
        return None


class PrivateMemory:
    """Memory for roles that share the driver's process."""

    def __init__(self) -> None:
        self._pieces: dict[int, mmap.mmap] = {}
        self._end = 0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, what: str, prefault: bool = True) -> int:
        nbytes = aligned(nbytes, mmap.PAGESIZE)
        require(nbytes if prefault else 0, what)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (getattr(mmap, "MAP_POPULATE", 0) if prefault else 0)
        offset = self._end
        self._pieces[offset] = mmap.mmap(-1, nbytes, flags=flags)
        self._end += nbytes
        return offset

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._pieces[offset])[:nbytes]

    @contextmanager
    def exclusive(self, offset: int) -> Iterator[None]:
        with self._lock:
            yield

    def close(self) -> None:
        self._pieces.clear()


class SharedMemory:
    """Memory for roles in processes of their own: an anonymous memory file, sparse, with no name anywhere.

    It is not part of /dev/shm and not bound by its size; it is gone when the last process that maps it is.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._end = 0

    def allocate(self, nbytes: int, what: str, prefault: bool = True) -> int:
        nbytes = aligned(nbytes, mmap.PAGESIZE)
        offset = self._end
        try:
            if prefault:
                require(nbytes, what)
                # Pages exist from here on: a lack of memory is an error now, not a bus error in the middle of a run.
                os.posix_fallocate(self.descriptor, offset, nbytes)
            else:
                os.ftruncate(self.descriptor, offset + nbytes)
        except OSError as error:
            raise ConfigError(f"{what} needs {nbytes:,} bytes; the system refused them: {error}") from error
        self._end += nbytes
        return offset

    def view(self, offset: int, nbytes: int) -> memoryview:
        # mmap.mmap would hold a duplicate of the descriptor for every piece, and could not be closed under a view.
        address = _libc_mmap(
            None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE, self.descriptor, offset
        )
        if address in (None, _MAP_FAILED):
            raise OSError(ctypes.get_errno(), f"cannot map {nbytes:,} bytes: {os.strerror(ctypes.get_errno())}")
        piece = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(piece, _libc_munmap, address, nbytes).atexit = False
        return memoryview(piece).cast("B")

    @contextmanager
    def exclusive(self, offset: int) -> Iterator[None]:
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1, offset)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, offset)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1  # a view asked for now is an error of the system, not of another file


_libc = ctypes.CDLL(None, use_errno=True)
_libc_mmap = _libc.mmap
_libc_mmap.restype = ctypes.c_void_p
_libc_mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
]  # fmt: skip
_libc_munmap = _libc.munmap
_libc_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
