"""Every command that the README and the docs show is run here, in the order in which they are read.

The folder is a clone of the repository by links, whose runs stay its own. A line that is of no known form fails.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.cli import COMMANDS, main
from headrace.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(rf"(\.venv/bin/)?(headrace ({'|'.join(COMMANDS)})|make [a-z]|pip install|python )")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+\.md)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """The README, and every page in the order of the index."""
    index = ROOT / "docs" / "README.md"
    return [ROOT / "README.md", index, *((index.parent / link).resolve() for link in LINK.findall(index.read_text()))]


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the text of each block of a page."""
    for found in BLOCK.finditer(page.read_text()):
        yield found[1], found[2]


def commands(text: str) -> list[list[str]]:
    """The words of each line, without comments."""
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with links to all that a clone has, in which this test stands."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for entry in ROOT.iterdir():
        if entry.name != "runs":
            (folder / entry.name).symlink_to(entry)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the program adds where it stands
    return folder


def execute(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command as far as it can be run here: what CI or this module runs elsewhere has only to be there."""
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        case ["pip", "install", package]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            name, _, wanted = package.removesuffix("]").partition("[")
            assert name == "headrace", words
            assert set(filter(None, wanted.split(","))) <= set(extras), words
        case ["headrace" | ".venv/bin/headrace", *rest]:
            assert main(rest) == 0, words
        case ["python" | ".venv/bin/python", "-m", module, *_]:
            assert find_spec(module), words
        case ["python" | ".venv/bin/python", script, *rest]:
            monkeypatch.setattr(sys, "argv", [script, *rest])
            runpy.run_path(script, run_name="__main__")
        case _:
            pytest.fail(f"a command of no known form: {shlex.join(words)}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_that_is_shown_runs(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make` targets and `python -m benchmarks` have only to be there, extras only to be declared."""
    ran = 0
    for page in pages():
        for language, text in blocks(page):
            if language == "yaml":  # begins with the name under which the commands below it find it
                Path(text.partition("\n")[0].removeprefix("# ")).write_text(text)
            if language == "sh":
                for words in commands(text):
                    print(f"{page.relative_to(ROOT)}: {shlex.join(words)}", flush=True)
                    execute(words, monkeypatch)
                    ran += 1
    assert ran > 40


@pytest.mark.slow
def test_make_train_solves_cartpole_and_says_what_to_do_next(clone: Path) -> None:
    done = subprocess.run(
        ["make", "--assume-old", ".venv/installed", "train"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    (score,) = re.findall(r"^solved: greedy mean of 20 episodes ([\d.]+)", done.stdout, re.MULTILINE)
    assert float(score) >= 490, done.stdout
    (steps,) = re.findall(r"^next +(.+)", done.stdout, re.MULTILINE)
    for command in steps.split("   |   "):
        assert commands(command)[0][:1] == ["headrace"], command
        assert commands(command)[0][1] in COMMANDS, command
    assert (clone / "runs" / "latest" / "plots" / "return.png").stat().st_size


MISTAKES = {
    "train ppo CartPol-v1": "Environment … doesn't exist. … Nearest: CartPole-v1, …",
    "train ppo my_env:Maze": "module 'my_env' could not be imported",
    "train ppo CartPole-v1 --learing-rate 1": "--learing-rate: unknown. Nearest: --learning-rate.",
    "train ppo CartPole-v1 --plan.gamma 1": "--plan.gamma: SyncBatches has no gamma. Nearest: --gamma.",
    "train ppo CartPole-v1 --num-minibatches 5": "num_envs 16 × num_steps 64: 1024 samples cannot be cut into 5 equal "
    "minibatches. Nearest: num_minibatches 4 or 8.",
    "train ppo CartPole-v1 --plan.actors 3": "num_envs 16 cannot be divided evenly among 3 actors. Nearest: num_envs "
    "15 or 18.",
    "train ppo CartPole-v1 --batch-size 64": "batch_size is the minibatch in Stable-Baselines3, the whole rollout in "
    "CleanRL",
    "train ppo CartPole-v1 --ui off --run runs/one": "runs/one is not empty: a run overwrites nothing.",
    "eval lates": "no run 'lates', neither as a path nor in runs/.",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", MISTAKES)
def test_troubleshooting_quotes_what_is_said(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "runs" / "one" / "something").mkdir(parents=True)
    quote = MISTAKES[command]
    assert f"| `{quote}` |" in (ROOT / "docs" / "troubleshooting.md").read_text()
    assert main(shlex.split(command)) == 2
    said = capsys.readouterr().err
    assert re.search(".*".join(map(re.escape, quote.split("…"))), said), said


def test_the_index_has_every_page() -> None:
    found = {page.resolve() for page in (ROOT / "docs").rglob("*.md") if not page.name[:4].isdigit()}
    assert set(pages()) == {ROOT / "README.md", *found}


def test_no_command_stands_where_it_is_not_run() -> None:
    """In a block of no language, and in text, where only the verb of the program can be wrong."""
    for page in pages():
        for language, text in blocks(page):
            if not language and page.name != "benchmarks.md":  # whose commands `make bench` runs
                shown = list(filter(COMMAND.match, text.splitlines()))
                assert not shown, f"{page.relative_to(ROOT)}: {shown}"
        for verb in re.findall(r"`headrace (?!-)([\w-]+)", page.read_text()):
            assert verb in COMMANDS, f"{page.relative_to(ROOT)}: headrace {verb}"


def test_the_files_of_the_tours_are_there() -> None:
    for page in ("tour.md", "tour-learning.md", "tour-of-the-code.md"):
        for name in re.findall(r"`([\w/.]+\.py)`", (ROOT / "docs" / page).read_text()):
            assert (ROOT / name).exists() or (ROOT / "src" / "headrace" / name).exists(), f"{page}: {name}"


def test_the_page_names_every_preset() -> None:
    named = re.findall(r"^\| `(\w+/[\w.-]+)` \|", (ROOT / "docs" / "training.md").read_text(), re.MULTILINE)
    assert named == [preset.name for preset in PRESETS]
