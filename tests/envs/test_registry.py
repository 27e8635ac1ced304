"""What ids stand for, and what is said where a package is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.envs.atari import Atari
from headrace.envs.gymnasium import Gymnasium
from headrace.envs.registry import environment
from headrace.errors import ConfigError


def test_ids_stand_for_environments() -> None:
    assert environment("ALE/Pong-v5", noop_max=30) == Atari("Pong", noop_max=30)
    assert environment("PongNoFrameskip-v4") == Atari("PongNoFrameskip-v4")
    assert environment("CartPole-v1", sutton_barto_reward=True) == Gymnasium("CartPole-v1", sutton_barto_reward=True)
    assert environment("gymnasium.envs.classic_control:PendulumEnv").spec == Gymnasium("Pendulum-v1").spec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: environment("ALE/Pon-v5"), "Nearest: Pong"),
        (lambda: environment("ALE/Pong-v5", sticky=0.1), r"Atari\('ALE/Pong-v5'\) has no 'sticky'. Nearest: "),
        (lambda: environment("ALE/Pong-v5", noops_max=3), "Nearest: noop_max"),
        (lambda: environment("CartPole"), "Nearest: CartPole-v1"),
    ],
)
def test_a_wrong_id_is_answered_with_the_nearest(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("package", "id", "message"),
    [
        (
            "ale_py",
            "ALE/Pong-v5",
            r'^"ALE/Pong-v5" needs ale-py, which is not installed. pip install "headrace\[atari\]" \(ale-py is GPL-2.0',
        ),
        ("envpool", "envpool:Pong-v5", r'^"envpool:Pong-v5" needs envpool, .* pip install "headrace\[envpool\]"$'),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, id: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And one that is there, but misses something itself, says that."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=message):
        environment(id)
    (tmp_path / f"{package}.py").write_text("import what_it_needs")
    monkeypatch.delitem(sys.modules, package)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        environment(id)


@pytest.mark.slow
def test_importing_headrace_imports_no_environment_package() -> None:
    packages = {"ale_py", "envpool", "imageio", "matplotlib", "minigrid", "mujoco", "pygame"}
    script = f"import sys, headrace, headrace.envs.registry\nprint(sorted({packages} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
