"""TensorBoard's event files: the names of metrics.jsonl, averaged over a second at least."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.record.disk import Failures

__all__ = ["Events", "Window"]

COUNTERS = ("updates", "time", "gradient_steps", "samples_learned", "charts/episodes_finished", "charts/return_mean100")
"""Of these, and of what begins with dropped/ or health/, the last value counts; of others the mean."""


class Window:
    """Rows of metrics, to be told as one."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in a row: its numbers, and those one level down ("dropped/non_finite")."""
        for name, value in row.items():
            if type(value) is float or type(value) is int:
                self._values.setdefault(name, []).append(value)
            elif isinstance(value, Mapping):
                self.add({f"{name}/{key}": held for key, held in value.items()})

    def take(self) -> dict[str, float]:
        """One value for each name, which begins a new window; empty where no row came."""
        told = {
            name: values[-1]
            if name in COUNTERS or name.startswith(("dropped/", "health/"))
            else sum(values) / len(values)
            for name, values in self._values.items()
            if name != "global_step"  # the axis
        }
        self._values.clear()
        return told


class Events:
    """One event file in a run's folder. Where tensorboardX is not installed there is none, which is said.

    step: where the run goes on; what an earlier life told of later steps is hidden then.
    """

    def __init__(self, folder: Path, failures: Failures, say: Callable[[str], None], step: int | None = None) -> None:
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._failures, self._written = failures, 0
        self._made = False
        try:
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c
        except ImportError:
            say("tensorboardX is not installed, so there are no TensorBoard events. pip install tensorboardX")
            return
        self._made = True
        self._event, self._summary, self._checksum = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        first = [self._event(wall_time=time.time(), file_version="brain.Event:2")]
        if step is not None:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            first.append(self._event(wall_time=time.time(), step=step + 1, session_log=log))
        self._begun = b"".join(map(self._framed, first))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one event with these values."""
        if not self._made or not values:
            return
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        data = self._framed(self._event(wall_time=time.time(), step=step, summary=summary))
        try:
            with open(self._path, "ab", buffering=0) as file:
                file.truncate(self._written)  # what a full disk took in part
                data = data if self._written else self._begun + data
                file.seek(0, os.SEEK_END)
                while data:
                    data = data[(file.write(data) or 0) :]
                self._written = file.tell()
        except OSError as error:
            self._failures.add("TensorBoard events", error)

    def _framed(self, event: Any) -> bytes:
        """An event as the record that the file is made of: length and content, each with its checksum."""
        content: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        checksums = (struct.pack("<I", self._checksum(part)) for part in (length, content))
        return length + next(checksums) + content + next(checksums)
