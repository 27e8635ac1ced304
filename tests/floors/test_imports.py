"""The import rules: what each part of the source may know about.

Every rule is a function from sources, {module name: text}, to complaints, so that it is tried on planted text too: a
rule that cannot fail keeps nothing. A package's own file is named `headrace.place.__init__`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "headrace"

Sources = Mapping[str, str]
Rule = Callable[[Sources], list[str]]

LEVELS = {
    "cli": 11,
    "commands": 10,
    "run": 9,
    "presets": 9,
    "policy": 8,
    "record": 8,
    "configuration": 8,
    "plan": 7,
    "catalog": 2,
    "view": 7,
    "plans": 7,
    "checkpoint": 7,
    "methods": 6,
    "actor": 6,
    "learner": 6,
    "critics": 5,
    "q_nets": 5,
    "nets": 4,
    "normalizers": 3,
    "parameters": 3,
    "encoding": 3,
    "durable": 1,
    "finite": 4,
    "tally": 4,
    "distributions": 3,
    "method": 4,
    "replay": 4,
    "envs": 4,
    "place": 4,
    "data": 3,
    "channel": 2,
    "spaces": 2,
    "spec_json": 3,
    "settings": 1,
    "struct": 1,
    "targets": 1,
    "losses": 1,
    "report": 3,
    "errors": 0,
}
"""A module or folder imports only what has a lower number, and itself. `__main__` counts as `cli`.

The order of DESIGN.md §4, with the errors below and the command line above their neighbours."""

ROOT = "headrace.__init__"
"""Re-exports the public names: exempt from the rules about which part may name which."""

COMMANDS = (
    "headrace.cli",
    "headrace.commands",
    "headrace.run",
    "headrace.presets",
    "headrace.policy",
    "headrace.configuration",
    "headrace.__main__",
)
CONCRETE = ("headrace.methods", "headrace.plans", "headrace.place", "headrace.envs")
SEAMS = ("headrace.envs.base",)
"""Inside a concrete folder, but a protocol that everybody may name."""

LEARNING = tuple(
    f"headrace.{name}"
    for name in (
        *("method", "methods", "actor", "learner", "data", "nets", "distributions", "targets", "losses"),
        *("replay", "envs", "plans", "run", "cli"),
    )
)
LEARNING_WORD = re.compile(r"(?<![a-z])(rewards?|observations?|episodes?|polic(?:y|ies)|env_steps?)(?![a-z])")

ENVIRONMENT_PACKAGES = (
    *("ale_py", "brax", "bsuite", "crafter", "dm_control", "dm_env", "envpool", "gym", "gymnasium", "gymnax"),
    *("highway_env", "jumanji", "minatar", "minigrid", "mujoco", "mujoco_playground", "pettingzoo", "procgen"),
    *("shimmy", "vizdoom"),
)


# Reading the source ---------------------------------------------------------------------------------------------------


def within(name: str, parts: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of these modules, or lies inside one of these packages."""
    return any(name == part or name.startswith(part + ".") for part in parts)


def part_of(name: str) -> str:
    """The module or folder at the top of the package that a module belongs to; empty for the package itself."""
    top = name.removeprefix("headrace").removeprefix(".").partition(".")[0]
    return {"__init__": "", "__main__": "cli"}.get(top, top)


def imports(module: str, sources: Sources) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module imports, anywhere in it, for types only or by a call included."""
    known = {name.removesuffix(".__init__") for name in sources} | {f"headrace.{name}" for name in LEVELS}
    for node in ast.walk(ast.parse(sources[module], module)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=origin, names=names, level=level):
                above = module.split(".")[:-level] if level else []
                base = ".".join([*above, *([origin] if origin else [])])
                for alias in names:
                    inner = f"{base}.{alias.name}"
                    yield node.lineno, inner if inner in known else base
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and every string constant, f-strings included, that is not documentation."""
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    line = 1
    for node in ast.walk(tree):
        line = getattr(node, "lineno", line)
        for field, value in ast.iter_fields(node):
            if field in ("kind", "type_comment") or id(node) in documentation:
                continue
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield line, text


def snake_case(text: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()


# The rules ------------------------------------------------------------------------------------------------------------


def forbid(sources: Sources, who: Callable[[str], bool], what: Callable[[str, str], bool], why: str) -> list[str]:
    """A complaint for each import of a `what(name, importer)` by a module that is a `who(module)`."""
    return [
        f"{module}:{line} imports {name}: {why}"
        for module in sources
        if who(module)
        for line, name in imports(module, sources)
        if what(name, module)
    ]


def methods_know_no_distribution(sources: Sources) -> list[str]:
    return forbid(
        sources,
        lambda module: within(module, ("headrace.methods",)),
        lambda name, _: within(name, ("headrace.channel", "headrace.plans", "headrace.place")),
        "a method does not know that it is distributed",
    )


def placements_import_no_learning(sources: Sources) -> list[str]:
    return forbid(
        sources,
        lambda module: within(module, ("headrace.place",)),
        lambda name, _: within(name, LEARNING),
        "a placement moves Structs and knows no reinforcement learning",
    )


def placements_say_no_learning_word(sources: Sources) -> list[str]:
    return [
        f"{module}:{line} says {found[0]!r}: a placement moves Structs and knows no reinforcement learning"
        for module, source in sources.items()
        if within(module, ("headrace.place",))
        for line, text in words(ast.parse(source, module))
        for found in LEARNING_WORD.finditer(snake_case(text))
    ]


def plans_know_no_method_and_no_placement(sources: Sources) -> list[str]:
    return forbid(
        sources,
        lambda module: within(module, ("headrace.plans",)),
        lambda name, _: within(name, ("headrace.methods", "headrace.place")),
        "a plan is handed its method and its placement",
    )


def only_commands_name_concrete_things(sources: Sources) -> list[str]:
    return forbid(
        sources,
        lambda module: module != ROOT and not within(module, COMMANDS),
        lambda name, importer: (
            within(name, CONCRETE) and not within(name, SEAMS) and part_of(name) != part_of(importer)
        ),
        "only run.py and cli.py name concrete methods, plans, placements and environments",
    )


def only_its_placement_imports_ray(sources: Sources) -> list[str]:
    return forbid(
        sources,
        lambda module: not within(module, ("headrace.place.ray",)),
        lambda name, _: within(name, ("ray",)),
        "only place/ray.py imports ray",
    )


def only_envs_import_environment_packages(sources: Sources) -> list[str]:
    return forbid(
        sources,
        lambda module: not within(module, ("headrace.envs",)),
        lambda name, _: within(name, ENVIRONMENT_PACKAGES),
        "only files of envs/ import environment packages",
    )


def imports_point_downward(sources: Sources) -> list[str]:
    complaints = [
        f"{module} has no level: add {part_of(module)!r} to LEVELS"
        for module in sources
        if module != ROOT and part_of(module) not in LEVELS
    ]

    def upward(name: str, importer: str) -> bool:
        mine, theirs = part_of(importer), part_of(name)
        return within(name, ("headrace",)) and mine != theirs and LEVELS.get(theirs, 99) >= LEVELS.get(mine, 0)

    return complaints + forbid(
        sources, lambda module: module != ROOT, upward, "imports point to a lower level only (see LEVELS)"
    )


def only_placements_read_the_clock(sources: Sources) -> list[str]:
    """No import of time, and no datetime.now, utcnow or today: roles use the placement's clock."""

    def elsewhere(module: str) -> bool:
        # What people look at tells the time, and check_env measures what a step costs; neither is a role.
        told = ("headrace.cli", "headrace.commands", "headrace.record", "headrace.view", "headrace.envs.trial")
        return not within(module, ("headrace.place", *told))

    why = "roles use the placement's clock; only place/ and what people look at read the machine's"
    complaints = forbid(sources, elsewhere, lambda name, _: within(name, ("time",)), why)
    for module in filter(elsewhere, sources):
        tree = ast.parse(sources[module], module)
        dates = {"datetime", "date"} | {
            alias.asname
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "datetime"
            for alias in node.names
            if alias.asname
        }
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(
                    attr="now" | "utcnow" | "today" as reading, value=ast.Name(id=owner) | ast.Attribute(attr=owner)
                ) if owner in dates:
                    complaints.append(f"{module}:{node.lineno} reads {owner}.{reading}: {why}")
    return complaints


# The tests ------------------------------------------------------------------------------------------------------------

RULES = (
    methods_know_no_distribution,
    placements_import_no_learning,
    placements_say_no_learning_word,
    plans_know_no_method_and_no_placement,
    only_commands_name_concrete_things,
    only_its_placement_imports_ray,
    only_envs_import_environment_packages,
    imports_point_downward,
    only_placements_read_the_clock,
)

VIOLATIONS: list[tuple[Rule, str, str]] = [
    (methods_know_no_distribution, "headrace.methods.ppo", "import headrace.channel"),
    (methods_know_no_distribution, "headrace.methods.ppo", "from headrace.channel import Lanes"),
    (methods_know_no_distribution, "headrace.methods.ppo", "from headrace import channel"),
    (methods_know_no_distribution, "headrace.methods.ppo", "from ..channel import Lanes"),
    (methods_know_no_distribution, "headrace.methods.ppo", "from .. import plans"),
    (methods_know_no_distribution, "headrace.methods.ppo", "def f():\n    from headrace.place.inline import Inline"),
    (methods_know_no_distribution, "headrace.methods.__init__", "from ..place import Inline"),
    (placements_import_no_learning, "headrace.place.inline", "from headrace.data import Rollout"),
    (placements_import_no_learning, "headrace.place.inline", "import headrace.method as m"),
    (placements_import_no_learning, "headrace.place.inline", "if TYPE_CHECKING:\n    from ..learner import Learner"),
    (placements_import_no_learning, "headrace.place.link.tcp", "from ...replay.ring import Ring"),
    (placements_import_no_learning, "headrace.place.inline", "importlib.import_module('headrace.envs.toy')"),
    (placements_say_no_learning_word, "headrace.place.inline", "reward = 0"),
    (placements_say_no_learning_word, "headrace.place.inline", "slot.last_observation"),
    (placements_say_no_learning_word, "headrace.place.inline", "def put(self, episode): ..."),
    (placements_say_no_learning_word, "headrace.place.inline", "put(policy=1)"),
    (placements_say_no_learning_word, "headrace.place.inline", "class RewardRing: ..."),
    (placements_say_no_learning_word, "headrace.place.inline", "note['env_steps']"),
    (placements_say_no_learning_word, "headrace.place.inline", "f'{n} episodes were put'"),
    (placements_say_no_learning_word, "headrace.place.inline", "import policies"),
    (placements_say_no_learning_word, "headrace.place.inline", "def f():\n    global env_steps"),
    (plans_know_no_method_and_no_placement, "headrace.plans.sync_batches", "from headrace.methods.ppo import PPO"),
    (plans_know_no_method_and_no_placement, "headrace.plans.sync_batches", "from ..place.threads import Threads"),
    (only_commands_name_concrete_things, "headrace.learner", "from headrace.methods.ppo import PPO"),
    (only_commands_name_concrete_things, "headrace.actor", "from headrace.envs.toy import Counter"),
    (only_commands_name_concrete_things, "headrace.actor", "from headrace.envs import Counter"),
    (only_commands_name_concrete_things, "headrace.checkpoint", "import headrace.plans.sync_batches"),
    (only_commands_name_concrete_things, "headrace.envs.toy", "from headrace.place import Inline"),
    (only_its_placement_imports_ray, "headrace.place.processes", "import ray"),
    (only_its_placement_imports_ray, "headrace.place.link", "from ray.util import state"),
    (only_its_placement_imports_ray, "headrace.cli", "def f():\n    __import__('ray')"),
    (only_envs_import_environment_packages, "headrace.actor", "import gymnasium as gym"),
    (only_envs_import_environment_packages, "headrace.cli", "from ale_py import ALEInterface"),
    (only_envs_import_environment_packages, "headrace.__init__", "import envpool"),
    (imports_point_downward, "headrace.errors", "from headrace.struct import Struct"),
    (imports_point_downward, "headrace.struct", "import headrace.channel"),
    (imports_point_downward, "headrace.targets", "from .losses import clipped"),
    (imports_point_downward, "headrace.data", "from headrace import Rollout"),
    (imports_point_downward, "headrace.data", "import headrace"),
    (imports_point_downward, "headrace.method", "from headrace.learner import Learner"),
    (imports_point_downward, "headrace.place.inline", "from headrace.envs.base import VectorEnv"),
    (imports_point_downward, "headrace.plans.sync_batches", "from .. import run"),
    (imports_point_downward, "headrace.utils", "import torch"),
    (only_placements_read_the_clock, "headrace.actor", "import time"),
    (only_placements_read_the_clock, "headrace.run", "from time import monotonic"),
    (only_placements_read_the_clock, "headrace.__init__", "import os, time as t"),
    (only_placements_read_the_clock, "headrace.run", "import datetime\ndatetime.datetime.now()"),
    (only_placements_read_the_clock, "headrace.run", "from datetime import datetime as day\nstamp = day.utcnow"),
]

CLEAN = {
    "headrace.__init__": "from headrace.place.inline import Inline\nfrom headrace.methods.ppo import PPO",
    "headrace.__main__": "from headrace.cli import main",
    "headrace.cli": "import time\nfrom headrace.run import Run\nfrom headrace.place.ray import Ray",
    "headrace.run": "from headrace.methods import ppo\nfrom headrace.envs import toy\nfrom . import plans",
    "headrace.plans.sync_batches": "from ..channel import wait\nfrom ..actor import Actor\nfrom .share import share",
    "headrace.plans.share": "import datetime\nfrom headrace.errors import ConfigError",
    "headrace.methods.ppo": "from headrace.methods.a2c import A2C\nfrom headrace import losses, nets\nimport timeit",
    "headrace.methods.a2c": "from headrace.method import Method\nreward = 'episode'",
    "headrace.actor": "from headrace.envs.base import VectorEnv\nfrom headrace.method import Method",
    "headrace.envs.base": "from ..data import Spec\nnow = clock.now()",
    "headrace.envs.toy": "import gymnasium\nfrom headrace.envs import base\nfrom . import __doc__",
    "headrace.place.__init__": "from .inline import Inline",
    "headrace.place.ray": "import ray\nfrom headrace.place.inline import Inline",
    "headrace.place.inline": (
        '"""No reward here."""\nimport time\nfrom headrace.channel import Crew\n'
        'field: int\n"""Not an episode."""\nrewarding = policed = "periodic envy"  # nor an observation'
    ),
    "headrace.channel": "from headrace.struct import Struct\nfrom headrace.errors import Closed",
}


@pytest.fixture(scope="module")
def sources() -> Sources:
    return {
        ".".join(("headrace", *path.relative_to(SOURCE).with_suffix("").parts)): path.read_text(encoding="utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


@pytest.mark.parametrize("rule", RULES)
def test_the_source_keeps_the_rule(rule: Rule, sources: Sources) -> None:
    assert sources, f"no source under {SOURCE}"
    assert rule(sources) == []


@pytest.mark.parametrize(("rule", "module", "text"), VIOLATIONS)
def test_the_rule_finds_a_planted_violation(rule: Rule, module: str, text: str) -> None:
    clean = {name: source for name, source in CLEAN.items() if name != module}
    complaints = rule({**clean, module: text})
    assert len(complaints) == 1
    assert complaints[0].startswith(module)


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_accepts_what_is_allowed(rule: Rule) -> None:
    assert rule(CLEAN) == []


def test_every_rule_is_seen_to_fail() -> None:
    assert {rule for rule, _, _ in VIOLATIONS} == set(RULES)
