"""What cannot be used: one message that says it all, status 2, before a process is started or a folder is made."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from headrace.cli import main
from headrace.commands.planned import plan_of

BROKEN = '''
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Broken(gymnasium.Env):
    """Raises in its thirtieth step, or shows what contradicts its space."""

    observation_space = Box(-1, 1, (3,), np.float32)
    action_space = Discrete(2)

    def __init__(self, shape=(3,)):
        self.shape = shape

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(self.shape, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 30:
            raise ZeroDivisionError("the wheel came off")
        return np.zeros(self.shape, np.float32), 1.0, False, False, {}
'''

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refused]:
    """A function that gives a command line to the program, and returns what it says on standard error.

    The program has to leave with 2 within 2 s, and to start no process and make no file until then.
    """

    def forbidden(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a process was started")

    def refuse(*words: str) -> str:
        before, began = sorted(tmp_path.rglob("*")), time.perf_counter()
        assert main(["train", *words]) == 2
        assert time.perf_counter() - began < 2
        assert sorted(tmp_path.rglob("*")) == before
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the program adds the folder that it is called in
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    return refuse


def test_US_01_every_problem_is_named_with_key_value_range_and_nearest_name_at_once(refused: Refused) -> None:
    said = refused(
        *("ppo", "CartPole-v1", "--learnig-rate", "1e-3", "--gamma", "99", "--gae-lambda", "-0.1", "--epsilon", "-1"),
        *("--plan.actors", "-2", "--plan.gamma", "0.9", "--seed", "1.5"),
    )
    assert said.startswith("headrace: 7 problems:\n")
    for expected in (
        "--learnig-rate: unknown. Nearest: --learning-rate.",
        "gamma=99.0: give a number from 0 to 1.",
        "gae_lambda=-0.1: give a number from 0 to 1.",
        "--epsilon: unknown. Nearest: ",
        "actors=-2: give an integer from 1 on.",
        "--plan.gamma: SyncBatches has no gamma. Nearest: --gamma.",
        "--seed '1.5': expected an integer.",
    ):
        assert f"  - {expected}" in said


def test_US_01_the_same_in_a_file(refused: Refused, tmp_path: Path) -> None:
    content = {
        "learnig_rate": 1e-3,
        "gamma": 2.0,
        "learning_rate": "1e-4",
        "epsilon": -1,
        "method": {"num_envs": 8},
        "plan": {"actors": -1, "gae_lambda": 0.9},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(content))
    said = refused("ppo", "CartPole-v1", "--config", "my.yaml")
    assert said.startswith("headrace: 6 problems:\n")
    for expected in (
        "learnig_rate in my.yaml: unknown. Nearest: learning_rate.",
        "gamma=2.0: give a number from 0 to 1.",
        "epsilon in my.yaml: unknown. Nearest: ",
        "method.num_envs in my.yaml: PPO has no num_envs. Nearest: plan.num_envs.",
        "plan.gae_lambda in my.yaml: SyncBatches has no gae_lambda. Nearest: gae_lambda.",
        "actors=-1: give an integer from 1 on.",
    ):
        assert f"  - {expected}" in said
    (tmp_path / "my.yaml").write_text("learning_rate: '1e-4'\n")
    assert plan_of(["ppo", "CartPole-v1", "--config", "my.yaml"]).run["method"].learning_rate == 1e-4


@pytest.mark.parametrize("gamma", [99, 2.0, -0.1])
def test_US_01_a_discount_out_of_range(refused: Refused, gamma: float) -> None:
    assert refused("ppo", "CartPole-v1", f"--gamma={gamma}") == (
        f"headrace: gamma={float(gamma)}: give a number from 0 to 1.\n"
    )


def test_US_01_a_batch_that_does_not_divide(refused: Refused) -> None:
    said = refused("ppo", "CartPole-v1", "--num-envs", "6", "--num-steps", "128", "--num-minibatches", "5")
    assert "num_envs 6 × num_steps 128: 768 samples cannot be cut into 5 equal minibatches" in said
    assert "Nearest: num_minibatches 4 or 6." in said
    assert "num_envs 6 cannot be divided evenly among 4 actors" in refused(
        "ppo", "CartPole-v1", "--plan.num-envs", "6", "--plan.actors", "4"
    )


def test_US_11_more_devices_than_there_are(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("headrace.commands.planned.cores", lambda: 2)
    words = ["ppo", "CartPole-v1", "--plan.actors", "64", "--plan.num-envs", "64", "--place", "processes"]
    assert refused(*words, "--device", "cuda:0,cuda:1") == (
        "headrace: --device cuda:0,cuda:1: asks for 2 CUDA devices, and 0 are there. Use cpu.\n"
    )
    assert plan_of(words).lines[1:] == [
        "cores     65 processes are asked for (64 actors and the learner), and 2 cores are available: they take turns"
    ]
    assert "expected cpu, cuda, or cuda: with a number" in refused("ppo", "CartPole-v1", "--device", "tpu")
    assert "asks for 1 CUDA devices" in refused("ppo", "CartPole-v1", "--device", "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert plan_of([*words, "--device", "cuda:0,cuda:1"]).run["devices"] == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ppo", "CartPol-v1"], "Nearest: CartPole-v1"),
        (["ppo", "ALE/Pongg-v5"], "Nearest: Pong"),
        (["ppo", "no_such_module:Maze"], "module 'no_such_module' could not be imported"),
        (["ppoo", "CartPole-v1"], "no method 'ppoo'. Nearest: ppo"),
        (["ppo", "CartPole-v1", "--plan", "sync-batch"], "no plan 'sync-batch'. Nearest: sync-batches"),
        (["ppo", "CartPole-v1", "--place", "process"], "no place 'process'. Nearest: processes."),
        (["ppo", "CartPole-v1", "--place.stall-after", "3"], "Inline has no stall_after. Nearest: --place.poison."),
        (["ppo"], "no env was given. For example: headrace train ppo CartPole-v1."),
        ([], "no method was given"),
        (["ppo", "CartPole-v1", "1e6"], "'1e6': too many words."),
        (["ppo", "CartPole-v1", "--algo", "a2c"], "the method is given twice"),
        (["ppo", "CartPole-v1", "--seed", "1", "--seed", "2"], "--seed: given twice"),
        (
            ["ppo", "CartPole-v1", "--n-steps", "1", "--plan.num-steps", "2"],
            "--plan.num-steps: given twice, before as --n",
        ),
        (["ppo", "CartPole-v1", "--gamma"], "--gamma: expected a value after it."),
        (["ppo", "CartPole-v1", "--plan"], "--plan=None: expected a name."),
        (["ppo", "CartPole-v1", "-g", "1"], "-g: unknown. Flags have two dashes; short ones are -n, -h."),
        (["ppo", "CartPole-v1", "--batch-size", "64"], "batch_size is the minibatch in Stable-Baselines3, the whole"),
        (["ppo", "CartPole-v1", "--clip-vloss", "true"], "clip_vloss is a switch in CleanRL"),
        (["ppo", "CartPole-v1", "--ui", "fancy"], "--ui 'fancy': expected one of live, plain, json, off."),
        (["ppo", "CartPole-v1", "-n", "0"], "total_timesteps=0: give an integer from 1 on."),
        (["ppo", "CartPole-v1", "--config", "absent.yaml"], "config absent.yaml cannot be read"),
        (["ppo", "CartPole-v1", "--env.gravity", "3"], "unexpected keyword argument 'gravity'"),
        (["ppo", "CartPole-v1", "--env.bounds", "raised"], "expected one of ignore, raise, clip"),
        (["ppo", "CartPole-v1", "--env.wrappers", "FlattenObservation"], "expected package.module:name"),
        (["ppo", "CartPole-v1", "--memory", "lstm"], "memory='lstm'"),
        (["ppo", "CartPole-v1", "--init-from", "no-such-run"], "--init-from no-such-run: no run 'no-such-run'"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(refused: Refused, words: list[str], expected: str) -> None:
    assert expected in refused(*words)


def test_a_package_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    assert 'pip install "headrace[atari]"' in refused("ppo", "ALE/Pong-v5")


@pytest.mark.parametrize(
    ("text", "expected"), [("- 1\n", "holds list"), ("a: [", "is no YAML"), ("", "holds NoneType")]
)
def test_a_file_that_is_none(refused: Refused, tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "my.yaml").write_text(text)
    assert expected in refused("ppo", "CartPole-v1", "--config", "my.yaml")


def failure(stderr: str) -> list[str]:
    """What the program says of an environment that failed; its traceback is its own, not the program's."""
    assert "commands/train.py" not in stderr
    assert stderr.count("Traceback (most recent call last)") == stderr.count("direct cause") + 1
    return stderr.splitlines()


@pytest.mark.slow
def test_an_environment_that_fails_in_a_process_ends_the_run_with_its_traceback_index_step_and_seed(
    tmp_path: Path,
) -> None:
    (tmp_path / "loose_wheel.py").write_text(BROKEN)
    words = ["train", "ppo", "loose_wheel:Broken", "--place", "processes", "--ui", "off"]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    said = failure(done.stderr)
    assert said[0].endswith("step() raised ZeroDivisionError: the wheel came off")
    assert "environment 0" in said[0]
    assert re.search(r"step 30.*seed=\d+", said[1])
    assert '    raise ZeroDivisionError("the wheel came off")' in said


@pytest.mark.slow
def test_an_observation_that_contradicts_its_space_ends_the_run_with_expected_and_actual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loose_wheel.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["train", "ppo", "loose_wheel:Broken", "--env.shape", "(4,)", "--ui", "off"]) == 1
    monkeypatch.delitem(sys.modules, "loose_wheel")
    said = "\n".join(failure(capsys.readouterr().err))
    assert "(4,)" in said
    assert "(3,)" in said
