"""The program is stopped and goes on: exit status, what is saved, what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]

LONG = ["train", "ppo", "CartPole-v1", "-n", "50_000_000", "--eval-every", "0", "--ui", "plain", "--seed", "3"]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the program in a group of its own, in this folder, and wait until it has learned something."""
    processes: list[subprocess.Popen[str]] = []

    def start(*words: str, ready: tuple[str, ...] = ("metrics.jsonl",)) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *LONG, *words],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        processes.append(process)
        folder = tmp_path / "runs" / "latest"
        until = time.monotonic() + 60
        while not any((folder / name).exists() for name in ready):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def result(folder: Path) -> Any:
    return json.loads((folder / "runs" / "latest" / "result.json").read_text())


@pytest.mark.parametrize(
    ("number", "status", "place"), [(signal.SIGINT, 130, "processes"), (signal.SIGTERM, 143, "inline")]
)
def test_a_signal_to_the_group_saves_and_the_run_goes_on(
    number: int, status: int, place: str, started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started("--place", place)
    roles = psutil.Process(process.pid).children(recursive=True)
    assert bool(roles) == (place == "processes")
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert errors == ""
    assert "saved" in output
    assert "headrace resume latest" in output
    assert not [role for role in roles if role.is_running() and role.status() != psutil.STATUS_ZOMBIE]
    before = result(tmp_path)
    assert before["status"] == "interrupted"
    assert before["env_steps"] > 0
    assert before["error"] is None

    monkeypatch.chdir(tmp_path)
    steps = before["env_steps"] + 2_000
    assert main(["resume", "latest", "-n", str(steps), "--ui", "off"]) == 0
    after = result(tmp_path)
    assert after["status"] == "finished"
    assert after["env_steps"] >= steps
    assert after["updates"] > before["updates"]
    assert after["wall_seconds"] > before["wall_seconds"]
    config = json.loads((tmp_path / "runs" / "latest" / "config.json").read_text())
    assert config["horizon"] == 50_000_000
    assert config["origins"]["seed"] == "flag"
    assert config["origins"]["learning_rate"] == "preset ppo/CartPole-v1"


def test_ctrl_c_twice_quits_at_once(started: Any, tmp_path: Path) -> None:
    process = started("--plan.num-steps", "4096", "--update-epochs", "1000", ready=("header.json",))
    time.sleep(3)  # it is in its first update, which takes minutes
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert time.monotonic() - began < 15  # threefold of what drawing the plot may take
    assert process.returncode == 130
    assert result(tmp_path)["status"] == "interrupted"


def test_there_is_nothing_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["resume"]) == 2
    assert "there is no run in runs/ yet" in capsys.readouterr().err
