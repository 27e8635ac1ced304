"""How PPO learns HalfCheetah-v5, ours beside Stable-Baselines3's with equal settings: docs/benchmarks.md, "curves".

    python -m benchmarks.curves --seeds 101 103 --write

The programs were tried on seed 1. Seeds 101 to 103 were run once; what came of them is in `benchmarks/learned/`.
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
from numpy.typing import ArrayLike

from benchmarks import peers, ppo
from benchmarks.harness import ROOT
from headrace import PPO, Gymnasium, Inline, Learner, SyncBatches
from headrace.view.curves import interval, iqm

SETTINGS: dict[str, Any] = {
    **{name: value for name, value in ppo.SETTINGS.items() if name != "seed"},
    "env": "HalfCheetah-v5",
    "num_envs": 1,
    "num_steps": 2048,
    "num_epochs": 10,
    "minibatch_size": 64,
    "env_steps": 300_000,
}
EVERY = 10_000  # environment steps from one point of a curve to the next
WINDOW = 20_000  # a point is the mean return of the episodes that ended in so many environment steps before it
LAST = 50_000  # the score is the mean return of the episodes that ended in so many environment steps before the end
FILE = ROOT / "benchmarks" / "learned" / "halfcheetah.json"
PICTURE = ROOT / "docs" / "halfcheetah.svg"

Run = Mapping[str, Any]
"""A system's training with one seed: system, seed, versions, and each episode's last environment step and return."""


def mean_return(run: Run, env_step: int, window: int) -> float:
    """Of the episodes that ended in the `window` environment steps up to this one."""
    ended = np.asarray(run["ended"])
    return float(np.asarray(run["returns"])[(ended > env_step - window) & (ended <= env_step)].mean())


def ours(settings: Mapping[str, Any], seed: int) -> Run:
    """Train in this process, on Inline."""
    env = Gymnasium(settings["env"])
    method = PPO(
        learning_rate=settings["learning_rate"],
        anneal_lr=False,
        gamma=settings["gamma"],
        gae_lambda=settings["gae_lambda"],
        ent_coef=settings["ent_coef"],
        vf_coef=settings["vf_coef"],
        max_grad_norm=settings["max_grad_norm"],
        normalize_observation=True,
        normalize_reward=True,
        hidden=tuple(settings["hidden"]),
        update_epochs=settings["num_epochs"],
        num_minibatches=settings["num_envs"] * settings["num_steps"] // settings["minibatch_size"],
        clip_range=settings["clip"],
    )
    learner = Learner(method, env.spec, seed=seed)
    plan = SyncBatches(num_envs=settings["num_envs"], num_steps=settings["num_steps"])
    returns, lengths = [], []
    for report in plan.run(learner, env, Inline(), env_steps=settings["env_steps"]):
        returns += report.episode_returns.tolist()
        lengths += report.episode_lengths.tolist()
    versions = {name: version(name) for name in ("headrace", "gymnasium", "mujoco", "torch")}
    return _run("headrace", seed, versions, returns, lengths)


def both(settings: Mapping[str, Any], seed: int, python: str) -> tuple[Run, Run]:
    """Ours here and Stable-Baselines3 in a process of its own, at the same time. RuntimeError if that fails."""
    peer = subprocess.Popen(
        [python, "-m", "benchmarks.peers.sb3_curve", json.dumps({**settings, "seed": seed})],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    with peer:
        try:
            mine = ours(settings, seed)
            output, _ = peer.communicate()
        except BaseException:
            peer.kill()
            raise
    if peer.returncode:
        raise RuntimeError(f"benchmarks.peers.sb3_curve left with exit code {peer.returncode}")
    told = json.loads(output)
    return mine, _run("stable-baselines3", seed, told["versions"], told["returns"], told["lengths"])


def _run(system: str, seed: int, versions: Mapping[str, str], returns: Sequence[float], lengths: Sequence[int]) -> Run:
    """With one environment, episodes follow on each other: they end where their lengths add up to."""
    return {
        "system": system,
        "seed": seed,
        "versions": versions,
        "ended": np.cumsum(lengths).tolist(),
        "returns": np.round(returns, 1).tolist(),
    }


def summary(runs: Sequence[Run], env_steps: int) -> dict[str, dict[str, Any]]:
    """By system: every seed's score, and of the scores and of each point of the curves the IQM and its interval."""
    found = {}
    for system in sorted({run["system"] for run in runs}):
        its = [run for run in runs if run["system"] == system]
        points = range(EVERY, env_steps + 1, EVERY)
        scores = [mean_return(run, env_steps, LAST) for run in its]
        curves = [[mean_return(run, point, WINDOW) for run in its] for point in points]
        low, high = interval(curves)
        found[system] = {
            "scores": _rounded(scores),
            "iqm": _rounded(iqm(scores)),
            "interval": _rounded(interval(scores)),
            "curve": {
                "env_steps": list(points),
                "iqm": _rounded(iqm(curves)),
                "low": _rounded(low),
                "high": _rounded(high),
            },
        }
    return found


def _rounded(values: ArrayLike) -> Any:
    return np.round(values, 1).tolist()


def write(runs: Sequence[Run], found: Mapping[str, Any]) -> None:
    """The file, with a line for every run, and the picture."""
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    systems = ",\n".join(f"  {json.dumps(system)}: {json.dumps(values)}" for system, values in found.items())
    settings = json.dumps(SETTINGS)
    FILE.write_text(f'{{\n "settings": {settings},\n "runs": [\n{lines}\n ],\n "summary": {{\n{systems}\n }}\n}}\n')
    draw(found)


def draw(found: Mapping[str, Any]) -> None:
    """The curves, each as a line in its interval."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for system, values in found.items():
        curve = values["curve"]
        axes.plot(curve["env_steps"], curve["iqm"], label=system)
        axes.fill_between(curve["env_steps"], curve["low"], curve["high"], alpha=0.2, linewidth=0)
    axes.set(xlabel="environment steps", ylabel="return of training episodes", title=SETTINGS["env"])
    axes.legend(loc="upper left")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "halfcheetah"}):  # the same file every time
        figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 2), metavar=("FIRST", "LAST"))
    parser.add_argument("--write", action="store_true", help=f"keep the results in {FILE.relative_to(ROOT)}")
    given = parser.parse_args()
    python = peers.python_with("sb3")
    if python is None:
        parser.exit(1, "without Stable-Baselines3 there is nothing to compare with\n")
    runs: list[Run] = []
    for seed in range(given.seeds[0], given.seeds[1] + 1):
        pair = both(SETTINGS, seed, python)
        runs += pair
        for run in pair:
            print(json.dumps(run), flush=True)
    runs.sort(key=lambda run: (run["system"], run["seed"]))
    found = summary(runs, SETTINGS["env_steps"])
    print(json.dumps(found))
    if given.write:
        write(runs, found)


if __name__ == "__main__":
    main()
