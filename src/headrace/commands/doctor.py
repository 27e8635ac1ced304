"""`headrace doctor [ENV]`: what this machine has of what training needs, and what an environment costs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from headrace.commands.parser import Parser, environment_arguments

__all__ = ["main"]

_STEPS, _ENVS = 200, 8  # that are timed
_REQUIREMENT = re.compile(r"""([\w.-]+).*;\s*extra\s*==\s*['"]([\w-]+)['"]""")


def main(argv: list[str]) -> int:
    """Print the machine, the packages and the pip line for those that are missing; with ENV, how fast that is."""
    parser = Parser("doctor", "What this machine has of what training needs; with ENV, what a step of that costs.")
    parser.add_argument("env", metavar="ENV", nargs="?", help="an environment to make and to time")
    parser.add_argument("--env.KEY", metavar="VALUE", help="an argument of the environment")
    words, arguments = environment_arguments(argv)
    given = parser.parse(words)
    for name, text in _machine():
        print(f"{name:<12}{text}")
    missing = []
    for extra, packages in _extras().items():
        found = {package: _version(package) for package in packages}
        told = [f"{package} {held or 'missing'}" for package, held in found.items()]
        print(f"{extra:<12}{', '.join(told)}")
        missing += [extra] if None in found.values() else []
    if missing:
        print(f'\nFor what is missing: pip install "headrace[{",".join(missing)}]"')
    if given.env is not None:
        print(f"\n{_time(given.env, arguments)}")
    return 0


def _machine() -> Iterator[tuple[str, str]]:
    import psutil
    import torch

    from headrace.record.machine import cores

    yield "headrace", metadata.version("headrace")
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield "torch", f"{torch.__version__}, {', '.join(devices) if devices else 'no CUDA device'}"
    yield "cores", f"{cores()} that a run may use, of {os.cpu_count()}"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB"
    if os.path.isdir("/dev/shm"):
        disk = shutil.disk_usage("/dev/shm")
        yield "/dev/shm", f"{disk.free / 1e9:.1f} GB free of {disk.total / 1e9:.1f} GB; Headrace's memory is not in it"


def _extras() -> Mapping[str, list[str]]:
    """The packages of every extra that is for users, as this installation declares them."""
    found: dict[str, list[str]] = {}
    for text in metadata.requires("headrace") or ():
        if (declared := _REQUIREMENT.match(text)) and declared[1] != "headrace" and declared[2] != "dev":
            found.setdefault(declared[2], []).append(declared[1])
    return dict(sorted(found.items()))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _time(id: str, arguments: Mapping[str, Any]) -> str:
    """What a step costs, and what it costs to choose for it with a network that has learned nothing."""
    import torch

    from headrace.envs.registry import environment
    from headrace.methods.ppo import PPO
    from headrace.policy import Policy

    env, method = environment(id, **arguments), PPO()
    policy = Policy(method, env.spec, method.build(env.spec, torch.Generator().manual_seed(0)))
    vector = env.make(range(_ENVS))
    chosen, stepped = [], []
    try:
        observation = vector.reset(0)
        for _ in range(_STEPS):
            begin = time.perf_counter()
            action = policy.act(observation, greedy=False)
            middle = time.perf_counter()
            observation = vector.step(action)[0]
            chosen.append(middle - begin)
            stepped.append(time.perf_counter() - middle)
    finally:
        vector.close()
    step, choice = (statistics.median(seconds) * 1e6 for seconds in (stepped, chosen))
    return (
        f"{env!r} works: a step of {_ENVS} environments takes {step:,.0f} µs, to choose their actions {choice:,.0f} µs "
        f"(medians of {_STEPS})"
    )
