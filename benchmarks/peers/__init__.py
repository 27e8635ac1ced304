"""The peers: a program each, and environments of their own for those that have to be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

INSTALL_TIMEOUT = 900.0
PINNED = ("numpy", "torch", "mujoco")  # to our own versions; a bare `torch` would pull gigabytes of CUDA libraries
REQUIREMENTS = {
    "cpprb": ["cpprb", "numpy"],
    "ray": ["ray", "numpy"],
    "rllib": ["ray[rllib]", "torch", "numpy"],
    "sample_factory": ["sample-factory>=2.1", "torch"],  # takes an older NumPy
    "sb3": [
        *("stable-baselines3", "torch", "numpy", "ale-py", "opencv-python-headless"),
        *("mujoco", "imageio", "packaging"),  # the last two: gymnasium's MuJoCo environments import them
    ],
}


def folder() -> Path:
    """Where environments are made: HEADRACE_PEERS, or a folder in the user's cache."""
    return Path(os.environ.get("HEADRACE_PEERS", Path.home() / ".cache" / "headrace-peers"))


def python_with(peer: str) -> str | None:
    """The interpreter of this peer's environment, made at the first use; None, with a message, if that fails."""
    home = folder() / peer
    python, done = home / "bin" / "python", home / "installed.txt"
    wanted = [f"{name}=={_our_version(name)}" if name in PINNED else name for name in REQUIREMENTS[peer]]
    if done.is_file() and done.read_text() == " ".join(wanted):
        return str(python)
    print(f"{peer}: installing into {home}", file=sys.stderr)
    try:
        venv.create(home, clear=True, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *wanted],
            check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=INSTALL_TIMEOUT,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        print(f"{peer}: skipped, its installation failed: {said[-1] if said else error}", file=sys.stderr)
        shutil.rmtree(home, ignore_errors=True)
        return None
    done.write_text(" ".join(wanted))
    return str(python)


def _our_version(name: str) -> str:
    """Without a build: its wheel for the CPU is found by the version alone."""
    return version(name).partition("+")[0]
