"""A trained policy, to be asked what to do: from a run's folder, without its environment and without what trained it.

policy = load("runs/latest")
action = policy.act(observation)                       # one observation, or a batch of them
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import optree
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from headrace.checkpoint import Checkpoint, Checkpoints, load_weights, verify
from headrace.errors import CheckpointError, ConfigError, ShapeError
from headrace.method import Method
from headrace.settings import convert, fields
from headrace.spaces import Discrete, MultiBinary, MultiDiscrete, Space, Spaces, Spec
from headrace.spec_json import spec_from_json
from headrace.struct import NAMESPACE, Tree

__all__ = ["Policy", "load"]

_Array: TypeAlias = np.ndarray[Any, Any]


class Policy:
    """A method's choices with one network: observations in, actions out, both as the environment has them.

    seed: of what `act` draws where it is not greedy. No global generator is moved. Not for several threads at once.
    """

    def __init__(
        self,
        method: Method,
        spec: Spec,
        net: nn.Module,
        *,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.method, self.spec, self.net = method, spec, net
        self.checkpoint = checkpoint
        """Where the weights are from: its folder, its step in environment steps, and what else it tells of itself."""
        self._rng = torch.Generator().manual_seed(seed)
        self._memory: Tree | None = None
        self._size = 0  # observations that the memory is of

    def act(self, observation: Any, greedy: bool = True) -> Any:
        """What to do at one observation, or at each of a batch [B, …].

        observation: of the spec's shapes, in NumPy arrays, tensors, lists or numbers; dicts and tuples of them where
        the spec has some. greedy: the most likely action, instead of one drawn from the policy.
        Returns what the environment's `step` takes, in NumPy: for one observation without the batch's axis. A policy
        with a memory remembers from call to call, until `reset`. An action mask in the observation is obeyed.
        Raises ShapeError for other keys, shapes or dtypes, and for another batch than is remembered; ConfigError for
        values that are not finite or not in a space of integers.
        """
        sizes: dict[str, int | None] = {}
        seen = _taken(self.spec.observation, observation, "observation", sizes)
        if len({*sizes.values()}) != 1:
            told = ", ".join(f"{path}: {'one' if size is None else size}" for path, size in sizes.items())
            raise ShapeError(f"the parts of an observation are of one batch; these are not: {told}.")
        single = next(iter(sizes.values()))
        size = 1 if single is None else single
        if self._memory is not None and size != self._size:
            raise ShapeError(
                f"the policy remembers {self._size} episodes that go on, and was given {size} observations. Give one "
                "for each, or call reset() first."
            )
        with torch.inference_mode():
            memory = self.method.initial_memory(self.net, size) if self._memory is None else self._memory
            noise = None
            if not greedy:
                noise = _map(lambda leaf: leaf[0], self.method.noise(self.net, 1, size, self._rng))
            decision = self.method.act(self.net, seen, memory, noise)
        self._memory, self._size = decision.memory, size
        action = decision.action if decision.environment_action is None else decision.environment_action
        return _map(lambda leaf: leaf.numpy()[0] if single is None else leaf.numpy(), action)

    def reset(self, where: ArrayLike | None = None) -> None:
        """Forget, before an episode begins: all, or what is remembered of the rows of a batch where bools [B] say so.

        Without a memory it does nothing. Raises ShapeError for other than bools, and for another batch.
        """
        if where is None:
            self._memory = None
            return
        rows = np.atleast_1d(np.asarray(where))
        if rows.dtype != bool or (self._memory is not None and rows.shape != (self._size,)):
            expected = f"bool ({self._size},)" if self._memory is not None else "bools"
            raise ShapeError(f"reset(where=…): expected {expected}, got {rows.dtype} {rows.shape}.")
        if self._memory is None:
            return
        fresh, forgotten = self.method.initial_memory(self.net, self._size), torch.from_numpy(rows.copy())

        def chosen(held: Tensor, new: Tensor) -> Tensor:
            return torch.where(forgotten.view(-1, *[1] * (held.ndim - 1)), new, held)

        with torch.inference_mode():
            self._memory = _map(chosen, self._memory, fresh)

    def __repr__(self) -> str:
        of = f" from {self.checkpoint.folder}" if self.checkpoint else ""
        return f"<Policy of {type(self.method).__name__}{of}>"


def load(
    run: str | os.PathLike[str],
    checkpoint: Literal["last", "best"] | int = "last",
    *,
    method: Method | None = None,
    seed: int = 0,
) -> Policy:
    """The policy of a run's folder, or of one checkpoint's folder in it, on the CPU.

    checkpoint: the last one, the one with the best evaluation, or that of so many environment steps. method: instead of
    the one that the folder names, whose class is imported; then nothing is. seed: of what `act` draws.
    No environment is made and none of its packages imported. Raises ConfigError for a folder that is none of a run, a
    checkpoint that it has not, and a method that cannot be made; CheckpointError for one that is damaged or of another
    network.
    """
    folder = Path(run)
    if (folder / "manifest.json").is_file():
        if checkpoint != "last":
            raise ConfigError(f"{folder} is one checkpoint; checkpoint={checkpoint!r} chooses among those of a run.")
        info = verify(folder)
        found = Checkpoint(folder, int(info.get("step", 0)), info)
        folder = folder.absolute().parent.parent
    else:
        _check_run(folder)
        found = _chosen(Checkpoints(folder / "checkpoints"), checkpoint)
    spec = spec_from_json(_read(folder / "spec.json"))
    method = _method_of(folder / "config.json") if method is None else method
    with torch.random.fork_rng(devices=[]):  # for layers that ask torch's global generator
        net = method.build(spec, torch.Generator().manual_seed(0))
    net.load_state_dict(load_weights(found.folder, net=net))
    return Policy(method, spec, method.acting(net).eval().requires_grad_(False), seed=seed, checkpoint=found)


def _check_run(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder. Give that of a run, such as runs/latest, or of a checkpoint in it.")
    lacking = [name for name in ("config.json", "spec.json", "checkpoints") if not (folder / name).exists()]
    if lacking:
        raise ConfigError(
            f"{folder} is no folder of a run with checkpoints: it has no {', '.join(lacking)}. Give one that "
            "headrace train has made, or a checkpoint in it."
        )


def _chosen(checkpoints: Checkpoints, which: str | int) -> Checkpoint:
    """The checkpoint that is asked for. One that would be passed over because it is damaged is an error here."""
    if type(which) is int:
        folder = checkpoints.folder / f"step_{which:09d}"
        if not folder.is_dir():
            there = ", ".join(sorted(path.name for path in checkpoints.folder.glob("step_*"))) or "none"
            raise ConfigError(f"{checkpoints.folder} has no checkpoint of step {which}. There are: {there}.")
        return Checkpoint(folder, which, verify(folder))
    if which not in ("last", "best"):
        raise ConfigError(f'checkpoint={which!r}: choose "last", "best", or the step of one.')
    found = checkpoints.latest() if which == "last" else checkpoints.best()
    if found is None:
        why = "None was evaluated; choose the last." if which == "best" and checkpoints.latest() else "It has none."
        raise ConfigError(f"{checkpoints.folder} has no {which} checkpoint. {why}")
    if found.skipped:
        raise CheckpointError(
            f"the {which} checkpoint cannot be used. {found.skipped[0]} Give checkpoint={found.step} to use that of "
            f"step {found.step}."
        )
    return found


def _method_of(path: Path) -> Method:
    """The method that a run's configuration names, with its hyperparameters."""
    config = _read(path)
    name = str(config.get("classes", {}).get("method"))
    kind = _imported(name, path)
    settings = fields(kind)
    if opaque := [key for key in settings if key in config.get("opaque", ())]:
        raise ConfigError(
            f"{path} cannot hold what {', '.join(opaque)} of {kind.__name__} was. Give load(…, method="
            f"{kind.__name__}(…)), as it was trained."
        )
    try:
        return kind(**{key: convert(config[key], held.type) for key, held in settings.items() if key in config})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} has no {kind.__name__} that can be made: {error}") from error


def _imported(name: str, path: Path) -> type[Method]:
    advice = "Make it importable, or give load(…, method=…) with the method as it was trained."
    module, _, qualified = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the module does while it is imported
        raise ConfigError(f"{path} names the method {name}, which cannot be imported: {error!r}. {advice}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{path} names {name} as the method, which is no Method but {found!r}. {advice}")
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. A policy is loaded from a run's folder."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}. It was changed since the run wrote it.") from error


def _taken(spaces: Spaces, given: Any, path: str, sizes: dict[str, int | None]) -> Tree:
    """The observation as tensors [B, …], in the space's dtypes; sizes: B by path, None for one without that axis."""
    if isinstance(spaces, dict):
        if not isinstance(given, Mapping) or given.keys() != spaces.keys():
            found = f"{sorted(map(str, given))}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
            raise ShapeError(f"{path}: expected a dict with the keys {sorted(map(str, spaces))}, got {found}.")
        return {key: _taken(inner, given[key], f"{path}[{key!r}]", sizes) for key, inner in spaces.items()}
    if isinstance(spaces, tuple):
        if not isinstance(given, tuple | list) or len(given) != len(spaces):
            found = f"{len(given)}" if isinstance(given, tuple | list) else f"a {type(given).__name__}"
            raise ShapeError(f"{path}: expected a tuple of {len(spaces)}, got {found}.")
        parts = zip(spaces, given, strict=True)
        return tuple(_taken(inner, part, f"{path}[{place}]", sizes) for place, (inner, part) in enumerate(parts))
    array = _cast(spaces, given, path)
    sizes[path] = None if array.ndim == len(spaces.shape) else len(array)
    _check_values(spaces, array, path)
    return torch.from_numpy(array if sizes[path] is not None else array[None])


def _cast(space: Space, given: Any, path: str) -> _Array:
    """A new array of the space's dtype, of its shape [*shape] or [B, *shape]; casts what stays the same number."""
    dtype = torch.empty(0, dtype=space.dtype).numpy().dtype
    shape = ", ".join(map(str, space.shape))
    expected = f"{path}: expected {dtype} {space.shape}, or a batch of them (B{', ' if shape else ''}{shape})"
    try:
        array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{expected}; got a {type(given).__name__}, which is no array: {error}.") from error
    got = f"got {array.dtype} {array.shape}"
    batched = array.ndim == len(space.shape) + 1 and len(array) > 0
    if array.shape[batched:] != space.shape or array.dtype.kind not in ("biuf" if dtype.kind == "f" else "biu"):
        raise ShapeError(f"{expected}; {got}.")
    with np.errstate(all="ignore"):
        cast: _Array = array.astype(dtype, order="C")
    if dtype.kind != "f" and not np.array_equal(cast, array):
        raise ShapeError(f"{expected}; {got} with values that {dtype} cannot hold.")
    return cast


def _check_values(space: Space, array: _Array, path: str) -> None:
    """Raise ConfigError for what no network can read."""
    match space:
        case Discrete(n, start):
            bad = (array < start) | (array >= start + n)
        case MultiDiscrete(sizes, starts):
            bad = (array < np.array(starts)) | (array >= np.add(starts, sizes))
        case MultiBinary():
            bad = (array < 0) | (array > 1)
        case _:
            bad = ~np.isfinite(array)
    if bad.any():
        place = tuple(np.argwhere(bad)[0].tolist())
        raise ConfigError(f"{path}{list(place) if place else ''} is {array[place]}: expected a value of {space}.")


def _map(function: Any, tree: Tree, *others: Tree) -> Tree:
    return optree.tree_map(function, tree, *others, namespace=NAMESPACE)
