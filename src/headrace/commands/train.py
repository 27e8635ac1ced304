"""`headrace train METHOD ENV`: a run as the command line says, or several with one seed each."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from headrace.commands.dialects import CHOICES
from headrace.commands.options import SHORT, SWITCHES, Options
from headrace.settings import MISSING, Setting, arguments, fields, refuse, shown
from headrace.view.choose import choose

if TYPE_CHECKING:
    from headrace.commands.planned import Group, Planned
    from headrace.run import Result
    from headrace.view.view import View

__all__ = ["finish", "main"]

USAGE = """\
headrace train METHOD ENV [flags]

METHOD, --plan and --place are names of `headrace list`, or package.module:Class. ENV is a registered id
(`headrace list envs`), envpool:ID, or package.module:Class. The method's settings are flags by themselves, those of the
rest begin with --plan., --place. or --env., where any argument of the environment can stand, too. What is not given is
taken from a preset, which `headrace train METHOD ENV --help` shows.

  headrace train ppo CartPole-v1
  headrace train ppo CartPole-v1 --plan.actors 2 --place processes --learning-rate 3e-4 -n 1e6
  headrace train a2c my_package.mazes:Maze --env.size 9 --config my.yaml --seeds 5
"""


def main(argv: list[str]) -> int:
    """Train as the command line says. Raises ConfigError for what cannot be done, before anything is started."""
    words, flags = arguments(argv, SWITCHES, SHORT)
    if any(flag.key == "help" for flag in flags):
        chosen = {CHOICES[flag.key]: flag.value for flag in flags if flag.key in CHOICES and flag.value is not None}
        for kind in ("method", "env"):
            if words and kind not in chosen:
                chosen[kind] = words.pop(0)
        print("\n".join(_help(chosen)))
        return 0
    from headrace.commands.planned import plan_of

    return _train(plan_of(argv), ["headrace", "train", *argv])


def _help(chosen: dict[str, str]) -> Iterator[str]:
    """The usage; with a method all its settings, and with an environment also those and the preset's values."""
    if "method" not in chosen:
        yield USAGE
        yield from _section("run", fields(Options), "", {})
        yield "\nThe settings of a method: headrace train METHOD --help"
        return
    from headrace.commands.planned import groups_of

    problems: list[str] = []
    groups, preset = groups_of(chosen, {}, problems)
    refuse(problems)
    yield f"headrace train {chosen['method']} {chosen.get('env', 'ENV')} [flags]"
    if "env" in chosen:
        yield f"\npreset {preset}" if preset else f"\nno preset for {chosen['method']} on {chosen['env']}"
    for kind in ("method", "plan", "place", "env", "run"):
        group = groups[kind]
        if group.make is not None:
            prefix = "" if kind in ("method", "run") else f"{kind}."
            yield from _section(_title(kind, group, chosen), group.settings, prefix, group.base)
    if groups["env"].is_open:
        yield "  --env.ANYTHING\n      Goes to the environment as it is made."


def _title(kind: str, group: Group, chosen: dict[str, str]) -> str:
    summary = (group.make.__doc__ or "").strip().partition("\n")[0] if group.make else ""
    return kind if kind == "run" else f"{kind} {chosen[kind]}: {summary}"


def _section(title: str, settings: dict[str, Setting], prefix: str, preset: dict[str, object]) -> Iterator[str]:
    """A heading, and for each setting its flag, its default, the preset's value where that differs, and its meaning."""
    width = min(100, shutil.get_terminal_size().columns)
    yield f"\n{title}"
    for setting in settings.values():
        usual = "" if setting.default is MISSING else f" = {shown(setting.default)}"
        value = preset.get(setting.name, setting.default)
        other = "" if value == setting.default else f"   preset: {shown(value)}"
        yield f"  --{prefix}{setting.name.replace('_', '-')}{usual}{other}"
        if setting.help:
            yield textwrap.fill(setting.help, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def finish(planned: Planned, folder: str | None, command: Sequence[str], *, resume: bool, screen: View) -> int:
    """Train, and return the exit status: 130 after Ctrl-C, 143 after SIGTERM."""
    result = _trained(planned, planned.options.seed, folder, command, resume, screen)
    return 0 if result.signal is None else 128 + result.signal


def _train(planned: Planned, command: Sequence[str]) -> int:
    """Train with each seed. A run that is stopped is the last one."""
    options = planned.options
    if options.seeds == 1:
        return finish(planned, options.run, command, resume=False, screen=choose(options.ui))
    returns: list[float] = []
    for seed in range(options.seed, options.seed + options.seeds):
        folder = None if options.run is None else str(Path(options.run) / f"s{seed}")
        result = _trained(planned, seed, folder, command, False, choose(options.ui))
        if result.signal is not None:
            return 128 + result.signal
        returns.append(result.summary["final_return"])
    choose("plain" if options.ui == "live" else options.ui).say(
        f"{len(returns)} seeds: final return {fmean(returns):.1f} ± {pstdev(returns):.1f}, the mean and the standard "
        f"deviation of {', '.join(f'{one:.1f}' for one in returns)}"
    )
    return 0


def _trained(
    planned: Planned, seed: int, folder: str | None, command: Sequence[str], resume: bool, screen: View
) -> Result:
    from headrace.run import Run

    options = planned.options
    try:
        for line in planned.lines:
            screen.say(line)
        return Run(**{**planned.run, "seed": seed}).train(
            folder,
            resume=resume,
            view=screen,
            eval_every=options.eval_every,
            eval_episodes=options.eval_episodes,
            checkpoint_every=options.checkpoint_every,
            keep=options.keep,
            track=options.track,
            preset=planned.preset,
            origins=planned.origins,
            command=command,
        )
    finally:
        screen.close()
