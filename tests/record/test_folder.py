"""The run folder: how it is named, found and read, and what the machine under a run is said to be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import Box, ConfigError, Discrete, Spec
from headrace.record.folder import RunFolder
from headrace.record.machine import Usage, cores, describe_machine

SPEC = Spec(Box(-np.ones(4), np.ones(4)), Discrete(2))


def begun(folder: RunFolder) -> RunFolder:
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write({"method": "ppo", "place": "inline", "device": "cpu"}, SPEC, ["headrace", "train", "two words"])
    return folder


def test_a_new_folder_is_named_after_its_run_and_latest_leads_to_it(tmp_path: Path) -> None:
    folder = RunFolder.new(tmp_path / "runs", "ALE/Pong-v5", "ppo", "sync-batches", 3)
    assert re.fullmatch(r"ALE-Pong-v5__ppo__sync-batches__s3__\d{8}-\d{6}", folder.name)
    assert (tmp_path / "runs" / "latest").resolve() == folder.path
    again = [RunFolder.new(tmp_path / "runs", "ALE/Pong-v5", "ppo", "sync-batches", 3) for _ in range(3)]
    assert len({folder.path, *(other.path for other in again)}) == 4  # all in one second, or two
    assert (tmp_path / "runs" / "latest").resolve() == again[-1].path
    strange = RunFolder.new(tmp_path / "runs", "../my.module:Class", "a b", "p", 1)
    assert strange.path.parent == tmp_path / "runs"
    assert strange.name.startswith("my.module-Class__a-b__p__s1__")


def test_what_is_known_at_the_beginning_is_written_and_read(tmp_path: Path) -> None:
    folder = begun(RunFolder(tmp_path / "run"))
    assert folder.config()["method"] == "ppo"
    assert folder.spec() == SPEC
    assert folder.command_path.read_text() == "headrace train 'two words'\n"
    machine = json.loads(folder.machine_path.read_text())
    assert machine == {"cores": 3, "place": "inline", "device": "cpu"}
    assert (folder.metrics(), folder.timeline(), folder.result()) == ([], [], None)


def test_a_run_overwrites_nothing(tmp_path: Path) -> None:
    folder = RunFolder.at(tmp_path / "a" / "run")
    assert RunFolder.at(folder.path).path == folder.path  # nothing is in it yet
    begun(folder)
    with pytest.raises(ConfigError, match=rf"{folder.path} is not empty.*headrace resume {folder.path}"):
        RunFolder.at(folder.path)
    with pytest.raises(ConfigError, match=r"cannot be made: .*File exists.*--run"):
        RunFolder.at(folder.config_path)
    with pytest.raises(ConfigError, match=r"cannot be made.*--run"):
        RunFolder.at(folder.config_path / "below")
    with pytest.raises(ConfigError, match=r"cannot be made.*--run"):
        RunFolder.new(folder.config_path, "e", "m", "p", 1)
    with pytest.raises(ConfigError, match=r"config\.json cannot be written"):
        RunFolder(tmp_path / "nowhere").write({}, SPEC, [])


def test_a_run_is_found_by_latest_by_path_and_by_name(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with pytest.raises(ConfigError, match=r"no run in .* yet. Begin one: headrace train"):
        RunFolder.find("latest", root)
    first, second = (begun(RunFolder.new(root, env, "ppo", "sync", 1)) for env in ("CartPole-v1", "Acrobot-v1"))
    assert RunFolder.find("latest", root).path == second.path.resolve()
    assert RunFolder.find(first.name, root).path == first.path
    assert RunFolder.find(first.path, root).path == first.path
    with pytest.raises(ConfigError, match=f"no run 'CartPol'.*Nearest: {first.name}, {second.name}"):
        RunFolder.find("CartPol", root)
    with pytest.raises(ConfigError, match=r"is no run folder: it has no config\.json"):
        RunFolder.find(root, root)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for read, path in ((folder.config, folder.config_path), (folder.spec, folder.spec_path)):
        with pytest.raises(ConfigError, match=f"{path} is missing"):
            read()
    folder.result_path.write_text('{"status": "fini')
    with pytest.raises(ConfigError, match=f"{folder.result_path} cannot be read"):
        folder.result()
    folder.header_path.write_text("{}")
    with pytest.raises(ConfigError, match="another version of Headrace"):
        folder.header()
    folder.metrics_path.write_text('{"global_step": 1}\nnonsense\n{"global_step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2, is damaged"):
        folder.metrics()
    folder.metrics_path.write_text('{"global_step": 1}\n{"global_step": 2, "upda')  # while it is being written
    assert folder.metrics() == [{"global_step": 1}]
    folder.timeline_path.write_text('{"seconds": 1}\n')
    with pytest.raises(ConfigError, match="another version of Headrace"):
        folder.timeline()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "6400000 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_cores_are_those_of_the_container(tmp_path: Path, files: dict[str, str], quota: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    allowed = len(os.sched_getaffinity(0))
    assert cores(tmp_path) == (allowed if quota is None else min(allowed, quota))


def test_usage_is_of_the_processes_that_are_asked_for() -> None:
    usage = Usage()
    began, busy = time.monotonic(), time.process_time()
    while time.process_time() - busy < 0.06:
        pass
    found = usage.look([os.getpid(), 2**22 + 1])  # the other one has ended
    assert 0.05 / (time.monotonic() - began) - 0.25 < found.cpu < 1.5
    assert found.rss_mb > 10
    assert usage.look([2**22 + 1]).cpu == 0.0


@pytest.mark.slow
def test_the_machine_tells_the_commit_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    told = describe_machine()
    assert told["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert told["memory_mb"] > 100
    page = Path(__file__).parents[2] / "docs" / "run-folder.md"
    assert [key for key in told if f"`{key}`" not in page.read_text()] == []
    assert json.loads(json.dumps(told)) == told
    assert describe_machine()["git_commit"] is None

    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "-m", "m")
    assert describe_machine()["git_commit"] == git("rev-parse", "HEAD")
    monkeypatch.setenv("PATH", "")
    assert describe_machine()["git_commit"] is None
