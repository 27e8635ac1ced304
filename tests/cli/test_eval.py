"""`headrace eval`: the score of a run, the same each time, and nothing changed by it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from headrace import PPO, Checkpoints, ConfigError, Gymnasium, Inline, Learner, Run, Stalled, SyncBatches, evaluate
from headrace.commands.eval import environment_of, main
from headrace.configuration import configuration
from headrace.envs.toy import Recall
from headrace.spec_json import spec_to_json

ENV = Gymnasium("CartPole-v1", max_episode_steps=30)
METHOD = PPO(hidden=(8,))


@pytest.fixture(scope="module")
def learner() -> Learner:
    return Learner(METHOD, ENV.spec, seed=4)


@pytest.fixture(scope="module")
def run(learner: Learner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as training writes it, with two checkpoints: the first scored higher."""
    folder: Path = tmp_path_factory.mktemp("runs") / "one"
    folder.mkdir()
    told = configuration(METHOD, ENV, SyncBatches(), Inline(), {}, total_timesteps=1000, seed=4)
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "spec.json").write_text(json.dumps(spec_to_json(ENV.spec)))
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(128, {"learner": learner.state()}, score=25.0)
    checkpoints.save(256, {"learner": Learner(METHOD, ENV.spec, seed=5).state()}, score=20.0)
    return folder


def tree_of(folder: Path) -> dict[str, tuple[str, int]]:
    """The content of every file, and when it and every folder was changed."""
    return {
        str(path): (hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest(), path.stat().st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
    }


def test_twice_the_same_score_and_no_file_is_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree_of(run)
    told = []
    for _ in range(2):
        assert main([str(run), "--episodes", "3"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert tree_of(run) == before
    assert main([str(run), "--episodes", "3", "--seed", "9"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] != told[0].splitlines()[1:]


def test_the_score_is_that_of_the_weights(run: Path, learner: Learner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--checkpoint=best", "--episodes", "3", "--seed", "7", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    returns = evaluate(METHOD, learner.net, ENV, 3, seed=7)
    assert told["returns"] == returns.tolist()
    assert (told["mean"], told["std"]) == pytest.approx((np.mean(returns), np.std(returns)))
    assert (told["min"], told["max"]) == (min(returns), max(returns))
    assert {key: told[key] for key in ("method", "env", "env_steps", "episodes", "seed")} == {
        **{"method": "ppo", "env": "CartPole-v1", "env_steps": 128, "episodes": 3, "seed": 7}
    }
    assert main([str(run), "--checkpoint", "128", "--episodes", "3", "--seed", "7"]) == 0
    text = capsys.readouterr().out
    assert f"after 128 steps ({run / 'checkpoints' / 'step_000000128'})" in text
    assert f"3 episodes with seed 7: {np.mean(returns):.1f} ± {np.std(returns):.1f}, from " in text


def test_the_seed_of_the_run_is_the_default(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ([], ["--seed", "4"]):
        main([str(run), "--episodes", "2", "--json", *seed])
    default, given = capsys.readouterr().out.splitlines()
    assert default == given


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "the following arguments are required: RUN"),
        (["RUN", "--episodes", "0"], "'0' is no whole number from 1 on"),
        (["RUN", "--episodes", "2.5"], "'2.5' is no whole number"),
        (["RUN", "--seed", "-1"], "'-1' is no whole number from 0 on"),
        (["RUN", "--checkpoint", "worst"], "'worst' is no whole number"),
        (["RUN", "--episode", "3"], "--episode is an argument too many; nearest: --episodes"),
        (["RUN", "other"], "other is an argument too many"),
        (["RUN", "--checkpoint", "5"], "has no checkpoint of step 5"),
        (["no-such-run"], "no-such-run"),
    ],
)
def test_bad_input_is_refused(run: Path, argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main([str(run) if word == "RUN" else word for word in argv])
    assert says in str(caught.value)


def test_flags_take_underscores_and_large_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--episodes=2", "--max_steps=1e3"]) == 0
    with pytest.raises(Stalled, match="had not ended after 2 steps"):
        main([str(run), "--episodes", "2", "--max-steps", "2"])


def test_environments_are_made_again_from_the_configuration() -> None:
    def again(env: Any, **others: Any) -> Any:
        told = configuration(METHOD, env, SyncBatches(), Inline(), {}, total_timesteps=1000, seed=4)
        return environment_of(json.loads(json.dumps(told)), **others)

    wrapped = Gymnasium("Acrobot-v1", wrappers=[gymnasium.wrappers.FlattenObservation], bounds="clip")
    for env in (ENV, wrapped, Gymnasium("CartPole-v1", sutton_barto_reward=True)):
        assert again(env) == env
    assert again(ENV, render_mode="rgb_array") == Gymnasium(
        "CartPole-v1", max_episode_steps=30, render_mode="rgb_array"
    )
    for env in (Recall(), Gymnasium("CartPole-v1", wrappers=[lambda one: one])):
        with pytest.raises(
            ConfigError, match=r"were made in Python.*headrace.evaluate\(policy.method, policy.net, env"
        ):
            again(env)


def test_environments_that_have_changed_are_refused(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "env": "Acrobot-v1"}))
    with pytest.raises(ConfigError, match=r"Gymnasium\('Acrobot-v1'.*; the run was trained with Spec"):
        main([str(folder)])


@pytest.mark.slow
def test_plays_the_last_episodes_of_a_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method, env = PPO(normalize_observation=True, memory="gru", num_minibatches=2), Gymnasium("CartPole-v1")
    run = Run(method, env, SyncBatches(num_envs=4, num_steps=64), total_timesteps=2_000, seed=2)
    summary = run.train(tmp_path / "run", eval_every=1_000, eval_episodes=2).summary
    before = tree_of(tmp_path)
    for which in ("last", "best"):
        assert main([str(tmp_path / "run"), "--checkpoint", which, "--json"]) == 0
    last, best = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["mean"] == summary["final_return"]
    assert last["env_steps"] == summary["env_steps"]
    scores = {
        path.parent.name: json.loads(path.read_text())["info"]["score"]
        for path in tmp_path.glob("run/checkpoints/*/manifest.json")
    }
    assert f"step_{best['env_steps']:09d}" == max(scores, key=lambda name: (scores[name] or -1, name))
    assert tree_of(tmp_path) == before


HELP = """
import contextlib, importlib, sys
for name in ("eval", "enjoy", "check_env", "doctor"):
    with contextlib.suppress(SystemExit):
        importlib.import_module(f"headrace.commands.{name}").main(["--help"])
assert "torch" not in sys.modules and "gymnasium" not in sys.modules
"""


@pytest.mark.slow
def test_help_needs_no_torch() -> None:
    told = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=100)
    assert told.returncode == 0, told.stderr
    for name in ("eval", "enjoy", "check-env", "doctor"):
        assert f"usage: headrace {name} [-h]" in told.stdout
