"""Is an environment as training takes it to be? `check_env` tries it out and lists everything that is not."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from headrace.envs.faults import Finding, Row, picture_faults
from headrace.envs.gymnasium import Gymnasium, One
from headrace.envs.trial import FAILED, Trial
from headrace.errors import ConfigError

__all__ = ["Checked", "Finding", "StepSeconds", "check_env"]

_SHORT = 25  # steps, twice, of each run that is compared with another one
_RESETS = 20  # episodes that are left after a few steps


@dataclass(frozen=True)
class StepSeconds:
    """What a step costs and how much that varies, in seconds, over `count` steps with random actions."""

    median: float
    p95: float
    slowest: float
    count: int

    def __str__(self) -> str:
        rate = f"{1 / self.median:,.0f} steps/s" if self.median else "too fast to measure"
        spread = f"95 %: {_time(self.p95)}, slowest: {_time(self.slowest)}"
        return f"a step takes {_time(self.median)} (median; {spread}), {rate}"


@dataclass(frozen=True)
class Checked:
    """What `check_env` found. Printed, it is a list."""

    environment: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """What is no fault but good to know, such as what could not be checked."""
    env_steps: int
    episodes: int
    step_seconds: StepSeconds | None
    """None if no step worked."""

    @property
    def ok(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def __str__(self) -> str:
        count = len(self.findings)
        found = "nothing found" if self.ok else "1 finding" if count == 1 else f"{count} findings"
        lines = [f"{self.environment}: {found} in {self.env_steps:,} steps of {self.episodes:,} episodes"]
        lines += [f"{number:3}. {finding}" for number, finding in enumerate(self.findings, 1)]
        lines += [f"     speed: {self.step_seconds}"] if self.step_seconds else []
        return "\n".join(lines + [f"     note: {note}" for note in self.notes])


def check_env(env: One | Gymnasium | Callable[..., One] | str, *, steps: int = 1000, seed: int = 0) -> Checked:
    """Try out an environment and list everything that is wrong with it at once.

    env: one gymnasium.Env (it stays open, somewhere in an episode), a class or function that makes one, an id, or a
    Gymnasium value. steps: of one long walk with random actions; some 400 more, in short episodes, compare seeds.
    Whatever the environment raises is a finding. Global generators are left as they were.
    Raises ConfigError for what is no environment.
    """
    if not isinstance(env, gymnasium.Env | Gymnasium | str) and not callable(env):
        raise ConfigError(
            f"check_env got a {type(env).__name__}: expected a gymnasium.Env, a class or function that makes one, "
            "a registered id, or a Gymnasium(…)."
        )
    if steps < 1 or seed < 0:
        raise ConfigError(f"check_env(steps={steps}, seed={seed}): give at least one step, and a seed from 0 on.")
    trial = Trial(seed)
    try:
        if isinstance(env, gymnasium.Env):
            name = str(env)
            trial.notes.append("one environment was given, so making another and shipping it was not checked")
            _examine(trial, env, None, None, steps)
        else:
            maker = env if isinstance(env, Gymnasium) else Gymnasium(env)
            name = repr(maker)
            _make_and_examine(trial, maker, steps)
    finally:
        trial.restore()
    notes, seconds = tuple(trial.notes), _spread(trial.seconds)
    return Checked(name, trial.findings(), notes, trial.env_steps, trial.episodes, seconds)


def _make_and_examine(trial: Trial, maker: Gymnasium, steps: int) -> None:
    trial.add(_shipping(maker))
    one = trial.make(maker)
    trial.restore()  # importing an environment's package for the first time may move anything
    twin = trial.make(maker)
    try:
        if one is not None and twin is not None and one.unwrapped is twin.unwrapped:
            advice = "Every environment of a run needs one of its own."
            trial.add([Finding("make", "a new environment at each call", "the same one twice", advice)])
        if one is not None:
            _examine(trial, one, twin, maker, steps)
    finally:
        for made in filter(None, (one, twin)):
            trial.call("close", made.close)


def _examine(trial: Trial, env: One, twin: One | None, maker: Gymnasium | None, steps: int) -> None:
    """All that is to be found of an environment, and of a second one like it."""
    trial.learn_spaces(env)
    trial.play(env, steps, trial.seed)
    if trial.env_steps and not trial.ends and _time_limit(env) is None:
        trial.notes.append(f"no episode ended in {trial.env_steps:,} steps, and there is no time limit")
    for _ in range(_RESETS):
        trial.play(env, 2)
    found = list(_seeding(trial, env, twin))
    if trial.reset_works:  # else what a seed does cannot be told
        trial.add(found)
    _render(trial, env, maker)


def _seeding(trial: Trial, env: One, twin: One | None) -> Iterator[Finding]:
    """Whether the seed, and nothing else, decides what happens: at most one finding."""

    def run(of: One, seed: int | None, fixed: bool = True) -> list[list[Row]]:
        if fixed:  # what global generators do is a finding of its own
            trial.restore()
        return [*trial.play(of, _SHORT, seed), *trial.play(of, _SHORT)]

    one, again, other = run(env, trial.seed), run(env, trial.seed), run(env, trial.seed + 1)
    free = run(env, None)
    same, seeds = f"the same episode from seed={trial.seed} and the same actions", "Draw from self.np_random alone."
    if one[0] != again[0]:
        advice = (
            "Call super().reset(seed=seed), draw from self.np_random alone, and set back all that an episode changes."
        )
        yield Finding("seed", same, f"another one: {_difference(one[0], again[0])} differs", advice)
    elif one == other and free[0] != one[0]:
        yield Finding("seed", "other episodes from another seed", "the same, though not without a seed", seeds)
    elif one != again:
        advice = "Make the generator only if a seed is given, as super().reset(seed=seed) does."
        yield Finding("seed", "episodes after the seeded one that follow from its seed", "others each time", advice)
    elif one != other and free == run(env, None, fixed=False) == run(env, None, fixed=False):
        advice = "Let a reset without a seed go on with the generator that there is."
        yield Finding("seed", "new episodes from resets without a seed", "the same ones each time", advice)
    elif twin is not None and one != run(twin, trial.seed):
        yield Finding("seed", f"{same} in every environment made alike", "another one in the second", seeds)


def _difference(one: list[Row], other: list[Row]) -> str:
    for number, (row, twin) in enumerate(zip(one, other, strict=False)):
        for path in row:
            if row[path] != twin.get(path):
                return f"{path} after {number} steps"
    return "the length"


def _shipping(maker: Gymnasium) -> Iterator[Finding]:
    try:
        cloudpickle.dumps(maker)
    except Exception as error:
        advice = "Actors in other processes make their own: open files, locks and devices in the constructor."
        yield Finding("shipping", "something that pickles", f"{type(error).__name__}: {error}", advice)


def _render(trial: Trial, env: One, maker: Gymnasium | None) -> None:
    """Whether `render` returns what the mode promises, in a mode that can be looked at without a window."""
    metadata = getattr(env, "metadata", None)
    modes = list((metadata.get("render_modes") if isinstance(metadata, dict) else None) or [])
    mode, other = getattr(env, "render_mode", None), None
    if mode is None and "rgb_array" in modes:
        if maker is None or not _takes_render_mode(maker):
            trial.notes.append('rendering was not checked: render_mode is None; "rgb_array" would be')
            return
        showing = copy.copy(maker)
        object.__setattr__(showing, "kwargs", {**maker.kwargs, "render_mode": "rgb_array"})
        other = trial.make(showing)
        if other is None:
            return
        env, mode = other, getattr(other, "render_mode", None)
    if mode is not None and mode not in modes:
        trial.add([Finding("render_mode", f"one of metadata['render_modes'], {modes}", repr(mode))])
    if mode in ("rgb_array", "ansi"):
        trial.play(env, 1)
        picture = trial.call("render", env.render)
        if picture is not FAILED:
            trial.add(picture_faults(mode, picture))
    if other is not None:
        trial.call("close", other.close)


def _takes_render_mode(maker: Gymnasium) -> bool:
    """Of one's own classes and functions; a registered environment may need a screen or a graphics card."""
    try:
        return not isinstance(maker.source, EnvSpec) and "render_mode" in inspect.signature(maker.source).parameters
    except (TypeError, ValueError):
        return False


def _time_limit(env: Any) -> int | None:
    limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    while limit is None and isinstance(env, gymnasium.Wrapper):
        limit = getattr(env, "_max_episode_steps", None) if isinstance(env, gymnasium.wrappers.TimeLimit) else None
        env = env.env
    return limit


def _spread(seconds: list[float]) -> StepSeconds | None:
    if not seconds:
        return None
    median, p95, slowest = np.percentile(seconds, (50, 95, 100)).tolist()
    return StepSeconds(median, p95, slowest, len(seconds))


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
