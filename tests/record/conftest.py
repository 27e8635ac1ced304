"""Reports as a plan would give them, a view that remembers, and a record without the second that matplotlib takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.record.folder import RunFolder
from headrace.record.record import Record
from headrace.report import Report
from headrace.view.moment import Header, Moment

Telling = Callable[..., Report]
Recording = Callable[..., Record]


class Remembering:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.moments: list[Moment] = []
        self.lines: list[str] = []

    def begin(self, header: Header) -> None:
        self.headers.append(header)

    def show(self, moment: Moment, returns: Sequence[float]) -> None:
        assert isinstance(returns, tuple)  # it may be kept
        self.moments.append(moment)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def end(self, lines: Sequence[str]) -> None:
        raise AssertionError("whoever made the view ends it")

    def close(self) -> None:
        raise AssertionError("whoever made the view closes it")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """To describe the real one takes a process."""
    monkeypatch.setattr("headrace.record.folder.describe_machine", lambda: {"cores": 3})


@pytest.fixture
def view() -> Remembering:
    return Remembering()


@pytest.fixture
def told() -> Telling:
    """A function of a version: its report, of 100 steps an update, of which nothing depends on time."""

    def report(
        version: int,
        returns: Sequence[float] = (),
        lengths: Sequence[int] | None = None,
        lags: Sequence[int] = (0,),
        metrics: Mapping[str, float] | None = None,
        **fields: Any,
    ) -> Report:
        state = {"learner": {"net": {"weight": torch.full((2,), float(version))}}, "weights": []}
        return Report(
            **{
                "version": version,
                "env_steps": 100 * version,
                "frames": 400 * version,
                "gradient_steps": 16 * version,
                "samples_learned": 300 * version,
                "dropped": {},
                "episode_returns": np.array(returns, np.float32),
                "episode_lengths": np.array(lengths or [7] * len(returns), np.int32),
                "lags": np.array(lags, np.int32),
                "metrics": metrics or {},
                "running_return": 1.5,
                "running_length": 12.0,
                "state": lambda: state,
                **fields,
            }
        )

    return report


@pytest.fixture
def record(tmp_path: Path, view: Remembering, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """A function of Record's keyword arguments: one in the folder "run"."""
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed

    def made(**arguments: Any) -> Record:
        folder = RunFolder(tmp_path / "run")
        folder.path.mkdir(exist_ok=True)
        header = Header("ppo", "CartPole-v1", "sync", "inline", "cpu", "", str(folder.path), 1, 1_000, 475.0)
        return Record(folder, **{"total_timesteps": 1_000, "view": view, "header": header, **arguments})

    return made
