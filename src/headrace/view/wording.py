"""The words and numbers that the panel and the plain lines share."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from headrace.view.moment import Header, Moment

__all__ = ["STOP", "count", "dropped", "duration", "episodes", "eta", "heading", "score"]

STOP = "stop: Ctrl-C once (saves), twice (quits)"


def heading(header: Header, stop: str = STOP) -> list[str]:
    """Three lines: what is trained, how and where, and where it is kept. stop: how to end what is seen."""
    preset = f"preset {header.preset}" if header.preset else "no preset"
    return [
        f"headrace {version('headrace')} · {header.method} on {header.env} · {preset} · seed {header.seed}",
        f"plan  {header.plan}   place  {header.place}   device  {header.device}",
        f"run   {header.folder or 'kept nowhere'}   {stop}",
    ]


def count(number: float) -> str:
    """A whole number with its digits in threes: "2 611 200"."""
    return f"{number:,.0f}".replace(",", " ")


def score(value: float | None, size: float | None = None) -> str:
    """A return: one digit after the point, two below 10, where they matter. size: of what it is told beside."""
    if value is None:
        return "–"
    return f"{value:.1f}" if abs(value if size is None else size) >= 10 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """ "12:31", or "1:12:31" from an hour on."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes:02}:{left:02}"


def eta(moment: Moment) -> str:
    """How long the rest takes at the speed of the run so far; a dash before its first step."""
    if not moment.env_steps:
        return "–"
    left = max(0, moment.total_timesteps - moment.env_steps)
    return duration(left * moment.seconds / moment.env_steps)


def episodes(moment: Moment) -> str:
    """The training return; before the first episode has ended, how far those under way have come."""
    if moment.return_mean100 is not None:
        return f"{score(moment.return_mean100)} (last {min(100, moment.episodes_finished)})"
    if moment.running_return is None or moment.running_length is None:
        return "– (no episode has ended yet)"
    return f"– (no episode has ended yet; {score(moment.running_return)} after {count(moment.running_length)} steps)"


def dropped(reasons: Mapping[str, int]) -> str:
    """How many environment steps were thrown away, and why."""
    kept = {reason: number for reason, number in reasons.items() if number}
    named = ", ".join(f"{count(number)} {reason}" for reason, number in kept.items())
    return f"dropped {named or 0}"
