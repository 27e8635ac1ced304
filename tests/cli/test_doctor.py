"""`headrace doctor` and `headrace check-env`: what a machine and an environment are like."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from headrace import ConfigError
from headrace.commands import check_env, doctor


def test_doctor_tells_what_there_is_and_the_line_for_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extras = {"there": ["numpy", "torch"], "half": ["numpy", "no-such-package"], "gone": ["nor-this-one"]}
    monkeypatch.setattr(doctor, "_extras", lambda: extras)
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    lines = {line.split()[0]: line for line in told.splitlines() if line}
    assert platform.python_version() in lines["python"]
    assert torch.__version__ in lines["torch"]
    assert f"of {os.cpu_count()}" in lines["cores"]
    assert 1 <= int(lines["cores"].split()[1]) <= len(os.sched_getaffinity(0))
    assert lines["there"].split(maxsplit=1)[1] == f"numpy {version('numpy')}, torch {version('torch')}"
    assert lines["half"].split(maxsplit=1)[1] == f"numpy {version('numpy')}, no-such-package missing"
    assert told.endswith('\nFor what is missing: pip install "headrace[half,gone]"\n')


def test_doctor_knows_the_extras_of_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    extras = doctor._extras()
    assert extras["minigrid"] == ["minigrid"]
    assert "mujoco" in extras["mujoco"]
    assert "dev" not in extras
    assert "headrace" not in [package for packages in extras.values() for package in packages]


def test_doctor_makes_an_environment_and_times_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["CartPole-v1", "--env.sutton-barto-reward", "true"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("Gymnasium('CartPole-v1', sutton_barto_reward=True) works: a step of 8 environments takes ")
    assert all(float(part.split()[-1].replace(",", "")) > 0 for part in told.split(" µs")[:2])
    with pytest.raises(ConfigError, match="CartPole-v1"):
        doctor.main(["CartPol-v1"])
    with pytest.raises(ConfigError, match=r"--env.gravity came without a value"):
        doctor.main(["CartPole-v1", "--env.gravity"])


FAULTY = """
import gymnasium
import numpy as np

class Maze(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reward=1.0):
        self.reward = reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(2, dtype=np.float32), {}

    def step(self, action):
        return self.np_random.random(2, dtype=np.float32), self.reward, self.np_random.random() < 0.1, False, {}
"""


def test_check_env_ends_with_1_where_it_finds_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module_of_a_maze.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    assert check_env.main(["module_of_a_maze:Maze", "--steps", "30"]) == 0
    assert "Gymnasium('module_of_a_maze:Maze'): nothing found in " in capsys.readouterr().out
    assert check_env.main(["module_of_a_maze:Maze", "--steps=30", "--env.reward=big"]) == 1
    told = capsys.readouterr().out
    assert "Gymnasium('module_of_a_maze:Maze', reward='big'): 1 finding" in told
    assert "1. reward: expected a number" in told


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["CartPol-v1"], "CartPole-v1"),
        (["CartPole-v1", "--step", "5"], "--step is an argument too many; nearest: --steps"),
        (["CartPole-v1", "--steps", "none"], "'none' is no whole number"),
        ([], "required: ENV"),
    ],
)
def test_check_env_refuses_bad_input(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_env.main(argv)
    assert says in str(caught.value)
