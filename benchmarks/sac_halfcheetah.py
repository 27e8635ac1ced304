"""How SAC learns HalfCheetah-v5, ours beside Stable-Baselines3's with equal settings: docs/methods/sac.md.

    python -m benchmarks.sac_halfcheetah --seeds 101 102

Each run is kept in `benchmarks/learned/` when it has ended; one that is there already is not made again, so that a
script that was stopped goes on where it was. Seed 1 was for trying it out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.harness import ROOT
from headrace import SAC, Gymnasium, Inline, Learner, SyncReplay

SETTINGS: dict[str, Any] = {
    "env": "HalfCheetah-v5",  # one
    "hidden": [256, 256],  # of the policy and of each of the two action-values, relu
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "tau": 0.005,
    "buffer_size": 100_000,
    "batch_size": 256,
    "learning_starts": 1_000,
    "env_steps": 30_000,  # and after the first 1,000 as many updates
}
LAST = 5  # episodes whose mean return is the score
FILE = ROOT / "benchmarks" / "learned" / "sac-halfcheetah.json"
PICTURE = ROOT / "docs" / "sac-halfcheetah.svg"
SYSTEMS = ("headrace", "stable-baselines3")

Run = Mapping[str, Any]
"""A system's training with one seed: system, seed, versions, and each episode's last environment step and return."""


def ours(settings: Mapping[str, Any], seed: int) -> Run:
    """Train in this process, on Inline."""
    env = Gymnasium(settings["env"])
    method = SAC(
        learning_rate=settings["learning_rate"],
        gamma=settings["gamma"],
        tau=settings["tau"],
        hidden=tuple(settings["hidden"]),
    )
    plan = SyncReplay(
        num_envs=1,
        num_steps=1,
        ratio=settings["batch_size"],  # one update a step
        batch_size=settings["batch_size"],
        buffer_size=settings["buffer_size"],
        learning_starts=settings["learning_starts"],
    )
    learner = Learner(method, env.spec, seed=seed)
    returns, lengths = [], []
    for report in plan.run(learner, env, Inline(), env_steps=settings["env_steps"]):
        returns += report.episode_returns.tolist()
        lengths += report.episode_lengths.tolist()
    versions = {name: version(name) for name in ("headrace", "gymnasium", "mujoco", "torch")}
    return _run("headrace", seed, versions, returns, lengths)


def theirs(settings: Mapping[str, Any], seed: int, python: str) -> Run:
    """Train Stable-Baselines3 in a process of its own. Raises CalledProcessError if that fails."""
    done = subprocess.run(
        [python, "-m", "benchmarks.peers.sb3_sac_curve", json.dumps({**settings, "seed": seed})],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    return _run("stable-baselines3", seed, told["versions"], told["returns"], told["lengths"])


def _run(system: str, seed: int, versions: Mapping[str, str], returns: Sequence[float], lengths: Sequence[int]) -> Run:
    """With one environment, episodes follow on each other: they end where their lengths add up to."""
    ended, rounded = np.cumsum(lengths).tolist(), np.round(returns, 1).tolist()
    return {"system": system, "seed": seed, "versions": versions, "ended": ended, "returns": rounded}


def kept(settings: Mapping[str, Any]) -> list[Run]:
    """The runs in the file. Raises ValueError if they were made with other settings."""
    if not FILE.is_file():
        return []
    held = json.loads(FILE.read_text())
    if held["settings"] != settings:
        raise ValueError(f"{FILE} holds runs with other settings: {held['settings']}")
    runs: list[Run] = held["runs"]
    return runs


def write(settings: Mapping[str, Any], runs: list[Run]) -> None:
    """The file, with a line for every run, in one step: a stop leaves the old one or the new one."""
    runs.sort(key=lambda run: (run["system"], run["seed"]))
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    part = FILE.with_suffix(".part")
    part.write_text(f'{{\n "settings": {json.dumps(settings)},\n "runs": [\n{lines}\n ]\n}}\n')
    part.replace(FILE)


def scores(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """By system and seed: the mean return of the last episodes."""
    return {
        system: {
            run["seed"]: round(float(np.mean(run["returns"][-LAST:])), 1) for run in runs if run["system"] == system
        }
        for system in SYSTEMS
    }


def draw(settings: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """A line for each run, through the returns of its episodes; a colour for each system."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, system in enumerate(SYSTEMS):
        label: str | None = system
        for run in runs:
            if run["system"] == system:
                axes.plot(run["ended"], run["returns"], color=f"C{number}", label=label, linewidth=1.2)
                label = None
    axes.set(xlabel="environment steps", ylabel="return of training episodes", title=f"SAC, {settings['env']}")
    axes.legend(loc="upper left")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sac-halfcheetah"}):  # the same file every time
        figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sac_halfcheetah", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=(101, 102), metavar=("FIRST", "LAST"))
    given = parser.parse_args()
    python = peers.python_with("sb3")
    if python is None:
        parser.exit(1, "without Stable-Baselines3 there is nothing to compare with\n")
    runs = kept(SETTINGS)
    made = {(run["system"], run["seed"]) for run in runs}
    for seed in range(given.seeds[0], given.seeds[1] + 1):
        for system in SYSTEMS:
            if (system, seed) not in made:
                runs.append(ours(SETTINGS, seed) if system == "headrace" else theirs(SETTINGS, seed, python))
                write(SETTINGS, runs)
                print(json.dumps(runs[-1]), flush=True)
    draw(SETTINGS, runs)
    print(json.dumps(scores(runs)))


if __name__ == "__main__":
    main()
