"""The picture that a run leaves: its return over environment steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_return"]


def draw_return(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    title: str,
    threshold: float | None,
    say: Callable[[str], None],
) -> None:
    """Draw the mean return of the last 100 episodes, and evaluations with one standard deviation, from rows of metrics.

    threshold: a line, where the environment counts as solved. Where matplotlib is not installed, that
    is said. Raises OSError where it cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        say('matplotlib is not installed, so there is no plots/return.png. pip install "headrace[plot]"')
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    trained = _points(rows, "charts/return_mean100")
    if trained:
        axes.plot(*zip(*trained, strict=True), label="training, mean of 100 episodes")
    evaluated = [row for row in rows if row.get("eval/episodic_return") is not None]
    if evaluated:
        steps, means, stds = (
            [row[name] for row in evaluated]
            for name in ("global_step", "eval/episodic_return", "eval/episodic_return_std")
        )
        axes.errorbar(steps, means, stds, fmt="o", capsize=3, label="evaluation, greedy, ± 1 std")
    if threshold is not None:
        axes.axhline(threshold, linestyle=":", color="gray", label=f"solved: {threshold:g}")
    axes.set(title=title, xlabel="environment steps", ylabel="return")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    path.parent.mkdir(exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["global_step"], row[name]) for row in rows if row.get(name) is not None]
