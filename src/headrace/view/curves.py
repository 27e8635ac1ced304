"""Learning curves of many runs: the interquartile mean over seeds, its interval, a picture, and the numbers as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.errors import ConfigError

__all__ = ["Band", "band", "draw", "interval", "iqm", "write"]

RESAMPLES = 10_000
POINTS = 200  # of a curve's common axis

Curve = tuple[Sequence[float], Sequence[float]]
"""One run's points: where on the axis [N], ascending, and the return there [N]."""


def iqm(values: ArrayLike) -> NDArray[np.float64]:
    """The interquartile mean over the last axis: of the middle half of the values, [..., N] → [...].

    A quarter of N values is cut from either end, and a part of a value where N/4 is no integer: of three values the
    middle one counts whole, the others a quarter each.
    """
    values = np.asarray(values, np.float64)
    count = values.shape[-1]
    quarters = np.sort(np.repeat(values, 4, axis=-1), axis=-1)
    middle: NDArray[np.float64] = quarters[..., count : 3 * count]
    return np.asarray(middle.mean(-1))


def interval(values: ArrayLike) -> NDArray[np.float64]:
    """The 95 % percentile bootstrap interval of the interquartile mean over the last axis: [..., N] → [2, ...]."""
    values = np.asarray(values, np.float64)
    count = values.shape[-1]
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    rows = values.reshape(-1, count)  # one at a time: all their resamples at once take gigabytes
    bounds = [np.quantile(iqm(row[drawn]), (0.025, 0.975)) for row in rows]
    return np.stack(bounds, axis=-1).reshape(2, *values.shape[:-1])


@dataclass(frozen=True)
class Band:
    """A group of runs as one curve, from where its last run begins to where its first one ends."""

    runs: int
    """How many, each one a seed: N."""
    at: NDArray[np.float64]
    """The common axis [P]."""
    iqm: NDArray[np.float64]
    """Over the runs [P]."""
    low: NDArray[np.float64]
    """The lower end of the 95 % bootstrap interval [P]; with one run, the curve itself."""
    high: NDArray[np.float64]


def band(curves: Sequence[Curve]) -> Band:
    """The runs on a common axis, interpolated between their points; seeds are the unit, never episodes.

    Raises ConfigError where the runs have no part of the axis in common.
    """
    begin = max(at[0] for at, _ in curves)
    end = min(at[-1] for at, _ in curves)
    if begin > end:
        raise ConfigError(
            f"one run's curve ends at {end:g}, before another one's begins, at {begin:g}: nothing can be compared. "
            "Leave the short one out."
        )
    axis = np.linspace(begin, end, POINTS)
    values = np.stack([np.interp(axis, at, returns) for at, returns in curves], axis=-1)
    low, high = interval(values) if len(curves) > 1 else (values[:, 0], values[:, 0])
    return Band(len(curves), axis, iqm(values), low, high)


def write(bands: Mapping[str, Band], axis: str, path: Path) -> None:
    """The numbers behind a picture as CSV: a line for every point of every group. axis: what `at` is called."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["group", "runs", axis, "return_iqm", "return_low", "return_high"])
        for name, its in bands.items():
            for row in zip(its.at, its.iqm, its.low, its.high, strict=True):
                lines.writerow([name, its.runs, *(f"{value:.6g}" for value in row)])


def draw(bands: Mapping[str, Band], axis: str, path: Path, title: str = "") -> None:
    """The curves, each as a line in its interval; the legend says how many runs are behind it.

    path: its ending says what is written, .png or .svg. Raises ConfigError where matplotlib is not installed, or
    writes no such files.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"pictures need {error.name}, which is not installed. pip install 'headrace[plot]'"
        ) from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    known = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise ConfigError(f"a picture cannot be written as {path.name!r}. End it in {', '.join(sorted(known))}.")
    axes = figure.subplots()
    for name, its in bands.items():
        axes.plot(its.at, its.iqm, label=f"{name} (n = {its.runs})")
        axes.fill_between(its.at, its.low, its.high, alpha=0.2, linewidth=0)
    axes.set(xlabel=axis, ylabel="return, mean of the last 100 episodes", title=title)
    axes.grid(alpha=0.2)
    axes.legend(loc="best")
    figure.savefig(path, dpi=120)
