"""`headrace train` as a whole: what it prints, keeps and returns."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest

from headrace.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def result(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "result.json").read_text())
    return found


def test_a_run_announces_its_settings_keeps_their_origins_and_is_repeated_from_its_own_config(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--place", "threads", "--plan.actors", "2", "--gamma", "0.9", "-n", "1_000"]
    assert main(["train", "ppo", "CartPole-v1", *words, "--seed", "3", "--run", "first", "--ui", "plain"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "settings  defaults < preset ppo/CartPole-v1 < flags place, gamma, plan.actors, total_timesteps, seed\n"
    )
    config = json.loads((here / "first" / "config.json").read_text())
    assert {key: config[key] for key in ("gamma", "gae_lambda", "plan.actors", "place", "seed")} == {
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "plan.actors": 2,
        "place": "threads",
        "seed": 3,
    }
    origins = config["origins"]
    assert (origins["gamma"], origins["gae_lambda"], origins["clip_range"]) == (
        "flag",
        "preset ppo/CartPole-v1",
        "default",
    )
    assert "--plan.actors 2" in (here / "first" / "command.txt").read_text()

    assert main(["train", "--config", "first/config.json", "--place", "inline", "--run", "second", "--ui", "off"]) == 0
    assert capsys.readouterr().out == ""
    assert result(here / "second")["weights_sha256"] == result(here / "first")["weights_sha256"]
    second = json.loads((here / "second" / "config.json").read_text())
    assert (second["origins"]["gamma"], second["origins"]["place"]) == ("config first/config.json", "flag")


def test_several_seeds_are_as_many_runs_and_a_line_that_sums_them_up(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-n", "500", "--seed", "5", "--seeds", "2", "--run", "many", "--eval-every", "0", "--ui", "plain"]
    assert main(["train", "a2c", "CartPole-v1", *words]) == 0
    returns = [result(here / "many" / f"s{seed}")["final_return"] for seed in (5, 6)]
    assert sorted(path.name for path in (here / "many").iterdir()) == ["s5", "s6"]
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.match(r"2 seeds: final return (\S+) ± \S+, .* of (\S+), (\S+)$", last)
    assert found is not None
    assert [float(one) for one in found.groups()] == pytest.approx([fmean(returns), *returns], abs=0.051)  # type: ignore[type-var]
