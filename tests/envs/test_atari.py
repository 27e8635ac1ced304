"""Atari games: ale-py, as `Atari`."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import PPO, Inline, Learner, Processes, SyncBatches, Threads
from headrace.envs.atari import Atari
from headrace.envs.base import environment_seed
from headrace.errors import ConfigError
from headrace.spaces import Box, Discrete, Spec

# Random by nothing but its seed: no-ops at the start.
CLASSIC = Atari("BreakoutNoFrameskip-v4")
# Cut off after 11 steps. A value reads its spec once: an emulator less, of 0.1 s.
PONG = Atari("Pong", max_frames=42)


def wrong(value: Any) -> Any:
    """The value, whose type is not what is asked for."""
    return value


@pytest.mark.slow
def test_an_environment_s_episodes_are_its_own(parts_are_the_whole: Callable[..., None]) -> None:
    env = dataclasses.replace(CLASSIC, repeat_action_probability=0.25, episodic_life=True, threads=2)
    parts_are_the_whole(env, num_envs=2, num_steps=120)


@pytest.mark.slow
def test_8_environments_are_2_times_4(parts_are_the_whole: Callable[..., None]) -> None:
    env = Atari("PongNoFrameskip-v4", repeat_action_probability=0.25, max_frames=400)
    parts_are_the_whole(env, num_envs=8, num_steps=300)


@pytest.mark.slow
def test_a_reset_with_the_same_seed_repeats_everything(a_reset_repeats: Callable[..., None]) -> None:
    a_reset_repeats(CLASSIC)


@pytest.mark.parametrize(
    ("env", "end", "num_steps"),
    [
        pytest.param(PONG, "truncated", 14, id="pong"),
        pytest.param(CLASSIC, "terminated", 500, id="breakout", marks=pytest.mark.slow),
    ],
)
def test_the_step_after_an_end_only_resets(
    env: Atari, end: str, num_steps: int, an_end_is_followed_by_a_reset: Callable[..., None]
) -> None:
    an_end_is_followed_by_a_reset(env, end, num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("past", [6, -1])
def test_an_action_out_of_range_is_refused(past: int, a_mistaken_action_is_refused: Callable[..., None]) -> None:
    a_mistaken_action_is_refused(Atari("Pong"), past)


@pytest.mark.slow
def test_threads_are_as_many_as_asked_for_and_end_with_close(threads_are_counted: Callable[..., None]) -> None:
    threads_are_counted(lambda threads: Atari("Pong", threads=threads), extra=0)


def test_it_is_a_value(it_is_a_value: Callable[..., None]) -> None:
    it_is_a_value(CLASSIC)


def test_names_decide_the_defaults() -> None:
    pong = Atari("Pong")
    assert pong == Atari("ALE/Pong-v5") == Atari(game="Pong", frame_skip=4, repeat_action_probability=0.25, noop_max=0)
    assert (pong.game, pong.fire_reset, pong.max_frames, pong.threads) == ("Pong", False, 108_000, 1)
    classic = Atari("PongNoFrameskip-v4")
    settled = (classic.game, classic.repeat_action_probability, classic.noop_max, classic.fire_reset)
    assert settled == ("Pong", 0, 30, True)
    assert Atari("PongNoFrameskip-v4", noop_max=0, repeat_action_probability=0.1).noop_max == 0
    for env in (pong, classic):
        assert (env.episodic_life, env.reward_clipping, env.full_action_space) == (False, False, False)


def test_the_spec_of_a_game() -> None:
    spec = Atari("Pong").spec
    assert spec == Spec(
        observation=Box(np.zeros((4, 84, 84)), np.full((4, 84, 84), 255), torch.uint8),
        action=Discrete(6),
        frame_skip=4,
        stacked=4,
    )
    other = Atari("Pong", full_action_space=True, stack_num=2, screen_size=42, frame_skip=2).spec
    assert (other.observation.shape, other.action, other.frame_skip) == ((2, 42, 42), Discrete(18), 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Atari("Pongg"), r"Atari\('Pongg'\): there is no such game. Nearest: Pong. Names are those"),
        (lambda: Atari("ALE/SpaceInvader-v5"), "Nearest: SpaceInvaders"),
        (lambda: Atari("BreakOutNoFrameskip-v4"), "Nearest: Breakout"),
        (lambda: Atari("pong"), "Nearest: Pong"),
        (lambda: Atari("Pong-v4"), "such as 'Pong', 'ALE/Pong-v5' or 'PongNoFrameskip-v4'"),
        (lambda: Atari("Combat"), "there is no such game"),  # for two players only
        (lambda: Atari(wrong(None)), r"Atari\(None\): there is no such game"),
        (lambda: Atari("Pong", frame_skip=0), r"Atari\(frame_skip=0\): give an integer from 1 on"),
        (lambda: Atari("Pong", stack_num=wrong(2.0)), r"Atari\(stack_num=2.0\)"),
        (lambda: Atari("Pong", noop_max=-1), r"Atari\(noop_max=-1\): give an integer from 0 on"),
        (lambda: Atari("Pong", repeat_action_probability=1.5), r"1.5\): give a probability"),
        (lambda: Atari("Pong", repeat_action_probability=wrong("x")), r"'x'\): give a probability"),
    ],
)
def test_what_is_wrong_with_a_game_is_said_at_once(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def stacked(pictures: np.ndarray, first: np.ndarray, depth: int) -> np.ndarray:
    """The last pictures of each episode [T+1, depth, …], after black ones, of all [T+1, …]. first: where one begins."""
    found = np.zeros((len(pictures), depth, *pictures.shape[1:]), pictures.dtype)
    begin = 0
    for t in range(len(pictures)):
        begin = t if first[t] else begin
        for back in range(min(depth, t - begin + 1)):
            found[t, depth - 1 - back] = pictures[t - back]
    return found


def test_no_picture_of_an_episode_is_in_the_next_one(
    actions: Callable[..., Any], play: Callable[..., list[np.ndarray]]
) -> None:
    """What four pictures in an observation are, from a game that is shown one picture at a time."""
    given = actions(PONG, 24, 1)
    observation, _, terminated, truncated = play(PONG, range(1), given)
    single, *_ = play(dataclasses.replace(PONG, stack_num=1), range(1), given)
    first = np.ones(len(observation), np.bool_)
    first[1] = False
    first[2:] = (terminated | truncated)[:-1, 0]
    assert first.sum() == 3
    assert (single[:, 0].max((1, 2, 3)) > 0).all()  # no picture of the game itself is black
    np.testing.assert_array_equal(observation[:, 0], stacked(single[:, 0, 0], first, depth=4))


class Otherwise:
    """Atari games whose emulators give other rewards, or ends."""

    def __init__(self, env: Atari, change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> None:
        self.env, self.change = env, change

    def make(self, indices: range) -> Any:
        vector: Any = self.env.make(indices)
        step = vector._vector.step

        def changed(action: np.ndarray) -> Any:
            observation, reward, terminated, *rest = step(action)
            return observation, *self.change(reward, terminated), *rest

        vector._vector.step = changed
        return vector


@pytest.mark.slow
def test_a_life_is_an_episode_and_the_game_goes_on(
    actions: Callable[..., Any], play: Callable[..., list[np.ndarray]]
) -> None:
    """Against the game itself, which is given no action where an episode of one life only begins."""
    env = dataclasses.replace(CLASSIC, episodic_life=True)
    given = actions(env, 400, 1, seed=3)
    paying = Otherwise(env, lambda reward, terminated: (reward + 1, terminated))  # where a life begins, too
    observation, reward, terminated, truncated = (array[:, 0] for array in play(paying, range(1), given))

    whole = dataclasses.replace(CLASSIC, stack_num=1)._emulators(1)
    seed = environment_seed(1, 0).generate_state(1)[0] >> 1
    pictures, info = whole.reset(seed=np.array([int(seed)]))
    pictures, lives, rewards, ends, first = [pictures[0, 0]], [int(info["lives"][0])], [], [], [True]
    for t in range(len(given)):
        begins = bool(ends) and ends[-1]
        picture, points, over, _, info = whole.step(np.where(begins, 0, given[t]))
        pictures.append(picture[0, 0])
        lives.append(int(info["lives"][0]))
        rewards.append(0 if begins else int(points[0]) + 1)
        ends.append(not begins and (bool(over[0]) or lives[-1] < lives[-2]))
        first.append(begins)
    assert {0, 1, 2, 3, 4, 5} == set(lives)  # a whole game and the beginning of another
    assert max(rewards) > 1
    assert reward.tolist() == rewards
    assert terminated.tolist() == ends
    assert not truncated.any()
    np.testing.assert_array_equal(observation, stacked(np.stack(pictures), np.array(first), depth=4))


@pytest.mark.slow
def test_a_game_that_ends_where_a_life_begins_is_followed_by_another(play: Callable[..., list[np.ndarray]]) -> None:
    """The only step between two episodes cannot be the last of the second one."""
    env = Atari("Breakout", repeat_action_probability=0.0, fire_reset=True, episodic_life=True)
    given = np.full((60, 1), 3)
    observation, _, terminated, _ = play(env, range(1), given)
    [lost, *_] = np.flatnonzero(terminated[:, 0])
    frames = 4 * (lost + 1)
    cut = dataclasses.replace(env, max_frames=int(frames) + 4)  # in the step without action
    found, reward, terminated, truncated = play(cut, range(1), given[: lost + 8])
    assert np.flatnonzero(terminated[:, 0]).tolist() == [lost]
    assert not truncated.any()
    assert reward[lost + 1] == 0
    np.testing.assert_array_equal(found[: lost + 2], observation[: lost + 2])
    np.testing.assert_array_equal(found[lost + 2 :], observation[:7])  # as the first game: nothing is random here

    ending = Otherwise(env, lambda reward, terminated: (reward, np.ones_like(terminated)))
    found, _, terminated, _ = play(ending, range(1), given[:6])
    assert terminated[:, 0].tolist() == [True, False] * 3
    for t in (2, 4, 6):
        np.testing.assert_array_equal(found[t], observation[0])


@pytest.mark.slow
def test_the_start_of_an_episode_and_how_long_it_may_be(play: Callable[..., list[np.ndarray]]) -> None:
    """Frames that have passed at the first observation: 0 to noop_max, all of them; FIRE is one."""

    def frames(**fields: Any) -> set[int]:
        emulators = Atari("Breakout", **fields)._emulators(1)
        emulators.reset(seed=np.array([1]))
        return {int(emulators.reset()[1]["episode_frame_number"][0]) for _ in range(40)}

    assert frames() == {0}
    assert frames(noop_max=3) == {0, 1, 2, 3}
    assert frames(noop_max=3, fire_reset=True) == {1, 2, 3}
    ends = np.flatnonzero(play(Atari("Pong", max_frames=40), range(1), np.zeros((30, 1), np.int64))[3])
    assert ends.tolist() == [9, 20]  # 10 steps of 4 frames, and one that only resets


@pytest.mark.slow
def test_rewards_are_clipped_only_where_asked_for(
    actions: Callable[..., Any], play: Callable[..., list[np.ndarray]]
) -> None:
    given = actions(CLASSIC, 150, 1, seed=3)
    games = [
        Atari("SpaceInvaders", repeat_action_probability=0.0, reward_clipping=clipped) for clipped in (False, True)
    ]
    raw, clipped = (play(env, range(1), given)[1] for env in games)
    assert raw.max() > 1
    np.testing.assert_array_equal(clipped, np.sign(raw))


@pytest.mark.slow
def test_ppo_on_pong_has_one_hash_on_all_placements() -> None:
    """Two actors of two games each, three updates: the weights are the same everywhere, and moved."""
    env = Atari("Pong", max_frames=120)  # each actor sees ends and resets
    method = PPO(update_epochs=1, num_minibatches=2, learning_rate=1e-3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shas, start = set(), None
        for place in (Inline(), Threads(), Processes()):
            learner = Learner(method, env.spec, seed=1)
            begun = digest(learner.net)
            assert start in (None, begun)
            start = begun
            plan = SyncBatches(num_envs=4, num_steps=16, actors=2, max_lag=1)
            reports = list(plan.run(learner, env, place, env_steps=180))
            assert [report.version for report in reports] == [1, 2, 3]
            shas.add(digest(learner.net))
        assert len(shas) == 1
        assert start not in shas
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_program_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "atari.md").read_text()
    program, _ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)  # the other one is EnvPool's
    script = tmp_path / "atari.py"
    script.write_text(program.replace("10_000_000", "100").replace("num_steps=128", "num_steps=16"))  # one update
    runpy.run_path(str(script))
    assert capsys.readouterr().out.startswith("128 ")


def digest(net: torch.nn.Module) -> str:
    sha = hashlib.sha256()
    for name, value in net.state_dict().items():
        sha.update(name.encode() + value.cpu().numpy().tobytes())
    return sha.hexdigest()
