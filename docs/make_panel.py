"""docs/panel.svg from a run: the panel as it stood at one of its moments, drawn by the code that terminals get.

    headrace train ppo CartPole-v1 -n 400_000 --place processes --run runs/panel
    python docs/make_panel.py runs/panel --at 0.7

Whatever the picture shows was measured in that run.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from headrace.record.folder import RunFolder
from headrace.view.moment import Moment
from headrace.view.panel import draw
from headrace.view.wording import heading

WIDTH = 100


def chosen(moments: Sequence[Moment], share: float) -> Moment:
    """The last moment at which not more than this share of the run was over."""
    return [moment for moment in moments if moment.env_steps <= share * moment.total_timesteps][-1]


def picture(folder: RunFolder, share: float) -> str:
    """The heading and the panel of a run as SVG."""
    header, moment = folder.header(), chosen(folder.timeline(), share)
    rows = [row for row in folder.metrics() if row.get("charts/return_mean100") is not None]
    returns = [row["charts/return_mean100"] for row in rows if row["global_step"] <= moment.env_steps]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in heading(header):
        console.print(Text(line, no_wrap=True, overflow="ellipsis"))
    console.print(draw(header, moment, returns, WIDTH))
    title = f"headrace train {header.method} {header.env}"
    svg = console.export_svg(title=title, unique_id="headrace")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # from the net; any font of one width will do
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--at", type=float, default=0.3, help="how much of the run is over (default: 0.3)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("panel.svg"))
    given = parser.parse_args()
    given.output.write_text(picture(RunFolder.find(given.run), given.at), encoding="utf-8")


if __name__ == "__main__":
    main()
