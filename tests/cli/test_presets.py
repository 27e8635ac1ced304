"""Presets: which one is chosen, that it fits its environments, and that it is what the benchmarks measured."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import pytest

from headrace import Atari, Gymnasium, Learner, environment
from headrace.catalog import METHODS, PLACES
from headrace.commands.planned import plan_of
from headrace.presets import PRESETS, Preset, choose

LEARNED = Path(__file__).parents[2] / "benchmarks" / "learned"

EXAMPLES = {
    "ppo/CartPole-v1": "CartPole-v1",
    "a2c/CartPole-v1": "CartPole-v1",
    "impala/CartPole-v1": "CartPole-v1",
    "appo/CartPole-v1": "CartPole-v1",
    "dqn/CartPole-v1": "CartPole-v1",
    "sac/CartPole-v1": "CartPole-v1",
    "sac/Pendulum-v1": "Pendulum-v1",
    "td3/Pendulum-v1": "Pendulum-v1",
    "ppo/Acrobot-v1": "Acrobot-v1",
    "ppo/Pendulum-v1": "Pendulum-v1",
    "ppo/MiniGrid": "MiniGrid-Empty-5x5-v0",
    "ppo/MuJoCo": "HalfCheetah-v5",
    "ppo/Atari": "ALE/Pong-v5",
    "a2c/Atari": "PongNoFrameskip-v4",
}


@pytest.mark.parametrize(
    ("method", "env", "name"),
    [
        *((name.partition("/")[0], env, name) for name, env in EXAMPLES.items()),
        *(("ppo", id, "ppo/MuJoCo") for id in ("Ant-v4", "Walker2d-v5", "InvertedDoublePendulum-v5", "Humanoid-v5")),
        ("ppo", "BreakoutNoFrameskip-v4", "ppo/Atari"),
        ("ppo", "BabyAI-GoToObj-v0", "ppo/MiniGrid"),
        *(("ppo", id, None) for id in ("CartPole-v0", "Pendulum-v10", "MountainCar-v0", "my.module:CartPole-v1")),
        ("a2c", "HalfCheetah-v5", None),
        ("headrace.methods.ppo:PPO", "CartPole-v1", None),
    ],
)
def test_a_preset_is_chosen_by_method_and_id(method: str, env: str, name: str | None) -> None:
    found = choose(method, env)
    assert (found and found.name) == name


def test_every_preset_has_an_example_here_and_a_method_and_a_placement_that_there_are() -> None:
    assert [preset.name for preset in PRESETS] == list(EXAMPLES)
    for preset in PRESETS:
        assert METHODS[preset.name.partition("/")[0]].endswith(f":{type(preset.method).__name__}")
        assert preset.place in PLACES
        preset.method.check(preset.plan.num_steps, preset.plan.num_envs)


def test_all_of_gymnasium_s_mujoco_tasks_have_a_preset() -> None:
    tasks = [id for id, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("gymnasium.envs.mujoco")]
    assert len(tasks) > 20
    assert [id for id in tasks if choose("ppo", id) is None] == []


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_command_line_without_flags_is_the_preset_which_can_learn_there(preset: Preset) -> None:
    planned = plan_of([preset.name.partition("/")[0], EXAMPLES[preset.name]])
    assert planned.run["method"] == preset.method
    assert planned.run["plan"] == preset.plan
    assert planned.run["total_timesteps"] == preset.total_timesteps
    assert type(planned.run["place"]).__name__.lower() == preset.place
    assert planned.preset == preset.name
    Learner(planned.run["method"], planned.run["env"].spec, seed=1)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("ppo/CartPole-v1", "ppo-cartpole"),
        ("a2c/CartPole-v1", "a2c-cartpole"),
        ("impala/CartPole-v1", "impala-cartpole-processes"),
        ("appo/CartPole-v1", "appo-cartpole-processes"),
        ("ppo/Acrobot-v1", "ppo-acrobot"),
        ("ppo/Pendulum-v1", "ppo-pendulum"),
        ("ppo/MiniGrid", "ppo-minigrid"),
    ],
)
def test_the_numbers_are_those_of_the_task_whose_scores_are_kept(name: str, task: str) -> None:
    (preset,) = (preset for preset in PRESETS if preset.name == name)
    measured = json.loads((LEARNED / f"{task}.json").read_text())["setting"]
    for part in (f"method={preset.method!r}", f"plan={preset.plan!r}", f"env_steps={preset.total_timesteps},"):
        assert part in measured


def test_another_plan_than_the_preset_s_begins_with_its_own_defaults_and_flags_change_single_values() -> None:
    planned = plan_of(["ppo", "CartPole-v1", "--plan", "headrace.plans.sync_batches:SyncBatches", "--gamma", "0.9"])
    assert planned.run["plan"] == choose("ppo", "CartPole-v1").plan  # the same class, however it is named
    assert planned.run["method"].gamma == 0.9
    assert planned.run["method"].gae_lambda == choose("ppo", "CartPole-v1").method.gae_lambda


def test_returns_of_atari_are_those_of_the_game_and_the_method_learns_from_clipped_rewards() -> None:
    planned = plan_of(["ppo", "ALE/Pong-v5"])
    assert planned.run["env"] == Atari("Pong") == environment("ALE/Pong-v5")
    assert planned.run["env"].reward_clipping is False
    assert planned.run["method"].reward_clip == 1.0


def test_minigrid_is_seen_without_its_text() -> None:
    env = plan_of(["ppo", "MiniGrid-Empty-5x5-v0"]).run["env"]
    assert isinstance(env, Gymnasium)
    assert [wrapper.__name__ for wrapper in env.wrappers] == [
        "OneHotPartialObsWrapper",
        "ImgObsWrapper",
        "FlattenObservation",
    ]
