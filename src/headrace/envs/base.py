"""What an environment is to the library: a value that says which one, and B of them that step together.

    env = Gymnasium("CartPole-v1")                   # an Env: frozen, shipped to every actor
    vector = env.make(range(4, 8))                   # a VectorEnv: environments 4 to 7 of the run, in this process
    observation = vector.reset(seed=1)
    observation, reward, terminated, truncated = vector.step(action)

Next-step auto-reset: the step in which an episode ends returns its final observation. The *next* step of that
environment ignores the action and returns the first observation of the next episode, with reward 0 and both flags
False. So the final observation is in the stream, and nothing else has to carry it.

Same-step auto-reset, of environments that can do nothing else, is said by `spec.shortest_truncation`: the step in which
an episode ends returns the first observation of the next one, and `final_observation()` what the episode ended with.
"""

from __future__ import annotations

import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import optree
from torch import Tensor

from headrace.errors import ConfigError, ShapeError
from headrace.spaces import Spaces, Spec, zeros
from headrace.struct import NAMESPACE, Tree

__all__ = ["Array", "CheckedVectorEnv", "Env", "Step", "VectorEnv", "environment_seed"]

Array: TypeAlias = np.ndarray[Any, Any]
Step: TypeAlias = tuple[Tree, Array, Array, Array]
"""observation [B, …], reward [B] float32, terminated [B] bool, truncated [B] bool."""

_STREAM = zlib.crc32(b"environment")


class VectorEnv(Protocol):
    """B environments that step together, on the host, in NumPy arrays [B, …].

    What a call returns is valid until the next one: the caller copies what it keeps.
    """

    num_envs: int

    def reset(self, seed: int) -> Tree:
        """The first observations [B, …]. Environment i's episodes are a function of (seed, i) and of its actions."""

    def step(self, action: Array) -> Step:
        """Apply action [B, …] (int64 for Discrete, the dtype of a Box) and return what follows; see `Step`.

        Raises ConfigError before the first reset, after close, while another thread's call runs, and for an action that
        is not finite; ShapeError for one of another shape or dtype; EnvironmentFault where an environment fails. A
        refused action changes nothing.
        """

    def final_observation(self) -> Tree:
        """What the episodes ended with that ended in the last step [B, …]; in other rows anything.

        Only where `spec.shortest_truncation` is set. Valid until the next call.
        """

    def close(self) -> None:
        """Let go of whatever the environments hold. Closing twice does nothing."""


class Env(ABC):
    """Which environments a run has: a frozen value that pickles, so that every actor makes its own share."""

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """What one environment shows and takes."""

    @abstractmethod
    def make(self, indices: range) -> VectorEnv:
        """These of the run's environments. Who makes which changes nothing: each draws from its own seed."""

    @property
    def reward_threshold(self) -> float | None:
        """The mean return from which on the task counts as solved; None: nobody has said."""
        return None


def environment_seed(seed: int, index: int) -> np.random.SeedSequence:
    """The seed of environment `index` of a run: a function of both alone. Raises ConfigError for a negative seed."""
    if seed < 0:
        raise ConfigError(f"reset(seed={seed}): a seed is an integer from 0 on")
    return np.random.SeedSequence((seed, _STREAM, index))


class CheckedVectorEnv(VectorEnv, ABC):
    """A VectorEnv that refuses calls in the wrong order, from two threads at once, or with a misshapen action.

    A subclass writes `_reset`, `_step` and `_close`, which then run one at a time and only when allowed; where it
    resets within the step, `final_observation` too. A call that raises leaves the environments in no known state: only
    `reset` (or `close`) is accepted after it. An action that is refused leaves them as they were.

    apart: whether it steps one environment after the other, and tells before each what runs now, if `beat` is set:
    beat(environment, episode, step, seed), step 0 for the reset.
    """

    apart = False
    beat: Callable[[int, int, int, int], object] | None = None

    def __init__(self, num_envs: int, action: Spaces) -> None:
        if num_envs < 1:
            raise ConfigError(f"a vector of {num_envs} environments: give at least one index")
        self.num_envs = num_envs
        self._example: Tree = optree.tree_map(Tensor.numpy, zeros(action, num_envs), namespace=NAMESPACE)
        examples = optree.tree_leaves(self._example, namespace=NAMESPACE)
        self._real = any(leaf.dtype.kind == "f" for leaf in examples)
        self._single = isinstance(self._example, np.ndarray)
        self._shape: object = getattr(self._example, "shape", None)
        self._dtype: object = getattr(self._example, "dtype", None)
        self._free = threading.Lock()
        self._ready = False
        self._closed = False
        self._before = "before reset"

    @abstractmethod
    def _reset(self, seed: int) -> Tree: ...

    @abstractmethod
    def _step(self, action: Array) -> Step: ...

    def _close(self) -> None:
        """Called once. Most hold nothing."""

    def reset(self, seed: int) -> Tree:
        if not self._free.acquire(blocking=False):
            self._refuse("reset")
        try:
            if self._closed:
                raise ConfigError("reset() was called after close(): expected open environments. Make them anew.")
            self._ready = False
            self._before = "after a call that raised"
            observation = self._reset(seed)
            self._ready = True
            return observation
        finally:
            self._free.release()

    def step(self, action: Array) -> Step:
        if not self._free.acquire(blocking=False):
            self._refuse("step")
        try:
            if not self._ready:
                if self._closed:
                    raise ConfigError("step() was called after close(): expected open environments. Make them anew.")
                raise ConfigError(
                    f"step() was called {self._before}: expected environments that were reset. Call reset(seed) first."
                )
            # getattr: a list has neither, and shall be told what was expected.
            if self._single:
                if getattr(action, "shape", None) != self._shape or getattr(action, "dtype", None) != self._dtype:
                    self._refuse_action(action)
            elif _kinds(action) != _kinds(self._example):
                self._refuse_action(action)
            # One reduction tells for almost all: NumPy's own functions around it would cost as much again.
            if self._real and not (self._single and np.logical_and.reduce(np.isfinite(action), None)):
                _refuse_no_numbers(action)
            self._ready = False
            result = self._step(action)
            self._ready = True
            return result
        finally:
            self._free.release()

    def final_observation(self) -> Tree:
        raise ConfigError("final_observation() was called of environments that reset in the step after an end.")

    def close(self) -> None:
        if not self._free.acquire(blocking=False):
            self._refuse("close")
        try:
            if not self._closed:
                broken = not self._ready and self._before != "before reset"
                self._closed = True
                self._ready = False
                try:
                    self._close()
                except Exception:
                    if not broken:  # what broke them before is the news, and on its way
                        raise
        finally:
            self._free.release()

    def _refuse(self, call: str) -> NoReturn:
        raise ConfigError(
            f"{call}() was called while another call of the same environments was running: expected one call at a "
            "time. Make environments of its own for each thread."
        )

    def _refuse_action(self, action: object) -> NoReturn:
        if self._single:
            given = f"{action.dtype} {action.shape}" if isinstance(action, np.ndarray) else f"a {type(action).__name__}"
            raise ShapeError(f"step(action): expected an array {self._dtype} {self._shape}, got {given}")
        raise ShapeError(f"step(action): expected {_kinds(self._example)}, got {_kinds(action)}")


def _refuse_no_numbers(action: Tree) -> None:
    """Raise ConfigError for an action that is NaN or infinite somewhere."""
    leaves = [action] if isinstance(action, np.ndarray) else optree.tree_leaves(action, namespace=NAMESPACE)
    for leaf in leaves:
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            place = tuple(np.argwhere(~np.isfinite(leaf))[0].tolist())
            raise ConfigError(
                f"step(action): the action of number {place[0]} of these environments is {leaf[place]} at "
                f"{list(place[1:])}: expected finite numbers. Look for the first NaN in what chose it: the weights, or "
                "what it observed."
            )


def _kinds(tree: Tree) -> Tree:
    """A tree with "float32 (4, 2)" for every array in it."""
    return optree.tree_map(
        lambda leaf: f"{leaf.dtype} {leaf.shape}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}",
        tree,
        namespace=NAMESPACE,
    )
