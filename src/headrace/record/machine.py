"""The machine under a run: what it is, and what the run's processes use of it."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from headrace.view.moment import Machine

__all__ = ["Usage", "cores", "describe_machine"]

PACKAGES = ("headrace", "torch", "numpy", "gymnasium", "safetensors", "ale-py", "envpool", "minigrid", "mujoco")
_CGROUP = Path("/sys/fs/cgroup")
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files that say how many microseconds of CPU time a container has in each period, and the period: version 2, 1."""


def describe_machine() -> dict[str, Any]:
    """Versions, the commit of the working folder, host, processor, cores and memory."""
    return {
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "executable": sys.executable,
        "git_commit": _commit(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "memory_mb": round(psutil.virtual_memory().total / 1e6),
    }


def cores(root: Path = _CGROUP) -> int:
    """Cores that this process may use: those of its affinity, or fewer where its container has a quota. At least 1."""
    allowed = len(os.sched_getaffinity(0))
    for names in _QUOTAS:
        with suppress(OSError, ValueError):
            quota, period = map(int, " ".join((root / name).read_text() for name in names).split())
            if quota > 0:
                return max(1, min(allowed, quota // period))
    return allowed


class Usage:
    """What processes use, from one look to the next."""

    def __init__(self) -> None:
        self._cores = cores()
        self._processes: dict[int, psutil.Process] = {}
        self._used: dict[int, float] = {}  # CPU seconds at the last look
        self._looked = time.monotonic()
        self.look([os.getpid()])

    def look(self, pids: Iterable[int]) -> Machine:
        """What these processes have used since the last look. One that has ended meanwhile counts for nothing."""
        now, busy, memory = time.monotonic(), 0.0, 0
        used = {}
        for pid in set(pids):
            try:
                process = self._processes.get(pid) or psutil.Process(pid)
                times, resident = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                self._processes.pop(pid, None)
                continue
            self._processes[pid] = process
            used[pid] = times.user + times.system
            busy += used[pid] - self._used.get(pid, 0.0)  # a new one began after the last look
            memory += resident
        seconds, self._looked = now - self._looked, now
        self._used = used
        return Machine(
            cpu=busy / max(seconds, 1e-3), cores=self._cores, rss_mb=round(memory / 1e6, 1), shm_mb=_shared_mb()
        )


def _shared_mb() -> float | None:
    """Shared memory that this process has mapped and touched: the driver's has all channels of its run."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                return round(int(line.split()[1]) * 1024 / 1e6, 1)
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit that the working folder stands at, if it is a repository's and git can tell."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
