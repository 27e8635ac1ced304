"""`headrace plot RUN…`: learning curves of several runs in one picture, and their numbers as CSV beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.commands.parser import Parser
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.record.folder import RunFolder

__all__ = ["main"]

AXES = {"steps": "global_step", "time": "time", "updates": "updates"}
LABELS = {"steps": "environment steps", "time": "seconds", "updates": "updates"}
RETURN = "charts/return_mean100"
GROUP = ("method", "env", "plan")
PROVENANCE = frozenset({"seed", "origins", "classes", "opaque", "frames", "total_timesteps", "horizon"})
"""What two runs of one group may differ in, and nobody need be told."""


def main(argv: list[str]) -> int:
    """Draw the runs, and say where the picture is."""
    parser = Parser("plot", "Learning curves: interquartile mean and 95 % bootstrap interval over the runs of a group.")
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help='a run folder, its name in runs/, "latest", or a folder of run folders'
    )
    parser.add_argument("--by", metavar="KEY", help=_BY)
    parser.add_argument("--x", choices=AXES, default="steps", help="the axis (default: steps)")
    parser.add_argument("--output", type=Path, metavar="FILE", help=_OUTPUT)
    given = parser.parse(argv)

    from headrace.view import curves

    folders = [folder for text in given.runs for folder in _found(text)]
    folders = list({folder.path.resolve(): folder for folder in folders}.values())
    groups = _grouped(folders, given.by)
    bands = {
        name: curves.band([_curve(folder, AXES[given.x]) for folder in its]) for name, its in sorted(groups.items())
    }
    picture = given.output or folders[0].path / "plots" / "comparison.png"
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        curves.draw(bands, LABELS[given.x], picture, title=_title(folders))
        curves.write(bands, LABELS[given.x].replace(" ", "_"), picture.with_suffix(".csv"))
    except OSError as error:
        raise ConfigError(f"{picture} could not be written: {error}. Give --output FILE.") from error
    for name, its in bands.items():
        print(f"{name}: {its.iqm[-1]:.1f} [{its.low[-1]:.1f}, {its.high[-1]:.1f}] at {its.at[-1]:,.0f}, n = {its.runs}")
    for line in _doubts(groups):
        print(line)
    print(f"{picture}   numbers: {picture.with_suffix('.csv').name}")
    return 0


_BY = (
    "a key of config.json that tells groups apart: plan, method, place, plan.max_lag … (default: method, env and plan)"
)
_OUTPUT = "the picture, .png or .svg; the CSV goes beside it (default: plots/comparison.png in the first run's folder)"


def _found(text: str) -> list[RunFolder]:
    """The run of that name, or all in a folder of runs."""
    from headrace.record.folder import RunFolder

    if (Path(text) / "config.json").exists() or not Path(text).is_dir():
        return [RunFolder.find(text)]
    inside = [
        RunFolder(path.parent) for path in sorted(Path(text).glob("*/config.json")) if path.parent.name != "latest"
    ]
    if not inside:
        raise ConfigError(f"{text} is no run folder (it has no config.json), and holds none.")
    return inside


def _grouped(folders: Sequence[RunFolder], by: str | None) -> dict[str, list[RunFolder]]:
    """The runs by name of their group. Returns of different environments are never mixed."""
    keys = GROUP if by is None else (by.replace("-", "_"), "env")
    found: dict[str, list[RunFolder]] = {}
    configs = [folder.config() for folder in folders]
    for folder, config in zip(folders, configs, strict=True):
        missing = [key for key in keys if key not in config]
        if missing:
            raise ConfigError(f"{folder.path} has no {missing[0]!r} in its config.json. Give --by one of its keys.")
    told = [key for key in keys if len({str(config[key]) for config in configs}) > 1] or list(keys[:1])
    for folder, config in zip(folders, configs, strict=True):
        name = " · ".join(f"{key} {config[key]}" if "." in key else str(config[key]) for key in told)
        found.setdefault(name, []).append(folder)
    return found


def _curve(folder: RunFolder, axis: str) -> tuple[list[float], list[float]]:
    """Where on the axis a return was known, and which."""
    points = [(row[axis], row[RETURN]) for row in folder.metrics() if row.get(RETURN) is not None]
    if not points:
        raise ConfigError(f"{folder.path} has no returns yet: no episode has ended in it. Leave it out.")
    at, returns = zip(*points, strict=True)
    return list(at), list(returns)


def _title(folders: Sequence[RunFolder]) -> str:
    """What all the runs have in common."""
    configs = [folder.config() for folder in folders]
    same = [str(configs[0].get(key)) for key in GROUP if len({str(config.get(key)) for config in configs}) == 1]
    return " · ".join(same)


def _doubts(groups: Mapping[str, Sequence[RunFolder]]) -> list[str]:
    """What makes the runs of a group no mere repetitions: other settings than the seed, or the same seed twice."""
    lines = []
    for name, its in groups.items():
        configs: list[dict[str, Any]] = [dict(folder.config()) for folder in its]
        keys = sorted({key for config in configs for key in config} - PROVENANCE)
        for key in keys:
            values = sorted({str(config.get(key)) for config in configs})
            if len(values) > 1:
                lines.append(
                    f"note: runs of {name} differ in {key} ({', '.join(values)}). --by {key} tells them apart."
                )
        seeds = [config.get("seed") for config in configs]
        twice = sorted({str(seed) for seed in seeds if seeds.count(seed) > 1})
        if twice:
            lines.append(f"note: {name} has seed {', '.join(twice)} more than once; its interval is too narrow.")
    return lines
