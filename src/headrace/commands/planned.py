"""What the flags of `train`, a configuration file and a preset come to: the values of a run, and where each is from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace import catalog
from headrace.commands.dialects import ALIASES, AMBIGUOUS, CHOICES, KINDS
from headrace.commands.options import SHORT, SWITCHES, Options
from headrace.configuration import NOTES
from headrace.envs.registry import environment
from headrace.errors import ConfigError
from headrace.method import Method
from headrace.plans.checks import check_fresh, check_replayed
from headrace.plans.sync_replay import SyncReplay
from headrace.presets import Preset, choose
from headrace.record.folder import RunFolder
from headrace.record.machine import cores
from headrace.settings import (
    MISSING,
    Flag,
    Setting,
    Unfit,
    arguments,
    convert,
    fields,
    literal,
    made,
    nearest,
    refuse,
    yaml_file,
)

__all__ = ["Group", "Planned", "groups_of", "plan_of"]


class Planned(NamedTuple):
    """What a command line comes to."""

    run: dict[str, Any]
    """The arguments of `Run`."""
    options: Options
    preset: str
    """Its name; empty: there is none."""
    origins: dict[str, str]
    """Where each value came from: "default", "preset ppo/CartPole-v1", "config FILE" or "flag"."""
    lines: list[str]
    """To be said before the run."""


@dataclass(frozen=True)
class Given:
    """A setting that somebody gave."""

    key: str
    value: object
    typed: str
    """As it was written, for messages."""
    origin: str


@dataclass
class Group:
    """The class that the settings of one dotted name go to, and the values that they have so far."""

    make: type[Any] | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    is_open: bool = False
    """Whether it takes other names, too: what gymnasium.make takes."""
    base: dict[str, Any] = field(default_factory=dict)
    """Of the preset."""
    given: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def plan_of(argv: Sequence[str]) -> Planned:
    """What a command line of `train` comes to, with everything that is wrong in one ConfigError."""
    words, flags = arguments(argv, SWITCHES, SHORT)
    problems: list[str] = []
    given = _given(words, flags)
    if words:
        problems.append(f"{' '.join(words)!r}: too many words. headrace train METHOD ENV [flags]")
    for flag in flags:
        if ALIASES.get(flag.key, flag.key) == "config" and flag.value is not None:
            given = [*_configured(flag.value, problems), *given]
    chosen, origins = _choices(given, problems)
    groups, preset = groups_of(chosen, origins, problems)
    given, lines = _still_meant(given, chosen)
    _fill(groups, given, problems)
    found = {name: _object(name, group, chosen, problems) for name, group in groups.items()}
    _check_together(found, problems)
    _check_start(groups["run"].given.get("init_from"), problems)
    devices = _devices(groups["run"].given.get("device", "cpu"), problems)
    refuse(problems)

    options: Options = found["run"]
    for name, group in groups.items():
        for setting in group.settings.values():
            key = setting.name if name in ("method", "run") else f"{name}.{setting.name}"
            origins[key] = group.origins.get(setting.name, "default")
        for extra in group.given.keys() - group.settings.keys():
            origins[f"{name}.{extra}"] = group.origins[extra]
    run = {kind: found[kind] for kind in KINDS}
    run |= {
        name: getattr(options, name)
        for name in ("total_timesteps", "seed", "threads", "non_finite", "horizon", "init_from")
    }
    run["devices"] = devices
    lines = [_precedence(chosen, preset, origins), *lines, *_room(found["plan"], chosen["place"])]
    return Planned(run, options, preset, origins, lines)


def _given(words: list[str], flags: Iterable[Flag]) -> list[Given]:
    """The flags, and the method and the environment among the words, which are taken out of these."""
    given = [Given(flag.key, flag.value, flag.typed, "flag") for flag in flags]
    both = len(words) > 1
    for kind in ("method", "env"):
        if words and (both or not any(CHOICES.get(one.key) == kind for one in given)):
            given.append(Given(kind, words.pop(0), kind.upper(), "flag"))
    return given


def _configured(path: str, problems: list[str]) -> list[Given]:
    """The settings of a file, whose names may be flat, dotted, or nested under method, plan, env, place and run."""
    content = yaml_file(path)
    opaque = content.get("opaque", [])
    given = []
    for name, value in content.items():
        if name in NOTES:
            continue
        nested = value if name in (*KINDS, "run") and isinstance(value, dict) else {None: value}
        for inner, one in nested.items():
            dotted = name if inner is None else inner if name == "run" else f"{name}.{inner}"
            key = dotted.replace("-", "_")
            if name in opaque:
                problems.append(f"{dotted} in {path} was an object of Python, which no file holds: leave it out there.")
            else:
                given.append(Given(key, one, f"{dotted} in {path}", f"config {path}"))
    return given


def _choices(given: Iterable[Given], problems: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The names of method, plan, environment and placement that were given, and where each came from."""
    chosen: dict[str, str] = {}
    origins: dict[str, str] = {}
    for one in given:
        kind = CHOICES.get(one.key)
        if kind:
            if not isinstance(one.value, str):
                problems.append(f"{one.typed}={one.value!r}: expected a name.")
                continue
            if origins.get(kind) == one.origin:
                problems.append(f"{one.typed} {one.value}: the {kind} is given twice, {chosen[kind]!r} before.")
            chosen[kind], origins[kind] = one.value, one.origin
    for kind in ("method", "env"):
        if kind not in chosen:
            example = f"headrace train {chosen.get('method', 'ppo')} {chosen.get('env', 'CartPole-v1')}"
            problems.append(f"no {kind} was given. For example: {example}. All: headrace list {kind}s")
    return chosen, origins


def _still_meant(given: Iterable[Given], chosen: Mapping[str, str]) -> tuple[list[Given], list[str]]:
    """The settings, without those in a file of another plan or placement than is chosen, and what to say of that."""
    given = list(given)
    named = {CHOICES[one.key]: one for one in given if one.key in CHOICES and one.origin != "flag"}
    others = {kind: one for kind, one in named.items() if catalog.called(str(one.value)) != chosen.get(kind)}

    def is_meant(one: Given) -> bool:
        key = ALIASES.get(one.key, one.key)
        kind = key.partition(".")[0] if "." in key else "run" if key in Options.__dataclass_fields__ else "method"
        return one.key not in CHOICES and (one.origin == "flag" or kind not in others)

    lines = [f"{one.typed} is {one.value}, so its settings there do not count" for one in others.values()]
    return [one for one in given if is_meant(one)], lines


def groups_of(chosen: dict[str, str], origins: dict[str, str], problems: list[str]) -> tuple[dict[str, Group], str]:
    """The classes that the settings go to, with a preset's values, and the preset's name. Completes the choices."""
    groups = {name: Group() for name in (*KINDS, "run")}
    groups["run"] = Group(Options, fields(Options))

    def add(kind: str) -> None:
        try:
            chosen[kind], found = catalog.find(kind, chosen[kind])
            groups[kind].settings, groups[kind].make = fields(found), found
        except ConfigError as error:
            problems.append(str(error))

    if "method" in chosen:
        add("method")
    preset = choose(chosen.get("method", ""), chosen.get("env", ""))
    plan = catalog.name_of("plan", type(preset.plan)) if preset else _plan_for(groups["method"].make)
    for kind, usual in (("plan", plan), ("place", preset.place if preset else "inline")):
        if kind not in chosen:
            chosen[kind], origins[kind] = usual, f"preset {preset.name}" if preset else "default"
        add(kind)
    if "env" in chosen:
        _add_env(groups["env"], chosen["env"], problems)
    if preset:
        _begin_with(preset, groups)
    return groups, preset.name if preset else ""


def _plan_for(method: type[Any] | None) -> str:
    """The plan of a method without a preset: what it learns from decides."""
    replays = method is not None and getattr(method, "sampling", None) is not Method.sampling
    return "sync-replay" if replays else "sync-batches"


def _begin_with(preset: Preset, groups: dict[str, Group]) -> None:
    """Take a preset's values, as far as they belong to the classes that were chosen."""
    groups["run"].base |= {"total_timesteps": preset.total_timesteps, "threads": preset.threads}
    for kind, value in (("method", preset.method), ("plan", preset.plan)):
        if groups[kind].make is type(value):
            groups[kind].base |= {name: getattr(value, name) for name in groups[kind].settings}
    for name, text in preset.env.items():
        if name in groups["env"].settings:
            groups["env"].base[name] = convert(text, groups["env"].settings[name].type)
    for group in groups.values():
        for name, value in group.base.items():
            if value != group.settings[name].default:
                group.origins[name] = f"preset {preset.name}"


def _add_env(group: Group, id: str, problems: list[str]) -> None:
    """What kind of environment an id names decides which settings it has."""
    try:
        kind = type(environment(id))
    except ConfigError as error:
        problems.append(str(error))
        return
    settings = fields(kind)
    group.make = kind
    group.is_open = "kwargs" in settings
    group.settings = {name: one for name, one in settings.items() if name not in ("id", "game", "kwargs")}


def _fill(groups: dict[str, Group], given: Iterable[Given], problems: list[str]) -> None:
    """Put what was given where it belongs, as what it has to be."""
    spelled: dict[tuple[str, str], str] = {}  # what was given in which source: how it was written there
    for one in given:
        leaf = one.key.rpartition(".")[2]
        if leaf in AMBIGUOUS and not any(leaf in group.settings for group in groups.values()):
            problems.append(f"{one.typed}: {leaf} is {AMBIGUOUS[leaf]}")
            continue
        place = _place_of(one, groups)
        if place is None:
            problem = _unknown(one, groups)
            if problem:
                problems.append(problem)
            continue
        kind, name, value = place
        source = (one.origin, f"{kind}.{name}")
        if source in spelled:
            problems.append(f"{one.typed}: given twice, before as {spelled[source]}.")
        spelled[source] = one.typed
        group = groups[kind]
        setting = group.settings.get(name)
        try:
            if value is None and one.origin == "flag":
                if setting is None or setting.type is not bool:
                    raise Unfit("a value after it")
                value = True
            group.given[name] = literal(value) if setting is None else convert(value, setting.type)
            group.origins[name] = one.origin
        except Unfit as error:
            came = "" if value is None else f" {value!r}"
            problems.append(f"{one.typed}{came}: expected {error}.")


def _place_of(one: Given, groups: Mapping[str, Group]) -> tuple[str, str, object] | None:
    """The group, the name and the value of a setting, by its own name, an alias, or `no_` before a switch."""
    for key, value in ((one.key, one.value), (ALIASES.get(one.key, ""), one.value), (_denied(one), "false")):
        first, dot, rest = key.partition(".")
        for kind, name in ((first, rest),) if dot else (("run", key), ("method", key)):
            group = groups.get(kind, Group())
            if name in group.settings or (dot and name and group.is_open and group.make):
                return kind, name, value
    return None


def _denied(one: Given) -> str:
    """What `--no-anneal-lr` denies, `anneal_lr`; empty for every other flag."""
    return one.key.removeprefix("no_") if one.key.startswith("no_") and one.value is None else ""


def _unknown(one: Given, groups: Mapping[str, Group]) -> str | None:
    """What to say of a name that there is not. None where nobody can know, since its class was not found either."""
    first, dot, leaf = one.key.rpartition(".")
    owner = groups[first].make if first in groups else None
    if (first in groups and owner is None) or (not dot and groups["method"].make is None):
        return None
    names = {
        (name if kind in ("method", "run") else f"{kind}.{name}"): name
        for kind, group in groups.items()
        for name in group.settings
    }
    close = [key for key, name in names.items() if name == leaf]
    if not close:
        own = set(groups[first].settings) if owner else set(names.values())
        close = [key for like in nearest(leaf, own) for key, name in names.items() if name == like]
    if one.origin == "flag":
        close = [f"--{key.replace('_', '-')}" for key in close]
    what = f"{owner.__name__} has no {leaf}" if owner else "unknown"
    return f"{one.typed}: {what}. Nearest: {', '.join(close[:3])}."


def _object(name: str, group: Group, chosen: Mapping[str, str], problems: list[str]) -> Any:
    """What a group comes to; None where something is wrong with it, which is added to the problems."""
    if group.make is None:
        return None
    missing = [
        setting.name
        for setting in group.settings.values()
        if setting.default is MISSING and setting.name not in (group.given.keys() | group.base.keys())
    ]
    if missing and name != "env":
        prefix = "" if name == "method" else f"{name}."
        problems += [
            f"{chosen[name]} needs a value for {prefix}{setting}, which has no default." for setting in missing
        ]
        return None
    if name == "env":
        try:
            env = environment(chosen["env"], **{**group.base, **group.given})
            env.spec  # noqa: B018  # makes an environment once: what it does not take is found here
            return env
        except ConfigError as error:
            problems.append(str(error))
            return None
    found, wrong = made(group.make, group.base, group.given)
    problems += wrong
    return None if wrong else found


def _check_together(found: Mapping[str, Any], problems: list[str]) -> None:
    """Whether the method can learn from what the plan moves."""
    method, plan = found["method"], found["plan"]
    sizes = [getattr(plan, name, None) for name in ("num_steps", "num_envs")]
    if method is not None and plan is not None:
        try:
            if isinstance(plan, SyncReplay):
                check_replayed(method, plan)
            elif catalog.name_of("plan", type(plan)) in catalog.PLANS:
                check_fresh(method, plan)
            if method.sampling is None and None not in sizes:
                method.check(*sizes)
        except ConfigError as error:
            problems.append(str(error))


def _check_start(run: str | None, problems: list[str]) -> None:
    """Whether there is a run whose weights to begin with."""
    if run is not None:
        try:
            RunFolder.find(run)
        except ConfigError as error:
            problems.append(f"--init-from {run}: {error}")


def _devices(text: str, problems: list[str]) -> tuple[str, ...]:
    """The devices that were asked for, all of which are there."""
    names = ["cpu" if name == "auto" else name for name in map(str.strip, text.split(","))]
    wrong = [name for name in names if name not in ("cpu", "cuda") and not name.removeprefix("cuda:").isdigit()]
    if wrong:
        problems.append(f"--device {text}: expected cpu, cuda, or cuda: with a number, several with commas.")
    elif any(name != "cpu" for name in names):
        import torch

        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        highest = max(int(name.removeprefix("cuda").removeprefix(":") or 0) for name in names if name != "cpu")
        if highest >= there:
            problems.append(f"--device {text}: asks for {highest + 1} CUDA devices, and {there} are there. Use cpu.")
    return tuple(names)


def _precedence(chosen: Mapping[str, str], preset: str, origins: Mapping[str, str]) -> str:
    """One line: which source overrides which, and what the later ones say."""
    parts = [f"preset {preset}" if preset else f"(no preset for {chosen['method']} on {chosen['env']})"]
    for origin in dict.fromkeys(origin for origin in origins.values() if origin.startswith("config ")):
        parts.append(origin)
    told = ("method", "env", "config", "run", "ui", "seeds")  # elsewhere, or of no weight
    names = [key for key, origin in origins.items() if origin == "flag" and key not in told]
    if names:
        parts.append(f"flags {', '.join(names)}")
    return "settings  " + " < ".join(["defaults", *parts])


def _room(plan: Any, place: str) -> list[str]:
    """What to say of more roles than cores."""
    actors = getattr(plan, "actors", None)
    if place != "processes" or not isinstance(actors, int) or actors + 1 <= cores():
        return []
    return [
        f"cores     {actors + 1} processes are asked for ({actors} actors and the learner), and {cores()} cores are "
        "available: they take turns"
    ]
