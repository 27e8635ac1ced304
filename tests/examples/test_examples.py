"""What the README and the docs show is run here, as it is shown."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "examples" / "01_take_put.py"


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def policy(output: str) -> float:
    return float(output.split()[1])


@pytest.mark.parametrize("actors", [1, 3])
def test_the_toy_prints_the_same_policy_on_every_placement(actors: int, capsys: pytest.CaptureFixture[str]) -> None:
    toy = runpy.run_path(str(TOY))
    found = {}
    for place in ("inline", "threads", "processes"):
        toy["main"](place, actors)
        found[place] = policy(capsys.readouterr().out)
    assert len(set(found.values())) == 1, found
    assert abs(found["inline"] - 2.5) <= 0.1


@pytest.mark.slow
def test_the_readme_shows_commands_that_run() -> None:
    """Its make targets exist (CI calls them); its other commands are run here, by this interpreter."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    policies = []
    for line in "".join(blocks("README.md", "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "make":
            assert words[1] in targets
        else:
            assert words[0] == ".venv/bin/python", line
            policies.append(policy(run(sys.executable, *words[1:])))
    assert len(policies) == 3


@pytest.mark.slow
def test_make_train_runs_from_the_checkout() -> None:
    assert "round trips/s" in run("make", "train")


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_the_first_program_of_a_page_runs(page: str, tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(blocks(page, "python")[0])
    run(sys.executable, str(script))


def test_the_toy_is_short() -> None:
    """Two functions; the whole file fits on a screen and a half."""
    assert len(TOY.read_text().splitlines()) <= 75
