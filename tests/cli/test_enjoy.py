"""`headrace enjoy`: a run's policy, seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace import PPO, Checkpoints, ConfigError, Env, Gymnasium, Inline, Learner, Method, SyncBatches, environment
from headrace.commands import enjoy
from headrace.commands.eval import environment_of
from headrace.configuration import configuration
from headrace.spec_json import spec_to_json

METHOD = PPO(hidden=(8,))


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """run_of(env, method): a run's folder as training writes it; we are in another folder, without a screen."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")

    def make(env: Env, method: Method = METHOD, change: Callable[[Any], None] = lambda net: None) -> Path:
        folder = tmp_path / "one"
        folder.mkdir()
        told = configuration(method, env, SyncBatches(), Inline(), {}, total_timesteps=1000, seed=4)
        (folder / "config.json").write_text(json.dumps(told))
        (folder / "spec.json").write_text(json.dumps(spec_to_json(env.spec)))
        learner = Learner(method, env.spec, seed=4)
        change(learner.net)
        Checkpoints(folder / "checkpoints").save(128, {"learner": learner.state()})
        return folder

    return make


def frames_of(path: str | Path) -> tuple[tuple[int, int], list[float], list[np.ndarray]]:
    """Size, milliseconds and pixels of every frame of a file."""
    with Image.open(path) as image:
        shown, durations = [], []
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            shown.append(np.asarray(image.convert("RGB")))
            durations.append(float(image.info["duration"]))
        return image.size, durations, shown


@pytest.mark.slow
def test_without_a_screen_it_is_a_file_here(run_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(Gymnasium("CartPole-v1", max_episode_steps=12))
    before = sorted(folder.rglob("*"))
    assert enjoy.main([str(folder), "--episodes", "2"]) == 0
    *told, path = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["episode 1", "episode 2"]
    steps = [int(line.split(" in ")[1].split()[0]) for line in told]
    assert [float(line.split("return ")[1].split()[0]) for line in told] == steps  # 1 for every step
    assert path == "one.gif"
    size, durations, shown = frames_of(path)
    assert size == (600, 400)
    assert sum(durations) == 20 * sum(count + 1 for count in steps)  # 50 a second; the first observation too
    assert len({picture.tobytes() for picture in shown}) > 5
    assert sorted(folder.rglob("*")) == before
    enjoy.main([str(folder), "--episodes", "2", "--video", "again.gif"])
    assert capsys.readouterr().out.splitlines() == [*told, "again.gif"]
    assert Path("again.gif").read_bytes() == Path("one.gif").read_bytes()


@pytest.mark.slow
def test_fast_steps_keep_their_pace_and_long_episodes_are_cut_off(
    run_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of(Gymnasium("Pendulum-v1"))
    assert enjoy.main([str(folder), "--max-steps", "11", "--fps", "100", "--video", "fast.gif"]) == 0
    assert "in 11 steps, cut off there" in capsys.readouterr().out
    _, durations, _ = frames_of("fast.gif")
    assert sum(durations) == 6 * 20  # every second one of twelve pictures


@pytest.mark.slow
def test_every_episode_begins_without_a_memory(run_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    def decisive(net: Any) -> None:
        with torch.no_grad():
            for parameter in (*net.policy.parameters(), *net.gru.parameters()):
                parameter.mul_(10)

    folder = run_of(Gymnasium("CartPole-v1"), PPO(memory="gru", hidden=(8,)), decisive)
    told = []
    for arguments in (["--seed", "4", "--episodes", "4"], ["--seed", "5"], ["--seed", "6"], ["--seed", "7"]):
        assert enjoy.main([str(folder), *arguments]) == 0
        told += [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert told[1:4] == told[4:]
    assert len(set(told)) > 2


@pytest.mark.slow
def test_an_environment_that_draws_nothing_shows_what_it_is_seen_as(
    run_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ale_py")
    folder = run_of(environment("ALE/Pong-v5", screen_size=84))
    assert enjoy.main([str(folder), "--max-steps", "40"]) == 0
    size, _, shown = frames_of("one.gif")
    assert size == (168, 168)
    assert len({picture.tobytes() for picture in shown}) > 2
    assert (shown[-1][..., 0] == shown[-1][..., 2]).all()  # grey


@pytest.mark.slow
def test_with_a_screen_it_is_a_window(
    run_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def watched(config: Any, **others: Any) -> Env:
        made.append(others.get("render_mode"))
        return environment_of(config, **others)

    monkeypatch.setattr(enjoy, "environment_of", watched)
    monkeypatch.setenv("DISPLAY", ":7")  # the dummy driver of SDL opens no window there
    folder = run_of(Gymnasium("CartPole-v1", max_episode_steps=12))
    assert enjoy.main([str(folder)]) == 0
    assert made[-1] == "human"
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["episode 1"]
    assert list(Path().iterdir()) == []
    assert enjoy.main([str(folder), "--video", "film.gif"]) == 0
    assert made[-1] == "rgb_array"


NOTHING_TO_SEE = """
import gymnasium
import numpy as np

class Dark(gymnasium.Env):
    metadata = {"render_modes": ["ansi"]}
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, True, False, {}
"""


def test_what_cannot_be_shown_is_refused_before_it_plays(
    run_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module_of_the_dark.py").write_text(NOTHING_TO_SEE)
    monkeypatch.syspath_prepend(tmp_path)
    folder = run_of(Gymnasium("module_of_the_dark:Dark"))
    with pytest.raises(ConfigError, match=r"has no picture: its render modes are \['ansi'\]"):
        enjoy.main([str(folder)])
    with pytest.raises(ConfigError, match=r"out.mp4: give a file that ends in .gif, .png, .webp"):
        enjoy.main([str(folder), "--video", "out.mp4"])
    assert capsys.readouterr().out == ""
    assert list(Path().iterdir()) == []
