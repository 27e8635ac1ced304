"""The live panel: how a run stands, redrawn four times a second at the bottom of the terminal."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TextIO, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from headrace.view.moment import Header, Moment, Queue, Stage
from headrace.view.wording import STOP, count, dropped, duration, episodes, eta, heading, score

__all__ = ["Panel", "draw", "sparkline"]

EVERY = 0.25  # seconds from picture to picture
BARS = "▁▂▃▄▅▆▇█"
T = TypeVar("T", Stage, Queue)
MOST = 5  # groups of stages, and of queues, so that the panel stays below 24 lines


class Panel:
    """The panel in a terminal. What is printed meanwhile appears above it."""

    def __init__(self, stream: TextIO, stop: str = STOP) -> None:
        self._console = Console(file=stream, highlight=False)
        # No thread of rich's: it would draw in the middle of what the driver computes.
        self._live = Live(console=self._console, auto_refresh=False)
        self._stop = stop
        self._header: Header | None = None
        self._due = 0.0
        self._last: tuple[Moment, Sequence[float]] | None = None

    def begin(self, header: Header) -> None:
        """Print the heading, and begin to redraw below it."""
        self._header = header
        for line in heading(header, self._stop):
            self.say(line)
        self._live.start()
        self._live.update(Text("waiting for the first update …", style="dim"), refresh=True)

    def show(self, moment: Moment, returns: Sequence[float]) -> None:
        """Redraw, if it is time."""
        self._last = (moment, returns)
        if time.monotonic() >= self._due:
            self._draw()

    def say(self, line: str) -> None:
        """Print a line above the panel."""
        self._console.print(Text(line), soft_wrap=True)

    def end(self, lines: Sequence[str]) -> None:
        """Leave the last picture, and print these lines below it."""
        self.close()
        for line in lines:
            self.say(line)

    def close(self) -> None:
        """Leave the last picture, show the cursor again, and give standard output back."""
        try:
            if self._live.is_started and self._last is not None:
                self._draw()
        finally:
            self._live.stop()

    def _draw(self) -> None:
        assert self._header is not None
        assert self._last is not None
        (moment, returns), self._last = self._last, None
        self._due = time.monotonic() + EVERY
        self._live.update(draw(self._header, moment, returns, self._console.width), refresh=True)


def draw(header: Header, moment: Moment, returns: Sequence[float], width: int = 80) -> Group:
    """The panel's lines: none is wider than `width`, and there are fewer than 24 of them whatever the run has."""
    lines = [
        _title(header, moment, width),
        _returns(header, moment, returns),
        _progress(moment, width),
        *_stages(moment.stages),
        *_queues(moment.queues),
        _learning(moment),
        _machine(moment),
    ]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    if moment.verdict is not None:
        lines.append(Text(f"▶ {moment.verdict}", style="bold yellow"))
    return Group(*lines)


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve as bars from its lowest to its highest value, one for each of at most `width` equal parts of it."""
    parts = min(width, len(values))
    edges = [len(values) * k // max(1, parts) for k in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _title(header: Header, moment: Moment, width: int) -> Text:
    plan = header.plan.partition(" ")[0]  # its settings are in the heading
    left = f"{header.method} · {header.env} · {plan} · {header.place} · {header.device}"
    right = f"{duration(moment.seconds)}  ETA {eta(moment)}"
    room = max(1, width - len(right) - 2)
    line = Text(left, style="bold")
    line.truncate(room, overflow="ellipsis", pad=True)
    return Text.assemble(line, "  ", (right, "bold"))


def _returns(header: Header, moment: Moment, returns: Sequence[float]) -> Text:
    line = Text("return ")
    if returns:
        line.append(sparkline(returns, 16) + "  ", style="cyan")
    line.append(episodes(moment), style="bold")
    if moment.best_return is not None:
        line.append(f"  best {score(moment.best_return)}")
    if (last := moment.evaluation) is not None:
        line.append(f"  eval {score(last.mean)} ±{score(last.std, last.mean)}")
    if header.threshold is not None:
        line.append(f"  goal {header.threshold:g}", style="green")
    return line


def _progress(moment: Moment, width: int) -> Text:
    share = min(1.0, moment.env_steps / max(1, moment.total_timesteps))
    right = f"  {count(moment.env_steps)} / {count(moment.total_timesteps)}  {100 * share:.0f} %"
    right += f"  {count(moment.steps_per_second)}/s"
    room = max(1, min(40, width - len("steps  ") - len(right)))
    done = round(share * room)
    return Text.assemble("steps  ", ("━" * done, "green"), ("━" * (room - done), "dim"), right)


def _stages(stages: Sequence[Stage]) -> Iterator[Text]:
    yield Text(f"{'stage':<18}{'per second':>11}{'busy':>7}{'starved':>9}{'blocked':>9}   busiest", style="dim")
    for name, group in _groups(stages):
        busiest = max(group, key=lambda stage: stage.busy)
        line = Text(f"{_named(name, len(group)):<18}{count(sum(s.per_second for s in group)):>11}")
        for share in ("busy", "starved", "blocked"):
            mean = sum(getattr(stage, share) for stage in group) / len(group)
            line.append(f"{mean:>{7 if share == 'busy' else 9}.2f}", style="bold" if mean > 0.6 else "")
        if len(group) > 1:
            line.append(f"   {name}[{busiest.rank}] {busiest.busy:.2f}")
        yield line


def _queues(queues: Sequence[Queue]) -> Iterator[Text]:
    for name, group in _groups(queues):
        fill = min(1.0, sum(queue.fill for queue in group) / len(group))
        bars = round(10 * fill)
        line = Text(f"{_named(name, len(group)):<18}{count(sum(q.per_second for q in group)):>11}   ▕")
        line.append("█" * bars + " " * (10 - bars), style="cyan")
        line.append(f"▏ {100 * fill:.0f} % of {count(sum(queue.capacity for queue in group))}")
        yield line


def _learning(moment: Moment) -> Text:
    lag = f"lag  p50 {moment.lag_p50:g}  p95 {moment.lag_p95:g}  max {moment.lag_max} updates"
    replay = f"replay ratio {moment.replay_ratio:.1f}   updates {count(moment.updates)}"
    return Text(f"{lag}   {dropped(moment.dropped)}   {replay}")


def _machine(moment: Moment) -> Text:
    machine = moment.machine
    shared = "" if machine.shm_mb is None else f"   shared {count(machine.shm_mb)} MB"
    cpu = f"cpu {machine.cpu:.1f} of {machine.cores} cores   memory {count(machine.rss_mb)} MB{shared}"
    return Text.assemble(cpu, "   ", (f"restarts {moment.restarts}", "red" if moment.restarts else ""))


def _named(name: str, copies: int) -> str:
    return f"{name[:12]} ×{copies}" if copies > 1 else name[:17]


def _groups(things: Sequence[T]) -> list[tuple[str, list[T]]]:
    found: dict[str, list[T]] = {}
    for thing in things:
        found.setdefault(thing.name.partition("[")[0], []).append(thing)
    return list(found.items())[:MOST]
