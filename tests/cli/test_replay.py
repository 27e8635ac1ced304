"""The program with replay: which plan is chosen, what is refused and said before a run, going on."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from headrace import DQN, ConfigError, Inline, SyncReplay
from headrace.cli import main
from headrace.commands.planned import plan_of
from headrace.run import Run

ENV = "MountainCar-v0"  # which has no preset


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_method_without_a_preset_gets_the_plan_that_moves_what_it_learns_from() -> None:
    planned = plan_of(["dqn", ENV])
    assert (planned.run["plan"], planned.origins["plan"]) == (SyncReplay(), "default")
    assert type(plan_of(["headrace.methods.dqn:DQN", ENV]).run["plan"]) is SyncReplay
    assert type(plan_of(["ppo", ENV]).run["plan"]).__name__ == "SyncBatches"


def test_words_of_other_libraries_for_replay() -> None:
    words = ["--buffer-size", "5e4", "--batch-size", "32", "--learning-starts", "500", "--training-intensity", "8"]
    plan = plan_of(["dqn", ENV, *words, "--n-envs", "4"]).run["plan"]
    assert plan == SyncReplay(buffer_size=50_000, batch_size=32, learning_starts=500, ratio=8.0, num_envs=4)
    with pytest.raises(ConfigError, match=r"--train-freq: train_freq is one of two numbers .* Say plan\.ratio"):
        plan_of(["dqn", ENV, "--train-freq", "4"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ppo", ENV, "--plan", "replay"], "PPO learns from fresh batches, and SyncReplay replays old experience"),
        (["dqn", ENV, "--plan", "sync"], "DQN learns from replayed transitions, and SyncBatches moves fresh batches"),
        (["dqn", ENV, "--plan", "async"], "DQN learns from replayed transitions, and AsyncBatches"),
        (["dqn", ENV, "--plan.ratio", "0"], "ratio=0.0: give the samples to learn per environment step, above 0"),
        (["dqn", ENV, "--plan.buffer-size", "10"], "buffer_size=10 rows: .* Give at least 1,000"),
    ],
)
def test_HC_14_what_does_not_fit_together_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(words)


def test_MG_01_a_replay_that_does_not_fit_is_refused_before_there_is_a_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A million stacks of images in 64-bit numbers would not fit anywhere; so is what is too little."""
    began = time.monotonic()
    assert main(["train", "dqn", ENV, "-n", "2_000", "--plan.buffer-size", "1e12", "--ui", "off"]) == 2
    assert time.monotonic() - began < 20  # 2 s, on a machine that does nothing else
    said = capsys.readouterr().err
    assert "buffer_size=1,000,000,000,000 needs " in said
    assert "are available to this process. Give at most about " in said
    assert main(["train", "dqn", ENV, "-n", "500", "--ui", "off"]) == 2
    assert "learning_starts=1,000, and the run ends after 500" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_MG_01_one_that_takes_nearly_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    env = plan_of(["dqn", ENV]).run["env"]
    run, plan = Run(DQN(), env, SyncReplay()), SyncReplay()
    (announced,) = plan.notices(run.learner, None)
    assert announced.startswith("checkpoints hold the replay: ")
    monkeypatch.setattr("headrace.replay.replay.available", lambda: 4_000_000)
    tight, _ = plan.notices(run.learner, None)
    assert "over 90 % of the 4.0 MB that are available" in tight
    assert list(SyncReplay(save_replay=False, buffer_size=1_000).notices(run.learner, None)) == []


SMALL = ["dqn", "CartPole-v1", "--plan.learning-starts", "100", "--plan.buffer-size", "400", "--eval-every", "0"]
SMALL += ["--plan.ratio", "40", "--hidden", "8", "--plan.actors", "2", "--plan.num-envs", "4"]


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_replay_is_recorded_and_repeated_from_its_config(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *SMALL, "-n", "600", "--ui", "plain", "--run", "one"]) == 0
    said = capsys.readouterr().out
    assert said.count("checkpoints hold the replay: ") == 1
    config = json.loads((here / "one" / "config.json").read_text())
    assert (config["plan"], config["plan.ratio"], config["plan.save_replay"]) == ("sync-replay", 40.0, True)
    last = rows(here / "one")[-1]
    assert {"replay/size", "replay/ratio", "replay/age", "replay/late", "perf/replay_ratio"} <= set(last)
    assert last["replay/size"] <= 400
    result = json.loads((here / "one" / "result.json").read_text())
    assert result["env_steps"] >= 600
    assert result["deterministic"] is True
    assert result["samples_learned"] == 64 * result["updates"]
    assert 40 * (result["env_steps"] - 100) - 64 < result["samples_learned"] <= 40 * (result["env_steps"] - 100)
    saved = sorted((here / "one" / "checkpoints").glob("step_*"))
    assert [int(folder.name[5:]) for folder in saved][-1] == result["env_steps"]
    manifest = json.loads((saved[-1] / "manifest.json").read_text())
    assert manifest["info"]["version"] == result["updates"]  # of the last update of the last round

    again = ["train", "--config", "one/config.json", "--place", "threads", "--run", "two", "--ui", "off"]
    assert main(again) == 0
    assert json.loads((here / "two" / "result.json").read_text())["weights_sha256"] == result["weights_sha256"]
    assert main(["rerun", "one"]) == 2
    assert "only a run of an asynchronous plan" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["true", "false"])
def test_CR_02_a_run_goes_on_with_its_replay_or_says_that_there_is_none(
    saved: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *SMALL, "-n", "400", "--plan.save-replay", saved, "--ui", "plain", "--run", "one"]) == 0
    assert ("checkpoints hold the replay" in capsys.readouterr().out) == (saved == "true")
    updates = json.loads((here / "one" / "result.json").read_text())["updates"]
    assert main(["resume", "one", "-n", "800", "--ui", "plain"]) == 0
    said = capsys.readouterr().out
    line = (
        "the checkpoint holds no replay: learning waits until there are 100 steps again, which the saved policy makes"
    )
    assert said.count(line) == (saved == "false")
    assert (line in (here / "one" / "logs" / "run.log").read_text()) == (saved == "false")
    result = json.loads((here / "one" / "result.json").read_text())
    steps = 700 if saved == "true" else 600  # that samples are learned for, but for a round or two at each start
    assert result["env_steps"] >= 800
    assert abs(64 * result["updates"] - 40 * steps) < 40 * 2 * 16 + 64
    assert result["updates"] > updates
    sizes = [row["replay/size"] for row in rows(here / "one") if row["global_step"] > 400 and "replay/size" in row]
    assert (min(sizes) < 100) == (saved == "false")


@pytest.mark.slow
def test_help_and_list_name_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "dqn", "--help"]) == 0
    said = capsys.readouterr().out
    assert "\nplan sync-replay: " in said
    assert "--plan.ratio = 16" in said
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert "  sync-replay  " in said
    assert all(f"  {name}  " in said for name in ("dqn", "sac", "td3"))


def test_a_run_in_python_says_the_same(tmp_path: Path) -> None:
    env = plan_of(["dqn", ENV]).run["env"]
    with pytest.raises(ConfigError, match="PPO learns from fresh"):
        Run(plan_of(["ppo", ENV]).run["method"], env, SyncReplay(), Inline()).train(tmp_path / "run")
    assert not (tmp_path / "run").exists()
