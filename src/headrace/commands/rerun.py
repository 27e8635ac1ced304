"""`headrace rerun RUN`: execute an asynchronous run again, bit for bit, on any placement."""

from __future__ import annotations

import argparse

from headrace.commands.parser import Parser, count
from headrace.commands.planned import plan_of
from headrace.errors import ConfigError
from headrace.record.folder import RunFolder

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run it as its schedule says. Raises ConfigError where there is none, and where it comes to other weights."""
    parser = Parser("rerun", "Execute an asynchronous run again, with equal weights at every update. Writes nothing.")
    parser.add_argument("run", metavar="RUN", nargs="?", default="latest", help="its folder, name, or latest (default)")
    parser.add_argument("--place", default="inline", help="where (default: inline, where a debugger can be attached)")
    parser.add_argument("--until", type=count, metavar="UPDATE", help="stop after this update (default: go to the end)")
    given: argparse.Namespace = parser.parse(argv)
    folder = RunFolder.find(given.run)
    if not folder.schedule_path.exists():
        raise ConfigError(
            f"{folder.path} has no schedule.txt: only a run of an asynchronous plan writes one. A synchronous one is "
            "the same again from its seed: see command.txt there."
        )
    from headrace.plans.schedule import Schedule
    from headrace.run import Run

    with open(folder.schedule_path) as file:
        schedule = Schedule.read(file)
    if schedule.heading["start"]:
        raise ConfigError(
            f"{folder.path} was resumed at update {schedule.heading['start']}, and its schedule begins there. Rerun it "
            "from Python, with the checkpoint of that update: Run(…).reports(state=…, schedule=…)."
        )
    run = Run(**plan_of(["--config", str(folder.config_path), "--place", given.place]).run)
    version = 0
    with run.reports(schedule=schedule) as reports:
        for report in reports:
            version = report.version
            if version == given.until:
                break
    result = folder.result()
    print(f"rerun of {folder.path}: {version:,} updates, each with the weights that it had made before")
    print(f"weights {run.learner.digest()}")
    if given.until is None and result is not None and result["weights_sha256"] != run.learner.digest():
        raise ConfigError(f"the run ended with weights {result['weights_sha256']}; its schedule ends before that.")
    return 0
