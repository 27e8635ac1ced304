"""W&B beside a run: it is never asked anything, never waited for, and what fails there is said once."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Box, ConfigError, Discrete, Report, Spec
from headrace.record import track
from headrace.record.folder import RunFolder
from headrace.record.record import Record


class Stand(types.ModuleType):
    """In place of the package: a run that notes what it is given."""

    def __init__(self, init: Callable[[], object] = lambda: None) -> None:
        super().__init__("wandb")
        self.given: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = False
        self._init = init

    def init(self, **given: Any) -> Stand:
        self.given = given
        self._init()
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self.rows.append((step, row))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture(autouse=True)
def nobody_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def recorded(
    record: Callable[..., Record], told: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Stand], None]:
    """Record a run with this in place of the package."""

    def run(stand: Stand) -> None:
        monkeypatch.setitem(sys.modules, "wandb", stand)
        kept = record(track=True)
        kept.folder.write({"learning_rate": 0.5}, Spec(Box(-np.ones(1), np.ones(1)), Discrete(2)), [])
        with kept:
            for version in range(1, 4):
                kept.report(told(version, [float(version)]))
            kept.finish("finished")

    return run


def test_rows_go_there_offline_unless_somebody_has_logged_in(
    recorded: Callable[[Stand], None], view: Any, tmp_path: Path
) -> None:
    stand = Stand()
    recorded(stand)
    assert (stand.given["mode"], stand.given["name"], stand.given["dir"]) == ("offline", "run", str(tmp_path / "run"))
    assert stand.given["config"] == {"learning_rate": 0.5}
    assert stand.rows[0][0] == 100
    assert stand.rows[0][1]["charts/episodic_return"] == 1.0
    assert stand.rows[-1][1]["charts/return_mean100"] == 2.0
    assert stand.finished
    assert not any("W&B" in line for line in view.lines)


@pytest.mark.parametrize(
    ("variables", "netrc", "mode"),
    [
        ({"WANDB_API_KEY": "k"}, "", "online"),
        ({}, "machine api.wandb.ai login user password k", "online"),
        ({}, "machine other.org login user password k", "offline"),
        ({}, "nonsense", "offline"),
        ({"WANDB_BASE_URL": "https://wandb.other.org"}, "machine wandb.other.org login user password k", "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "", "disabled"),
    ],
)
def test_it_is_online_where_there_is_a_key(
    recorded: Callable[[Stand], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    netrc: str,
    mode: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    stand = Stand()
    recorded(stand)
    assert stand.given["mode"] == mode


def test_a_failure_is_said_once_and_stops_nothing(recorded: Callable[[Stand], None], view: Any, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no network")

    recorded(Stand(fail))
    assert [line for line in view.lines if "W&B" in line] == [
        "W&B: OSError: no network. Training goes on without it; the run folder has everything."
    ]
    assert len(RunFolder(tmp_path / "run").metrics()) == 3


def test_one_that_never_answers_is_not_waited_for(
    recorded: Callable[[Stand], None], view: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track, "PATIENCE", 0.02)
    answers = threading.Event()
    try:
        recorded(Stand(answers.wait))
        assert [line for line in view.lines if "did not finish within 0.02 s" in line]
    finally:
        answers.set()


def test_what_it_does_not_take_is_not_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "PATIENCE", 0.02)
    monkeypatch.setattr(track, "WAITING", 2)
    answers, said = threading.Event(), []
    monkeypatch.setitem(sys.modules, "wandb", Stand(answers.wait))
    tracker = track.Tracker(tmp_path, {}, said.append)
    try:
        for step in range(5):
            tracker.write(step, {"a": 1.0})
        tracker.close()
        assert len(said) == 1
        assert said[0].startswith("W&B: 2 rows wait to be sent; it does not answer.")
    finally:
        answers.set()


def test_without_the_package_it_is_refused_at_once(
    record: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs wandb, which is not installed"):
        record(track=True)
