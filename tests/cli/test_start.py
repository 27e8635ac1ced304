"""How the program starts: help, lists and what is mistyped, without torch; exit statuses."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace.cli
from headrace import PPO, ConfigError, RoleFailed, SyncBatches
from headrace.catalog import METHODS, PLACES, PLANS
from headrace.cli import COMMANDS, EXAMPLES, main
from headrace.commands.options import Options
from headrace.envs.names import names
from headrace.settings import fields

SOURCE = Path(headrace.cli.__file__).parent

WITHOUT_TORCH = """
import sys, time
began = time.perf_counter()
from headrace.cli import main
status = main({words!r})
seconds = time.perf_counter() - began
heavy = {{"torch", "numpy", "gymnasium", "rich"}} & set(sys.modules)
print("\\nSTATUS", status, sorted(heavy), seconds)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ([], 0),
        (["--help"], 0),
        (["--version"], 0),
        (["list"], 0),
        (["list", "plans"], 0),
        (["trian"], 2),
        (["train", "--help"], 0),
        (["list", "everything"], 2),
    ],
)
def test_the_program_answers_at_once_and_without_torch(words: list[str], status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(words=words)], capture_output=True, text=True, timeout=60
    )
    _, _, told = done.stdout.rpartition("\nSTATUS ")
    found, heavy, seconds = told.split()
    assert (int(found), heavy) == (status, "[]"), done.stderr
    assert float(seconds) < 3 * 0.5


@pytest.mark.slow
def test_the_whole_program_with_its_interpreter_takes_less_than_half_a_second() -> None:
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "headrace", "list"], capture_output=True, check=True, timeout=60)
        taken.append(time.perf_counter() - began)
    assert min(taken) < 3 * 0.5


@pytest.mark.slow
def test_ids_are_listed_without_torch_and_those_of_installed_packages_are_there() -> None:
    code = "import sys; from headrace.cli import main; main(['list', 'envs']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    *ids, has_torch = done.stdout.splitlines()
    assert has_torch == "False"
    assert {"CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5", "MiniGrid-Empty-5x5-v0"} <= set(ids)


def test_without_a_word_the_program_shows_five_examples_each_of_a_command_that_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed == EXAMPLES
    lines = printed.splitlines()
    assert len(lines) == 5
    assert all(line.split()[0] == "headrace" and line.split()[1] in COMMANDS for line in lines)


def test_help_names_every_command_and_every_command_has_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for verb, (module, _, does) in COMMANDS.items():
        assert f"headrace {verb}" in printed
        assert does in printed
        assert (SOURCE / "commands" / f"{module}.py").exists()
    assert max(map(len, printed.splitlines())) <= 110


def test_the_list_names_all_methods_plans_and_placements(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in (*METHODS, *PLANS, *PLACES):
        assert f"  {name} " in printed
    assert main(["list", "places"]) == 0
    assert "processes" in capsys.readouterr().out


def test_ids_by_a_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "envs", "CartPole*"]) == 0
    assert capsys.readouterr().out == "CartPole-v1\n"
    assert main(["list", "envs", "CartPol-v1"]) == 2
    assert "Nearest: CartPole-v1" in capsys.readouterr().err
    assert not any(id.startswith(("phys2d/", "GymV")) for id in names())


def test_the_help_of_a_method_has_every_setting_its_default_its_meaning_and_the_preset_s_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "ppo", "CartPole-v1", "--help"]) == 0
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    for prefix, cls in (("", PPO), ("plan.", SyncBatches), ("", Options)):
        for setting in fields(cls).values():
            assert f"\n  --{prefix}{setting.name.replace('_', '-')} = " in printed
            assert setting.help in words
    assert "--learning-rate = 0.0003 preset: 0.001 " in words
    assert "--clip-range = 0.2 How far" in words
    assert "preset ppo/CartPole-v1" in printed
    order = [
        printed.index(f"\n{title}")
        for title in ("method ppo", "plan sync-batches", "place inline", "env CartPole-v1", "run\n")
    ]
    assert order == sorted(order)


def test_the_help_of_a_method_alone_has_no_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "a2c", "-h"]) == 0
    printed = capsys.readouterr().out
    assert "--rmsprop-alpha = 0.99" in printed
    assert "preset" not in printed.replace("overrides a preset", "")
    assert main(["train", "a2d", "--help"]) == 2
    assert "Nearest: a2c" in capsys.readouterr().err
    assert main(["train", "a3c", "CartPole-v1"]) == 2
    assert "it is a2c --plan async-gradients" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program adds the folder that it is called in to the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def raising(error: BaseException) -> Callable[[list[str]], int]:
    def command(argv: list[str]) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("bad."), 2, "headrace: bad.\n"),
        (
            RoleFailed("broke", role="collect", rank=0, traceback="Its own lines"),
            1,
            "headrace: broke\n\nIts own lines\n",
        ),
        (KeyboardInterrupt(), 130, "headrace: interrupted\n"),
    ],
)
def test_what_ends_a_command_gives_its_status_and_message(
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("headrace.commands.listing.main", raising(error))
    assert main(["list"]) == status
    assert capsys.readouterr().err == said


def test_a_traceback_of_a_mistake_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "nothing", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_the_program_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "list", "envs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0
    process.stderr.close()
