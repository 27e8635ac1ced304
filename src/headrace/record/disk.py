"""Files that are written beside training: a write that fails is said once, counted, and stops nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headrace.durable import write

__all__ = ["Failures", "Lines", "json_text", "replace"]

_ROW = json.JSONEncoder(allow_nan=False).encode  # json.dumps makes an encoder at each call


class Failures:
    """Writes that failed, by kind. tell: is given the kind and one line for the first of each."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        self.counts: dict[str, int] = {}

    def add(self, kind: str, error: Exception) -> None:
        """Count a failure of this kind."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] == 1:
            self._tell(
                kind,
                f"{kind} could not be written: {error}. Training goes on without; what is lost is counted, and written "
                "is again once it can be.",
            )

    @contextmanager
    def counted(self, kind: str) -> Iterator[None]:
        """Let the block fail to read or write files."""
        try:
            yield
        except OSError as error:
            self.add(kind, error)


class Lines:
    """A file of lines that only grows, whole lines at a time. A line that cannot be written is lost and counted.

    keep: how many lines of what lies there stay; those after them, and a half line of a killed process, are cut off.
    count: lines that are in the file.
    """

    def __init__(self, path: Path, kind: str, failures: Failures, keep: int | None = None) -> None:
        self.path, self.count = path, 0
        self._kind, self._failures = kind, failures
        self._file: int | None = None
        with failures.counted(kind):
            self.count = _cut(path, keep)

    def write(self, text: str) -> None:
        """Add a line, without its end."""
        data = text.encode() + b"\n"
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if (written := os.write(self._file, data)) < len(data):  # a disk that is full takes a part
                try:
                    while written < len(data):
                        written += os.write(self._file, data[written:])
                except OSError:
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                    raise
        except OSError as error:
            self.close()  # the next write tries from the start, where there may be another disk by then
            self._failures.add(self._kind, error)
        else:
            self.count += 1

    def close(self) -> None:
        """Let go of the file; the next line opens it again."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


def replace(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, in the place of what was there. Raises OSError."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        write(new, [text.encode()])
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON by the standard: null stands for a number that is not finite. Raises TypeError for what JSON lacks."""
    encode = _ROW if indent is None else json.JSONEncoder(allow_nan=False, indent=indent).encode
    try:
        return encode(value)
    except ValueError:
        return encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
    return value


def _cut(path: Path, keep: int | None) -> int:
    """Cut a file off after so many lines, or after its last whole one. Returns how many there are then."""
    if not path.exists():
        return 0
    count = size = 0
    with open(path, "rb") as file:
        for line in file:
            if count == keep or not line.endswith(b"\n"):
                break
            count, size = count + 1, size + len(line)
    if size < path.stat().st_size:
        os.truncate(path, size)
    return count
