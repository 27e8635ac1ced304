"""Run systems in turn, each in a fresh process, print what every round gave, and compare the medians."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
TIMEOUT = 180.0  # seconds that one process may take, its start included
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Case:
    """A program that measures one system in one setting: `python -m module *arguments`.

    It prints a JSON object for every figure: name (what `Workload.ratios` calls it), figure, version, settings.
    """

    system: str
    module: str
    arguments: tuple[str, ...] = ()
    one_core: bool = False  # everything on one core; the names of its figures get the suffix "_one_core"
    python: str = sys.executable


@dataclass(frozen=True)
class Workload:
    """What is measured, and what the figures are compared with."""

    name: str
    unit: str
    cases: Sequence[Case]
    ratios: Callable[[dict[str, float]], dict[str, float]]
    """From the median of each name."""
    targets: dict[str, str]
    recorded: Sequence[dict[str, Any]] = field(default=())
    """Lines that were measured elsewhere: system, version, settings, figure."""


def compare(workload: Workload, rounds: int, as_json: bool) -> None:
    """Measure every case once a round, in order. Raises RuntimeError, with no ratio printed, when a program fails."""
    figures: dict[str, list[float]] = {}
    with _no_orphans():
        for number in range(1, rounds + 1):
            for case in workload.cases:
                for name, result in _measure(case):
                    figures.setdefault(name, []).append(result["figure"])
                    settings = {"round": number, **result["settings"]}
                    _print_line(workload, case.system, result["version"], settings, result["figure"])
    for line in workload.recorded:
        _print_line(workload, **line)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratios = {key: round(value, 4) for key, value in workload.ratios(medians).items()}
    if not as_json:
        _print_table(workload, figures, ratios)
    print(json.dumps({"workload": workload.name, "ratios": ratios}), flush=True)


def _print_line(workload: Workload, system: str, version: str, settings: dict[str, Any], figure: float) -> None:
    line = {"workload": workload.name, "system": system, "version": version, "settings": settings}
    print(json.dumps({**line, "figure": figure, "unit": workload.unit}), flush=True)


def _print_table(workload: Workload, figures: dict[str, list[float]], ratios: dict[str, float]) -> None:
    print(f"\n{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}; load {os.getloadavg()[0]:.1f}")
    print(f"\n{workload.name} ({workload.unit})             median            lowest           highest")
    for name, values in figures.items():
        print(
            f"  {name:28}"
            + "".join(f"{value:>18,.1f}" for value in (statistics.median(values), min(values), max(values)))
        )
    print()
    for key, value in ratios.items():
        print(f"  {key:28}{value:>18.3f}   target {workload.targets.get(key, 'none')}")
    print()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def _measure(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[-1:] if case.one_core else cores
    with _pinned(cores):
        output = _run([case.python, "-m", case.module, *case.arguments])
    for line in output.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            result["settings"]["cores"] = cores
            yield result["name"] + ("_one_core" if case.one_core else ""), result


def _run(command: list[str]) -> str:
    """The program's standard output; it has ended, with everything that it started, when this returns or raises."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except BaseException:
        _end_children()
        process.communicate()
        raise
    _end_children()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} left with exit code {process.returncode}:\n{output}{errors}")
    return output


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """What starts in this block runs on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _no_orphans() -> Iterator[None]:
    """What a killed program leaves behind becomes our child, where it can be found and ended."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _end_children()
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_children() -> None:
    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(children, timeout=10)
