"""What the README and the docs show is run here, as it is shown."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace import Inline, Processes, Threads

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.name[:2]: path for path in sorted((ROOT / "examples").glob("*.py"))}
TOY, PPO, METHOD, ENVIRONMENT, NETWORK, PLAN = (EXAMPLES[number] for number in ("01", "02", "03", "04", "05", "06"))
PLACES = ("inline", "threads", "processes")

# Pages with programs; docs/your-own-method.md shows pieces of an example instead.
PAGES = (
    "tour.md",
    "tour-learning.md",
    "sync-batches.md",
    "async-batches.md",
    "sync-replay.md",
    "sync-gradients.md",
    "async-gradients.md",
    "environments.md",
    "normalization.md",
    "check-env.md",
    "methods/a2c.md",
    "methods/appo.md",
    "methods/dqn.md",
    "methods/impala.md",
    "methods/ppo.md",
    "methods/sac.md",
    "methods/td3.md",
    "training.md",
    "using-a-policy.md",
    "run-folder.md",
    "checkpoints.md",
)
CONTINUED = ("tour.md", "using-a-policy.md")
"""Pages on which what follows the first program is pieces of programs that are not shown."""


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def after(word: str, output: str) -> str:
    """The word that follows this one: the toy prints its policy so, example 2 the hash of its weights."""
    (found,) = re.findall(rf"^{word} (\S+)", output, re.MULTILINE)
    return str(found)


def numbers(word: str, output: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{word} +(-?[\d.]+)", output)]


@pytest.mark.parametrize("actors", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_toy_prints_the_same_policy_on_every_placement(actors: int, capsys: pytest.CaptureFixture[str]) -> None:
    toy = runpy.run_path(str(TOY))
    found = {}
    for place in PLACES:
        toy["main"](place, actors)
        found[place] = float(after("policy", capsys.readouterr().out))
    assert len(set(found.values())) == 1, found
    assert abs(found["inline"] - 2.5) <= 0.1


@pytest.mark.parametrize(("actors", "max_lag"), [(1, 0), (2, 1)])
def test_ppo_prints_the_same_hash_on_every_placement(
    actors: int, max_lag: int, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(PPO))
    found = {}
    for place in PLACES:
        example["main"](place, actors, max_lag, env_steps=600, seed=1)
        found[place] = after("weights:", capsys.readouterr().out)
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
def test_the_method_of_ones_own_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """Playing at random brings 22."""
    runpy.run_path(str(METHOD))["main"](Threads, env_steps=20_000)
    assert max(numbers("20 episodes", capsys.readouterr().out)) >= 100


@pytest.mark.slow
def test_the_environment_of_ones_own_is_solved(capsys: pytest.CaptureFixture[str]) -> None:
    """The motor on or off at random brings -0.4; the best that can be had is about 0.65."""
    runpy.run_path(str(ENVIRONMENT))["main"](Processes, env_steps=20_000)
    assert numbers("greedy:", capsys.readouterr().out)[0] >= 0.5


@pytest.mark.slow
def test_the_network_of_ones_own_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """Playing at random brings 22."""
    runpy.run_path(str(NETWORK))["main"](Inline, env_steps=10_500)
    assert max(numbers("mean return", capsys.readouterr().out)) >= 60


@pytest.mark.slow
def test_the_plan_of_ones_own_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """Playing at random brings 22."""
    runpy.run_path(str(PLAN))["main"](Processes, env_steps=10_500)
    assert max(numbers("mean return", capsys.readouterr().out)) >= 60


def test_the_first_program_of_the_readme_runs_as_a_script(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(blocks("README.md", "python")[0])
    run(sys.executable, str(script))


@pytest.mark.slow
def test_the_toy_of_the_readme_runs(tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    script.write_text(blocks("README.md", "python")[1])
    runpy.run_path(str(script))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where runs go
    found = blocks(f"docs/{page}", "python")
    programs = found[:1] if page in CONTINUED else found
    assert programs
    for number, program in enumerate(programs):
        script = tmp_path / f"{number}.py"
        script.write_text(program)
        runpy.run_path(str(script))


def test_what_is_said_of_the_method_of_ones_own_is_in_the_example() -> None:
    source = METHOD.read_text()
    for piece in blocks("docs/your-own-method.md", "python"):
        for function in piece.strip().split("\n\n\n"):
            assert function in source or textwrap.indent(function, "    ") in source, function


@pytest.mark.parametrize("path", EXAMPLES.values(), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    """At most 60 lines, blank ones and the docstring at the top not counted."""
    code = re.sub(r'\A""".*?"""\n', "", path.read_text(), flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 60


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
