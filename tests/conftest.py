"""Durations per folder, and the check that a test leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import hypothesis
import psutil
import pytest

# Wall-clock deadlines per example say nothing on a busy machine; pytest-timeout ends what hangs.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")

# Who starts the tests in the background may have ignored these for us; the tests send them, and drivers inherit them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)

KEEPER = "headrace.place.keeper"
"""In the command line of the one helper process that the library keeps for a driver's life."""

SHARED = Path("/dev/shm")

PATIENCE = 10.0
"""Seconds that processes and shared memory have to vanish after a test."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long the tests of each folder took, setup and teardown included, and how many there were."""
    seconds: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, int] = defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = str(PurePosixPath(report.nodeid.partition("::")[0]).parent)
                seconds[folder] += report.duration
                tests[folder] += report.when == "setup"
    if not seconds:
        return
    terminalreporter.section("durations per folder")
    width = max(map(len, seconds))
    for folder, duration in sorted(seconds.items()):
        terminalreporter.line(f"{folder:<{width}} {duration:8.1f} s {tests[folder]:6} tests")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test after which a process or an entry in /dev/shm is there that was not there before.

    Processes are ended after the complaint, so that later tests start clean. A process that lost its parent is no
    longer a descendant of ours and is not seen: a test that kills a parent watches the children's ids itself.
    """
    processes, entries = _descendants(), _shared()
    yield
    deadline = time.monotonic() + PATIENCE
    while True:
        left = [process for process in _descendants() - processes if not _is_keeper(process)]
        files = _shared() - entries
        if not left and not files:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.002)
    files -= _held_by_others(files)
    complaints = [f"process {_describe(process)}" for process in left] + [f"{SHARED / name}" for name in sorted(files)]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    if complaints:
        pytest.fail(f"left behind {PATIENCE:g} s after the test:\n  " + "\n  ".join(complaints), pytrace=False)


@pytest.fixture
def descriptors() -> Callable[[], dict[int, str]]:
    """A function that lists this process's open file descriptors: number → what it points to.

    Not checked after every test, since libraries open some on first use: warm up, list, act, list again, compare.
    """

    def listing() -> dict[int, str]:
        found = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:  # the descriptor that listed the folder
                continue
        return found

    return listing


def _descendants() -> set[psutil.Process]:
    """All processes below this one, from the kernel's lists: a scan of all takes 17 ms, too long for each test."""
    found, parents = set(), [os.getpid()]
    while parents:
        with suppress(OSError):  # it has ended meanwhile
            for children in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
                for pid in map(int, children.read_text().split()):
                    parents.append(pid)
                    with suppress(psutil.Error):
                        found.add(psutil.Process(pid))
    return found


def _is_keeper(process: psutil.Process) -> bool:
    """Whether this is our own keeper. What runs below it counts as left behind, and so does another keeper's."""
    try:
        return process.ppid() == os.getpid() and any(KEEPER in word for word in process.cmdline())
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline()) or process.name()}"
    except psutil.Error:
        return f"{process.pid}"


def _shared() -> set[str]:
    return set(os.listdir(SHARED)) if SHARED.exists() else set()


def _held_by_others(names: set[str]) -> set[str]:
    """Those entries of /dev/shm that a process outside this test run has mapped or open: they are not ours."""
    ours = {os.getpid(), *(process.pid for process in _descendants())}
    held = set()
    for pid in psutil.pids() if names else []:
        if pid in ours:
            continue
        try:
            used = Path(f"/proc/{pid}/maps").read_text()
            used += "\n".join(os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        held |= {name for name in names if f"{SHARED / name}" in used}
    return held
