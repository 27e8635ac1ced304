"""The settings layer: fields with their docstrings, conversion, nearest names, all problems at once, precedence."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from gymnasium.wrappers import FlattenObservation, TimeAwareObservation

from headrace import A2C, PPO, Atari, ConfigError, Inline, Processes, SyncBatches, SyncReplay, Threads
from headrace.catalog import METHODS, PLACES, PLANS, find, summary
from headrace.commands.dialects import ALIASES
from headrace.commands.options import Options
from headrace.commands.planned import plan_of
from headrace.presets import choose
from headrace.settings import MISSING, Unfit, arguments, convert, fields, literal, made, nearest, refuse, shown


@dataclass(frozen=True)
class Sizes:
    """Two settings that have to fit each other."""

    rows: int = 8
    """How many rows
    there are."""
    parts: int = 1
    name: str = dataclasses.field(default_factory=lambda: "x")
    """What it is called."""

    def __post_init__(self) -> None:
        for key in ("rows", "parts"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)}: give at least 1.")
        if self.rows % self.parts:
            raise ConfigError(f"rows {self.rows} cannot be cut into {self.parts} parts.")


def test_fields_have_the_docstring_below_them_their_type_and_their_default() -> None:
    found = fields(Sizes)
    assert [(one.name, one.type, one.default, one.help) for one in found.values()] == [
        ("rows", int, 8, "How many rows there are."),
        ("parts", int, 1, ""),
        ("name", str, "x", "What it is called."),
    ]


@pytest.mark.parametrize("cls", [PPO, A2C, SyncBatches, Inline, Threads, Processes, Atari, Options])
def test_every_setting_of_the_command_line_has_a_meaning(cls: type) -> None:
    assert [name for name, setting in fields(cls).items() if not setting.help] == []


def test_a_field_without_default_and_an_overridden_one() -> None:
    @dataclass(frozen=True)
    class Narrow(Sizes):
        parts: int = 2
        """Overridden."""
        needed: int = dataclasses.field(kw_only=True)

    found = fields(Narrow)
    assert found["parts"].default == 2
    assert found["parts"].help == "Overridden."
    assert found["rows"].help == "How many rows there are."
    assert found["needed"].default is MISSING


def test_only_dataclasses_have_settings() -> None:
    with pytest.raises(ConfigError, match=r"Path is no dataclass"):
        fields(Path)


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        *(("1e5", int, 100_000), ("100_000", int, 100_000), (100_000.0, int, 100_000), ("-3", int, -3)),
        ("123456789012345678901", int, 123456789012345678901),
        *(("1e-4", float, 1e-4), ("1_000.5", float, 1000.5), (1, float, 1.0), ("1e-4", float | None, 1e-4)),
        *(("true", bool, True), ("No", bool, False), ("off", bool, False), ("1", bool, True), (False, bool, False)),
        *(
            ("none", float | None, None),
            ("None", str | None, None),
            (None, int | None, None),
            ("null", int | None, None),
        ),
        *(("none", str, "none"), ("gru", str | None, "gru"), ("5", str | None, "5"), ("5", int | str, 5)),
        *(
            ("64,64", tuple[int, ...], (64, 64)),
            ("64", tuple[int, ...] | None, (64,)),
            ([1e2, 3], tuple[int, ...], (100, 3)),
        ),
        *(("[64, 64]", tuple[int, ...], (64, 64)), ("()", tuple[int, ...], ()), ("1,a", tuple[int, str], (1, "a"))),
        *(("a,b", list[str], ["a", "b"]), ("b", Literal["a", "b"], "b"), ("{'a': 1}", dict[str, int], {"a": 1})),
        ("gymnasium.wrappers:FlattenObservation", Callable[[Any], Any], FlattenObservation),
        (
            "gymnasium.wrappers:FlattenObservation,gymnasium.wrappers:TimeAwareObservation",
            tuple[Callable[[Any], Any], ...],
            (FlattenObservation, TimeAwareObservation),
        ),
    ],
)
def test_text_and_yaml_values_become_the_type_of_a_setting(value: object, kind: Any, found: object) -> None:
    converted = convert(value, kind)
    assert converted == found
    assert type(converted) is type(found)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        *(("1.5", int, "an integer"), ("x", int, "an integer"), (True, int, "an integer"), ("inf", int, "an integer")),
        *(("nan", float, "a finite number"), ("inf", float, "a finite number"), (True, float, "a finite number")),
        *(
            ("maybe", bool, "true or false"),
            (1, bool, "true or false"),
            (3, str, "text"),
            (None, float, "a finite number"),
        ),
        *(("x", float | None, "a finite number or none"), ("c", Literal["a", "b"], "one of a, b")),
        ("64,x", tuple[int, ...], "integers with commas between them"),
        ("FlattenObservation", Callable[[Any], Any], "package.module:name"),
        ("no_such_module:X", Callable[[Any], Any], "no_such_module cannot be imported"),
        ("gymnasium.wrappers:Nothing", Callable[[Any], Any], "no function or class 'Nothing'"),
        ("x", Path, "a Path, which only a Python program can give"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_expected(value: object, kind: Any, expected: str) -> None:
    with pytest.raises(Unfit) as refused:
        convert(value, kind)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *(("true", True), ("False", False), ("none", None), ("3", 3), ("1e5", 100_000), ("1_000", 1000), ("-2", -2)),
        *(("1e-3", 1e-3), (".5", 0.5), ("rgb_array", "rgb_array"), ("[1, 2]", [1, 2]), ("'3'", "3"), ("_", "_")),
    ],
)
def test_arguments_of_an_environment_are_what_they_look_like(text: str, found: object) -> None:
    assert literal(text) == found
    assert type(literal(text)) is type(found)


@pytest.mark.parametrize("cls", [PPO, A2C, SyncBatches, Threads])
def test_what_help_shows_of_a_default_is_read_back_as_it(cls: type) -> None:
    for setting in fields(cls).values():
        assert convert(shown(setting.default), setting.type) == setting.default


def test_words_and_flags() -> None:
    words, flags = arguments(
        ["ppo", "--learning-rate", "-1e-3", "Env-v1", "--plan.max-lag=1", "-n", "5", "--track", "x", "--anneal_lr"],
        ("track",),
        {"-n": "total_timesteps"},
    )
    assert words == ["ppo", "Env-v1", "x"]
    assert [(flag.typed, flag.key, flag.value) for flag in flags] == [
        ("--learning-rate", "learning_rate", "-1e-3"),
        ("--plan.max-lag", "plan.max_lag", "1"),
        ("-n", "total_timesteps", "5"),
        ("--track", "track", None),
        ("--anneal_lr", "anneal_lr", None),
    ]


def test_the_nearest_names() -> None:
    assert nearest("learnig_rate", ["gamma", "learning_rate", "clip_range"]) == ["learning_rate"]
    assert len(nearest("zzz", ["gamma", "learning_rate", "clip_range", "seed"])) == 3


def test_every_error_of_a_value_is_found_and_what_only_follows_from_one_is_not() -> None:
    found, problems = made(Sizes, {}, {"rows": 12, "parts": 4})
    assert found == Sizes(12, 4)
    assert problems == []
    assert made(Sizes, {}, {"rows": 9, "parts": 2})[1] == ["rows 9 cannot be cut into 2 parts."]
    _, problems = made(Sizes, {}, {"rows": -1, "parts": -2})
    assert sorted(problems) == ["parts=-2: give at least 1.", "rows=-1: give at least 1."]
    # 8 rows are the default, which was not asked for.
    assert made(Sizes, {}, {"rows": -1, "parts": 3})[1] == ["rows=-1: give at least 1."]


def test_one_problem_is_a_sentence_and_several_are_a_list() -> None:
    refuse([])
    with pytest.raises(ConfigError, match=r"^one\.$"):
        refuse(["one."])
    with pytest.raises(ConfigError, match=r"^2 problems:\n  - one\.\n  - two\.$"):
        refuse(["one.", "two."])


@pytest.mark.parametrize(("kind", "names"), [("method", METHODS), ("plan", PLANS), ("place", PLACES)])
def test_the_catalog_names_classes_and_their_first_line(kind: str, names: dict[str, str]) -> None:
    for name in names:
        called, cls = find(kind, name)
        assert called == name
        assert summary(kind, name) == inspect.getdoc(cls).partition("\n")[0]


def test_a_class_of_ones_own_is_named_by_its_module() -> None:
    assert find("method", "headrace.methods.ppo:PPO") == ("headrace.methods.ppo:PPO", PPO)
    assert find("plan", "sync") == ("sync-batches", SyncBatches)
    with pytest.raises(ConfigError, match=r"no class 'PPQ'"):
        find("method", "headrace.methods.ppo:PPQ")
    with pytest.raises(ConfigError, match=r"'no_such_module' could not be imported"):
        find("plan", "no_such_module:Plan")
    with pytest.raises(ConfigError, match=r"is no plan: expected a class with a function run\(\)"):
        find("plan", "headrace.methods.ppo:PPO")


# What a command line comes to -----------------------------------------------------------------------------------------


def test_flags_override_a_file_which_overrides_a_preset_which_overrides_defaults(tmp_path: Path) -> None:
    preset = choose("ppo", "CartPole-v1")
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({"gamma": 0.9, "gae_lambda": "5e-1", "plan": {"num_steps": 32}, "seed": 7}))
    planned = plan_of(
        ["ppo", "CartPole-v1", "--config", str(file), "--gae-lambda", "0.7", "--plan.actors=2", "-n", "1e4"]
    )
    method, plan = planned.run["method"], planned.run["plan"]
    assert method == dataclasses.replace(preset.method, gamma=0.9, gae_lambda=0.7)
    assert plan == dataclasses.replace(preset.plan, num_steps=32, actors=2)
    assert (planned.run["seed"], planned.run["total_timesteps"]) == (7, 10_000)
    assert {
        key: planned.origins[key]
        for key in ("clip_range", "learning_rate", "gamma", "gae_lambda", "plan.num_steps", "plan.actors", "seed")
    } == {
        "clip_range": "default",
        "learning_rate": "preset ppo/CartPole-v1",
        "gamma": f"config {file}",
        "gae_lambda": "flag",
        "plan.num_steps": f"config {file}",
        "plan.actors": "flag",
        "seed": f"config {file}",
    }
    assert planned.lines[0] == (
        f"settings  defaults < preset ppo/CartPole-v1 < config {file} < flags gae_lambda, plan.actors, total_timesteps"
    )


def test_without_a_preset_the_defaults_are_said_to_be_used() -> None:
    planned = plan_of(["a2c", "MountainCar-v0"])
    assert planned.run["method"] == A2C()
    assert planned.run["plan"] == SyncBatches()
    assert planned.run["place"] == Inline()
    assert planned.run["total_timesteps"] == Options().total_timesteps
    assert planned.preset == ""
    assert planned.lines == ["settings  defaults < (no preset for a2c on MountainCar-v0)"]


@pytest.mark.parametrize(
    "words",
    [
        ["--algo", "ppo", "--env-id", "CartPole-v1"],
        ["--method=ppo", "--env=CartPole-v1"],
        ["CartPole-v1", "--algo", "ppo"],
        ["--env", "CartPole-v1", "ppo"],
        ["headrace.methods.ppo:PPO", "gymnasium.envs.classic_control.cartpole:CartPoleEnv"],
    ],
)
def test_method_and_environment_are_words_or_flags(words: list[str]) -> None:
    run = plan_of(words).run
    assert isinstance(run["method"], PPO)
    assert run["env"].spec.action.n == 2


def test_a_file_may_name_everything_flat_dotted_or_nested(tmp_path: Path) -> None:
    flat = {"method": "ppo", "env": "CartPole-v1", "place": "threads", "place.stall_after": 5, "gamma": 0.5}
    dotted = {
        "method.gamma": 0.5,
        "algo": "ppo",
        "env_id": "CartPole-v1",
        "place.name": "threads",
        "place.stall-after": 5,
    }
    nested = {
        "method": {"name": "ppo", "gamma": 0.5},
        "env": {"id": "CartPole-v1"},
        "place": {"name": "threads", "stall_after": "5"},
        "run": {"seed": 1},
    }
    for number, content in enumerate((flat, dotted, nested)):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(content))
        run = plan_of(["--config", str(file)]).run
        assert run["place"] == Threads(stall_after=5.0)
        assert run["method"].gamma == 0.5


def test_settings_of_a_file_for_another_placement_do_not_count_and_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"place": "processes", "place.stall_after": 5.0, "gamma": 0.5}))
    planned = plan_of(["ppo", "CartPole-v1", "--config", str(file), "--place", "inline"])
    assert planned.run["place"] == Inline()
    assert planned.run["method"].gamma == 0.5
    assert f"place in {file} is processes, so its settings there do not count" in planned.lines


def test_notes_of_a_run_folder_are_no_settings_and_what_was_an_object_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    content = {"gamma": 0.5, "origins": {"gamma": "flag"}, "classes": {}, "frames": "…", "opaque": []}
    file.write_text(json.dumps(content))
    assert plan_of(["ppo", "CartPole-v1", "--config", str(file)]).run["method"].gamma == 0.5
    file.write_text(json.dumps({**content, "env.wrappers": "<lambda>", "opaque": ["env.wrappers"]}))
    with pytest.raises(ConfigError, match=r"env\.wrappers in .* was an object of Python"):
        plan_of(["ppo", "CartPole-v1", "--config", str(file)])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--anneal-lr", "false"], {"anneal_lr": False}),
        (["--no-anneal-lr"], {"anneal_lr": False}),
        (["--normalize-observation"], {"normalize_observation": True}),
        (["--hidden", "32,16"], {"hidden": (32, 16)}),
        (["--max-grad-norm", "none"], {"max_grad_norm": None}),
        (["--method.gamma", "0.5"], {"gamma": 0.5}),
        (["--learning_rate=3e-4"], {"learning_rate": 3e-4}),
    ],
)
def test_flags_of_the_method(flags: list[str], expected: dict[str, object]) -> None:
    method = plan_of(["ppo", "CartPole-v1", *flags]).run["method"]
    assert {name: getattr(method, name) for name in expected} == expected


def test_flags_of_the_environment() -> None:
    env = plan_of(
        [
            *("ppo", "CartPole-v1", "--env.max-episode-steps", "1e2", "--env.sutton-barto-reward", "true"),
            *("--env.wrappers", "gymnasium.wrappers:TimeAwareObservation"),
        ]
    ).run["env"]
    assert (env.max_episode_steps, env.kwargs, env.wrappers) == (
        100,
        {"sutton_barto_reward": True},
        (TimeAwareObservation,),
    )


def test_every_word_of_another_library_stands_for_a_setting_that_there_is() -> None:
    plans = {*fields(SyncBatches), *fields(SyncReplay)}
    known = {*fields(PPO), *fields(Options), *(f"plan.{name}" for name in plans)}
    assert set(ALIASES.values()) <= known
    assert not set(ALIASES) & known
    sb3 = plan_of(["ppo", "CartPole-v1", "--n-envs", "4", "--n-steps", "32", "--n-epochs", "3"]).run
    cleanrl = plan_of(["ppo", "CartPole-v1", "--num-envs", "4", "--num-steps", "32", "--update-epochs", "3"]).run
    assert (sb3["method"], sb3["plan"]) == (cleanrl["method"], cleanrl["plan"])
    assert sb3["plan"] == SyncBatches(num_envs=4, num_steps=32, max_lag=1)


def test_more_roles_than_cores_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.commands.planned.cores", lambda: 2)
    words = ["ppo", "CartPole-v1", "--plan.actors", "2", "--place"]
    assert len(plan_of([*words, "inline"]).lines) == 1
    assert plan_of([*words, "processes"]).lines[1].startswith("cores     3 processes are asked for")
    monkeypatch.setattr("headrace.commands.planned.cores", lambda: 3)
    assert len(plan_of([*words, "processes"]).lines) == 1


def test_the_public_names_are_loaded_from_where_the_type_checker_looks() -> None:
    source = Path(inspect.getfile(importlib.import_module("headrace"))).read_text()
    headrace = importlib.import_module("headrace")
    (block,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    declared = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(declared) == sorted(headrace.__all__)
    for name, module in declared.items():
        assert getattr(headrace, name) is getattr(importlib.import_module(module), name)
    assert set(headrace.__all__) <= set(dir(headrace))
    with pytest.raises(AttributeError, match="no attribute 'PPQ'"):
        headrace.PPQ  # noqa: B018
