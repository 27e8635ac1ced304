"""`headrace resume RUN`: go on with a run that was stopped, from its last checkpoint."""

from __future__ import annotations

import argparse

from headrace.commands.parser import Parser, count
from headrace.commands.planned import plan_of
from headrace.commands.train import finish
from headrace.record.folder import RunFolder
from headrace.view.choose import NAMES, choose

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Go on as the run's config.json says. Raises ConfigError where there is nothing to go on from."""
    parser = Parser("resume", "Go on with a run from its last checkpoint, in its folder.")
    parser.add_argument("run", metavar="RUN", nargs="?", default="latest", help="its folder, name, or latest (default)")
    parser.add_argument(
        "-n",
        "--total-timesteps",
        type=count,
        metavar="STEPS",
        help="environment steps of the whole run; schedules end where they were to end before (default: as before)",
    )
    parser.add_argument("--place", help="another placement; the weights do not depend on it")
    parser.add_argument("--device", help="another device for the learner")
    parser.add_argument("--ui", choices=NAMES, default="live", help="as for train (default: live)")
    given: argparse.Namespace = parser.parse(argv)
    folder = RunFolder.find(given.run)
    before = folder.config()
    flags = ["--config", str(folder.config_path), "--ui", given.ui, "--init-from", "none"]  # it has gone on from those
    for name in ("place", "device"):
        if (value := getattr(given, name)) is not None:
            flags += [f"--{name}", value]
    if given.total_timesteps is not None:
        horizon = before["horizon"] or before["total_timesteps"]
        flags += ["--total-timesteps", str(given.total_timesteps), "--horizon", str(horizon)]
    planned = plan_of(flags)
    flagged = {key: origin for key, origin in planned.origins.items() if origin == "flag"}
    planned.origins.update({**before["origins"], **flagged})
    return finish(planned, str(folder.path), ["headrace", "resume", *argv], resume=True, screen=choose(given.ui))
