"""An environment on trial: it is reset and stepped, and what is wrong with what it does is noted."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from headrace.envs.faults import (
    Finding,
    Row,
    choices_of,
    described,
    flag_faults,
    info_faults,
    mask_faults,
    mask_space_faults,
    observation_faults,
    reward_faults,
    row_of,
    sampling,
)
from headrace.envs.gymnasium import Gymnasium, One, _space
from headrace.errors import ConfigError
from headrace.spaces import MASK, Box, leaves

__all__ = ["FAILED", "Trial"]

FAILED: Final = object()
"""Instead of what a call returns, when it raised."""


class Trial:
    """Every call of an environment, and what was found of it so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.found: dict[str, tuple[Finding, str, int]] = {}
        self.notes: list[str] = []
        self.env_steps = self.episodes = self.step_in_episode = self.ends = 0
        self.seconds: list[float] = []
        self.reset_works = True
        self.observed: Any = None
        """The tree of our spaces; None where there is none."""
        self.choices: list[int] = []
        """How many values each discrete action has, if there is a mask of them."""
        self.actions: Any = FAILED
        """A copy of the space of actions, to draw from."""
        self._elapsed = 0.0
        self._observed: tuple[object, Row] = (None, {})
        self._globals = (np.random.get_state(), random.getstate(), torch.get_rng_state())
        self._states = _states()

    def add(self, findings: Iterable[Finding], where: str = "", fault: str = "") -> None:
        """Note them; of findings with an equal `fault` only the first, and how often."""
        for finding in findings:
            name = fault or f"{finding.key} {finding.expected}"
            first, place, times = self.found.get(name, (finding, where, 0))
            self.found[name] = first, place, times + 1

    def findings(self) -> tuple[Finding, ...]:
        """All of them, with where each was first seen and how often."""
        return tuple(
            replace(first, actual=first.actual + where + (f", and {times - 1:,} times more" if times > 1 else ""))
            for first, where, times in self.found.values()
        )

    def restore(self) -> None:
        """Set the global generators as they were when all began."""
        numpy_state, python_state, torch_state = self._globals
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        self._states = _states()

    @property
    def where(self) -> str:
        """For what is found in a step or a reset."""
        return f" (step {self.step_in_episode} of episode {self.episodes})"

    def make(self, maker: Gymnasium) -> One | None:
        """One environment. Raises ConfigError if what is made is none."""
        made = self.call("make", maker._one)
        return None if made is FAILED else cast(One, made)

    def call(self, key: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the environment returns, or FAILED. Global generators that it moves are a finding."""
        often = key in ("action_space", "step")
        if not often:  # looking at the generators takes longer than many a step: it is done after the last one
            self.look_at_generators("step")
        where = self.where if key in ("reset", "step") else ""
        try:
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            self._elapsed = time.perf_counter() - begun
        except ConfigError:
            raise
        except Exception as error:
            message = str(error).partition("\n")[0]
            raised = Finding(key, "no exception", f"{type(error).__name__}: {message}")
            self.add([raised], where, f"{key} {type(error).__name__}")
            result = FAILED
        if not often:
            self.look_at_generators(key)
        return result

    def look_at_generators(self, key: str) -> None:
        """A finding for each global one that is not as it was: this call has moved it."""
        after = _states()
        for generator, state in after.items():
            if state != self._states[generator]:
                advice = "Draw from self.np_random, which reset(seed=…) seeds: the global one belongs to others."
                self.add([Finding("random", f"no use of the global {generator}", f"{key} moves it", advice)])
        self._states = after

    def reset(self, env: One, seed: int | None = None) -> Any:
        """The first observation of an episode, or FAILED."""
        self.episodes, self.step_in_episode = self.episodes + 1, 0
        asked: list[dict[str, int]] = [{}, {"seed": self.seed}] if seed is None else [{"seed": seed}, {}]
        result = FAILED
        for keywords in asked:
            if (result := self.call("reset", env.reset, **keywords)) is not FAILED:
                break
            self.reset_works = False
        self._unchanged("reset")
        if result is FAILED:
            return FAILED
        if isinstance(result, tuple) and len(result) == 2:
            observation, info = result
            self.add(info_faults(info), self.where)
        else:
            observation = result
            self.add([Finding("reset", "(observation, info)", described(result))], self.where)
        return self._observe(observation)

    def step(self, env: One, action: Any) -> tuple[Any, bool, Row]:
        """The observation (or FAILED), whether the episode ended, and all that was returned."""
        given = row_of(action, "action")
        self.step_in_episode += 1
        result = self.call("step", env.step, action)
        self._unchanged("step")
        if result is FAILED:
            return FAILED, True, {"exception": True}
        self.env_steps += 1
        self.seconds.append(self._elapsed)
        if row_of(action, "action") != given:
            advice = "Copy it before it is scaled or clipped."
            self.add([Finding("action", "left as it was given", "step changes it in place", advice)], self.where)
        if not isinstance(result, tuple) or len(result) != 5:
            shown = f"{len(result)}" if isinstance(result, tuple) else described(result)
            expected = "5 values: observation, reward, terminated, truncated, info"
            self.add([Finding("step", expected, shown)], self.where)
            if not isinstance(result, tuple) or len(result) != 4:
                return FAILED, True, {"exception": True}
            result = (*result[:3], False, result[3])  # the interface of before 2022
        observation, reward, terminated, truncated, info = result
        self.add(reward_faults(reward), self.where, "reward")
        self.add(flag_faults("terminated", terminated), self.where, "terminated")
        self.add(flag_faults("truncated", truncated), self.where, "truncated")
        self.add(info_faults(info), self.where)
        row = {**row_of(observation), **row_of(reward, "reward"), **row_of((terminated, truncated), "end")}
        return self._observe(observation), _true(terminated) or _true(truncated), row

    def _observe(self, observation: Any) -> Any:
        for fault, finding in observation_faults(self.observed, observation):
            self.add([finding], self.where, fault)
        if self.choices and isinstance(observation, dict) and MASK in observation:
            self.add(mask_faults(self.choices, observation[MASK]), self.where)
        self._observed = observation, row_of(observation)
        return observation

    def _unchanged(self, key: str) -> None:
        """A finding if the observation before this call is not what it was."""
        held, before = self._observed
        self._observed = None, {}
        if held is not None and (after := row_of(held)) != before:
            changed = next(path for path in before if after.get(path) != before[path])
            advice = "Return a copy: whoever keeps an observation finds the next one in it."
            actual = f"{key} changes it in place"
            self.add([Finding(changed, "left alone once returned", actual, advice)], self.where, "mutation")

    def play(self, env: One, steps: int, seed: int | None = None) -> list[list[Row]]:
        """Episodes with random actions, so many steps together; the first reset has the seed."""
        observation, failures = self.reset(env, seed), 0
        episodes = [[row_of(observation)]]
        if self.actions is FAILED:
            return episodes
        self.actions.seed(self.seed)
        for _ in range(steps):
            action = FAILED
            if observation is not FAILED:
                action = self.call("action_space", self.actions.sample, *self._allowed(observation))
            if action is FAILED or failures == 3:
                break
            observation, ended, row = self.step(env, action)
            episodes[-1].append(row)
            failures += observation is FAILED
            if ended:
                self.ends += 1
                observation = self.reset(env)
                episodes.append([row_of(observation)])
        self.look_at_generators("step")
        return episodes

    def _allowed(self, observation: Any) -> tuple[Any, ...]:
        """What the observation's mask allows, for gymnasium's `sample`; empty: everything."""
        if not self.choices or not isinstance(observation, dict) or MASK not in observation:
            return ()
        mask = np.asarray(observation[MASK])
        if mask.shape != (sum(self.choices),):
            return ()
        parts = np.split((mask == 1).astype(np.int8), np.cumsum(self.choices)[:-1])
        return (sampling(self.actions, iter(parts)),)

    def learn_spaces(self, env: One) -> None:
        """Note what its spaces are, and what is wrong with them."""
        self.observed, takes = self._spaces(env, "observation"), self._spaces(env, "action")
        if isinstance(self.observed, dict) and MASK in self.observed and takes is not None:
            self.choices = choices_of(takes)
            self.add(mask_space_faults(self.observed[MASK], self.choices))
        if isinstance(given := getattr(env, "action_space", None), gymnasium.Space):
            self.actions = self.call("action_space", copy.deepcopy, given)

    def _spaces(self, env: One, name: str) -> Any:
        """Ours for the environment's; None for what we have no space for, which is a finding."""
        given, key = getattr(env, f"{name}_space", None), f"{name}_space"
        if not isinstance(given, gymnasium.Space):
            self.add([Finding(key, "a gymnasium.Space", "none" if given is None else described(given))])
            return None
        tree = self._ours(given, key)
        for path, space in leaves(tree):  # None is no leaf
            if isinstance(space, Box) and not space.bounded:
                open_ = int((~(np.isfinite(space.low) & np.isfinite(space.high))).sum())
                count = f"{open_} of {space.low.size} elements" if space.low.size > 1 else "it"
                self.notes.append(f"{key}{path}: not bounded on both sides ({count})")
        return tree

    def _ours(self, space: Any, path: str) -> Any:
        if isinstance(space, spaces.Dict) and space.spaces:
            return {key: self._ours(inner, f"{path}[{key!r}]") for key, inner in space.spaces.items()}
        if isinstance(space, spaces.Tuple) and space.spaces:
            return tuple(self._ours(inner, f"{path}[{place}]") for place, inner in enumerate(space.spaces))
        try:
            return _space(space, "")
        except ConfigError as error:
            self.add([Finding(path, "a space that Headrace has", str(error).strip().removesuffix("."))])
            return None


def _states() -> dict[str, object]:
    """Of the global generators, in a form that can be compared."""
    state: Any = np.random.get_state()
    _, words, *others = state
    torch_state = torch.get_rng_state().numpy().tobytes()
    return {"numpy.random": (words.tobytes(), *others), "random": random.getstate(), "torch generator": torch_state}


def _true(flag: Any) -> bool:
    try:
        return bool(flag)
    except (TypeError, ValueError):
        return False
