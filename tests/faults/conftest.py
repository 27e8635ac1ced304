"""Drivers in processes of their own, watched from outside: what they say, how they end, and what they leave."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

SOURCE = Path(__file__).parents[2] / "src"
SCRIPTS = Path(__file__).parent / "drivers"
MARK = "HEADRACE_FAULTS_MARK"  # a driver's environment holds it, and so does that of all that starts from it
PATIENCE = 10.0  # seconds in which everything of a dead driver must have gone


class Driver:
    """One driver. `seen` holds every process found under it so far, however it has been adopted since."""

    def __init__(self, pid: int, poll: Callable[[], int | None], mark: str, output: Path, temporary: Path) -> None:
        self.pid, self._poll, self.mark, self.output, self.temporary = pid, poll, mark, output, temporary
        self.code: int | None = None
        self.seen: set[psutil.Process] = set()
        with suppress(psutil.Error):
            self.seen.add(psutil.Process(pid))

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def says(self, word: str, within: float = 60.0) -> str:
        """The rest of the first line that begins with this word, waited for."""
        deadline = time.monotonic() + within
        while True:
            over = self.poll() is not None
            for line in self.text().split("\n")[:-1]:
                if line.split(" ")[0] == word:
                    return line.partition(" ")[2]
            if over or time.monotonic() > deadline:
                how = f"it has ended with {self.code}" if over else f"not in {within:g} s"
                pytest.fail(f"the driver never said {word!r} ({how}):\n{self.text()}", pytrace=False)
            time.sleep(0.005)

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self._poll()
        return self.code

    def ends(self, within: float = PATIENCE) -> int:
        """Its exit code, waited for."""
        deadline = time.monotonic() + within
        while self.poll() is None:
            if time.monotonic() > deadline:
                pytest.fail(f"the driver has not ended in {within:g} s:\n{self.text()}", pytrace=False)
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def look(self) -> set[psutil.Process]:
        """Note all that lives under it, or carries its mark; return those that live."""
        with suppress(psutil.Error):
            self.seen.update(psutil.Process(self.pid).children(recursive=True) if self.poll() is None else ())
        needle = f"{MARK}={self.mark}".encode()
        for pid in psutil.pids():
            with suppress(OSError, psutil.Error):
                if needle in Path(f"/proc/{pid}/environ").read_bytes():
                    self.seen.add(psutil.Process(pid))
        return {process for process in self.seen if _lives(process)}

    def nursery(self) -> psutil.Process:
        (found,) = (p for p in psutil.Process(self.pid).children() if "place.keeper" in " ".join(p.cmdline()))
        return found

    def keepers(self) -> list[psutil.Process]:
        return self.nursery().children()

    def roles(self) -> list[psutil.Process]:
        return [role for keeper in self.keepers() for role in keeper.children() if role.name() != "sleep"]

    def send(self, number: int, group: bool = False) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def left(self, within: float = PATIENCE) -> list[str]:
        """What is left of it, after it has had that long to go: processes and temporary files.

        /dev/shm is compared by a fixture of all tests (tests/conftest.py).
        """
        deadline = time.monotonic() + within
        while True:
            processes, files = self.look(), list(self.temporary.rglob("*"))
            if not (processes or files) or time.monotonic() > deadline:
                return [*map(_describe, processes), *map(str, files)]
            time.sleep(0.02)

    def close(self) -> None:
        """End what a failed test has left."""
        for process in self.look():
            with suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + PATIENCE
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)


class Stage:
    """A process that forks drivers (drivers/stage.py)."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(SCRIPTS / "stage.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self._lock:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=PATIENCE)


class Drivers:
    """Starts drivers, and ends with them."""

    def __init__(self, folder: Path, stage: Callable[[], Stage]) -> None:
        self.folder, self._stage = folder, stage
        self.all: list[Driver] = []

    def forked(self, script: str, *args: object, stage: Stage | None = None) -> Driver:
        """A driver that runs drivers/<script>, forked from the stage, which has torch loaded."""
        on = stage or self._stage()
        mark, output, temporary = self._places()
        pid = on.ask(
            command=[str(SCRIPTS / script), *map(str, args)],
            environ={MARK: mark, "TMPDIR": str(temporary)},
            output=str(output),
        )
        return self._keep(Driver(pid, functools.partial(on.ask, poll=pid), mark, output, temporary))

    def fresh(self, *command: object, stdin: str = "", folder: Path | None = None) -> Driver:
        """A driver that is an interpreter of its own: this command line."""
        mark, output, temporary = self._places()
        given = output.with_suffix(".in")
        given.write_text(stdin)
        with output.open("wb") as out, given.open() as into:
            process = subprocess.Popen(
                [*map(str, command)],
                stdin=into,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(SOURCE), MARK: mark, "TMPDIR": str(temporary)},
            )
        return self._keep(Driver(process.pid, process.poll, mark, output, temporary))

    def file(self) -> Path:
        """A path where nothing is yet."""
        return self.folder / uuid.uuid4().hex

    def _places(self) -> tuple[str, Path, Path]:
        place = self.file()
        place.mkdir()
        (place / "temporary").mkdir()
        (place / "output").touch()
        return place.name, place / "output", place / "temporary"

    def _keep(self, driver: Driver) -> Driver:
        self.all.append(driver)
        return driver

    def close(self) -> None:
        for driver in self.all:
            driver.close()


@pytest.fixture(scope="session")
def stage() -> Iterator[Callable[[], Stage]]:
    """The stage that most drivers come from. Started here, before any test looks at what runs."""
    started = Stage()
    yield lambda: started
    started.close()


@pytest.fixture
def drivers(tmp_path: Path, stage: Callable[[], Stage]) -> Iterator[Drivers]:
    """Starts drivers, and ends what they leave after the test."""
    made = Drivers(tmp_path, stage)
    yield made
    made.close()


@pytest.fixture
def small_shm() -> Iterator[Stage]:
    """A stage with 64 MB of /dev/shm, which nobody else sees, and 256 descriptors."""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    allowed = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"a mount namespace is not permitted here: {allowed.stderr.strip()}")
    started = Stage(["unshare", "-m", "sh", "-c", f'{mount} && ulimit -n 256 && exec "$@"', "stage"])
    yield started
    started.close()


@pytest.fixture
def ran() -> Callable[[], list[int]]:
    """A function that lists the pids of all roles that this test process has now."""

    def roles() -> list[int]:
        mine = [child for child in psutil.Process().children() if "place.keeper" in " ".join(child.cmdline())]
        return [role.pid for nursery in mine for keeper in nursery.children() for role in keeper.children()]

    return roles


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} below {process.ppid()} ({process.status()}): {' '.join(process.cmdline())}"
    return f"{process.pid}"
