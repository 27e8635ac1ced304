"""Checkpoints: a plan's snapshot in a folder, written whole or not at all, and verified before it is believed.

    checkpoints = Checkpoints("runs/one/checkpoints", keep=3)
    for report in plan.run(learner, env, place, env_steps=100_000):
        checkpoints.save(report.env_steps, report.snapshot(), {"method": "PPO"})

    newest = checkpoints.latest()                          # another day, in another process
    plan.run(learner, env, place, env_steps=200_000, state=load(newest.folder))

A folder holds the weights, all other tensors, and one manifest of plain JSON. Nothing in it can run code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headrace.durable import discard, replacing, settle, standing, standing_for, write
from headrace.encoding import Decoder, Encoder, Json, names, safetensors_of
from headrace.errors import CheckpointError, ConfigError

__all__ = ["Checkpoint", "Checkpoints", "load", "load_weights", "save", "verify"]

FORMAT = 1
WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.safetensors", "manifest.json"
_LIMIT = 8 * 2**20  # bytes of a manifest: JSON takes up to 25 times its size while it is read
_UNSIGNED = b"0" * 64  # what stands for the manifest's own SHA-256 while that is computed
_STEP = re.compile(r"step_(\d+)")
_UNFIT = (AttributeError, LookupError, RecursionError, RuntimeError, SafetensorError, TypeError, ValueError)
"""What goes wrong where a manifest or a file with the right SHA-256 was not written by `save`."""
_Folder: TypeAlias = str | os.PathLike[str]


def save(folder: _Folder, state: Mapping[str, Any], info: Mapping[str, Any] | None = None) -> None:
    """Write a report's `snapshot()` into a folder, and what is to be known about it; replace a checkpoint there.

    state: nested dicts, lists, tuples and NamedTuples of tensors, NumPy arrays and scalars, numbers, strings, bytes,
    bools and None, with the network's `state_dict` in state["learner"]["net"]. info: such, without tensors and arrays.
    Raises ConfigError for anything else, and CheckpointError where it cannot be written; what was there stays then.
    """
    learner = state.get("learner")
    if not (isinstance(learner, dict) and isinstance(learner.get("net"), dict)):
        raise ConfigError(f"state has {sorted(state) or 'nothing'}; give what a report's snapshot() returned.")
    encoder, teller = Encoder("state"), Encoder("info")
    try:
        body = {"info": teller.encode(dict(info or {})), "state": encoder.encode(dict(state))}
    except RecursionError as error:
        raise ConfigError("state or info is nested too deeply, or holds itself; give a tree.") from error
    if teller.tensors:
        raise ConfigError(f"info holds tensors or arrays: {', '.join(teller.tensors)}. Put them into state.")
    folder = Path(os.path.abspath(folder))
    try:
        _check_replaceable(folder)
        with replacing(folder) as new:
            tensors = {WEIGHTS: encoder.weights, STATE: encoder.tensors}
            files = {name: write(new / name, safetensors_of(held)) for name, held in tensors.items()}
            write(new / MANIFEST, [_manifest(files, body)])
    except OSError as error:
        remedy = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "Mend that"
        raise CheckpointError(
            f"{folder} could not be saved: {error}. Checkpoints from before are intact. {remedy}, and save again."
        ) from error


def load(folder: _Folder, *, net: nn.Module | None = None, expect: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state that was saved there, bit for bit: tensors on the CPU, without gradients.

    net: a network whose names, shapes and dtypes the weights must have. expect: what `info` must say, such as
    {"method": "PPO"}. Raises CheckpointError where a file is missing, damaged, or of something else.
    """
    folder = Path(folder)
    try:
        reader = _Reader(folder)
        reader.verify()
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_advice(folder)}") from error
    for name, wanted in (expect or {}).items():
        if (found := reader.info.get(name)) != wanted:
            raise CheckpointError(
                f"{folder / MANIFEST} says {name} {found!r}, and {wanted!r} was expected. Go on with {found!r}, or "
                f"give a checkpoint of {wanted!r}."
            )
    state: dict[str, Any] = reader.decode("state")
    if net is not None:
        _check_weights(folder, net, state["learner"]["net"])
    return state


def load_weights(folder: _Folder, *, net: nn.Module | None = None) -> dict[str, Any]:
    """The network's `state_dict` alone; the file of all other tensors is not read.

    net: a network whose names, shapes and dtypes they must have. Raises CheckpointError.
    """
    try:
        weights: dict[str, Any] = _Reader(Path(folder)).decode("state", "learner", "net")
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_advice(Path(folder))}") from error
    if net is not None:
        _check_weights(Path(folder), net, weights)
    return weights


def verify(folder: _Folder) -> dict[str, Any]:
    """The `info` of a checkpoint, after every byte of it was compared. Raises CheckpointError."""
    reader = _Reader(Path(folder))
    reader.verify()
    return reader.info


@dataclass(frozen=True)
class Checkpoint:
    """One that was found intact. skipped: what is wrong with those that would have been preferred to it."""

    folder: Path
    step: int
    info: dict[str, Any]
    skipped: tuple[CheckpointError, ...] = ()


class Checkpoints:
    """The checkpoints of one run, in folders named by their step. One process writes them; any may read.

    keep: how many of the newest stay, beside the one with the highest score; None: all.
    """

    def __init__(self, folder: _Folder, keep: int | None = 3) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r}: give an integer from 1 on, or None to keep all.")
        self.folder, self.keep = Path(os.path.abspath(folder)), keep

    def save(
        self, step: int, state: Mapping[str, Any], info: Mapping[str, Any] | None = None, score: float | None = None
    ) -> Path:
        """Save, then remove what need not stay. Its `info` has step and score too. Raises as the function `save`."""
        if type(step) is not int or step < 0:
            raise ConfigError(f"step={step!r}: give an integer from 0 on.")
        folder = self.folder / f"step_{step:09d}"
        try:
            for path in list(self.folder.glob(".step_*")):
                if (meant := standing_for(path)) and _STEP.fullmatch(meant.name):
                    settle(meant)
            save(folder, state, {**(info or {}), "step": step, "score": None if score is None else float(score)})
            if self.keep is not None:
                folders = list(self._folders().values())
                for other in {*folders} - {folder, *folders[-self.keep :], *self._by_score()[:1]}:
                    discard(other)
        except OSError as error:
            raise CheckpointError(f"{self.folder} could not be tidied up: {error}. Mend that.") from error
        return folder

    def latest(self, before: int | None = None) -> Checkpoint | None:
        """The newest that is intact, of those before a step if one is given; None where none was saved.

        Raises CheckpointError where there are some and none is intact.
        """
        found = [folder for step, folder in self._folders().items() if before is None or step < before]
        return self._first_intact(found[::-1])

    def best(self) -> Checkpoint | None:
        """The one with the highest score that is intact, the newest of equal ones; None where none has a score."""
        return self._first_intact(self._by_score())

    def _folders(self) -> dict[int, Path]:
        """Folders by step, in order. One that a killed save had moved aside counts as what it was."""
        found = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            meant = standing_for(path) or path
            if (step := _STEP.fullmatch(meant.name)) and standing(meant).is_dir():
                found[int(step[1])] = meant
        return dict(sorted(found.items()))

    def _by_score(self) -> list[Path]:
        scored = []
        for step, folder in self._folders().items():
            try:
                score = _Reader(folder).info.get("score")
            except CheckpointError:  # one that cannot be read has no score; `latest` says what is wrong with it
                continue
            if isinstance(score, float) and not math.isnan(score):
                scored.append((score, step, folder))
        return [folder for _, _, folder in sorted(scored, reverse=True)]

    def _first_intact(self, folders: Iterable[Path]) -> Checkpoint | None:
        skipped: list[CheckpointError] = []
        for folder in folders:
            try:
                info = verify(folder)
            except CheckpointError as error:
                skipped.append(error)
            else:
                return Checkpoint(folder, int(folder.name.removeprefix("step_")), info, tuple(skipped))
        if skipped:
            raise CheckpointError(f"no checkpoint in {self.folder} is intact. {' '.join(map(str, skipped))}")
        return None


class _Reader:
    """The files of one checkpoint. Raises CheckpointError unless the manifest is as it was written."""

    def __init__(self, folder: Path) -> None:
        self.folder = standing(folder)
        self._manifest = self._read_manifest()
        self._held: dict[str, dict[str, Tensor]] = {}
        self._verified: set[str] = set()
        self.info: dict[str, Any] = self.decode("info")

    def verify(self) -> None:
        """Compare all bytes with what the manifest says."""
        for name in (WEIGHTS, STATE):
            self._verify(name)

    def decode(self, *path: str) -> Any:
        """The tree that stands there in the manifest. All of the state asks for all tensors that there are."""
        source = str(self.folder / MANIFEST)
        node = self._manifest
        try:
            for key in path:
                node = node[key]
            for name, asked in zip((WEIGHTS, STATE), names(node), strict=True):
                self._check_names(name, asked, whole=path == ("state",))
            return Decoder(source, lambda: self._tensors(WEIGHTS), lambda: self._tensors(STATE)).decode(node)
        except _UNFIT as error:
            raise CheckpointError(f"{source} is not as Headrace writes it: {error!r}. Do not use it.") from error

    def _check_names(self, name: str, asked: set[str], whole: bool) -> None:
        there = set(self._tensors(name)) if asked or whole else set()
        lacks, extra = sorted(asked - there), sorted(there - asked) if whole else []
        if lacks or extra:
            raise CheckpointError(
                f"{self.folder / name} lacks {', '.join(lacks) or 'nothing'}, and has {', '.join(extra) or 'nothing'} "
                "beside what was saved. It was changed since; do not use it."
            )

    def _read_manifest(self) -> Json:
        path = self.folder / MANIFEST
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is no folder. Give that of a checkpoint.")
        if (size := _size(path)) > _LIMIT:
            raise CheckpointError(f"{path} is no manifest: {size:,} bytes, and {_LIMIT:,} are the most.")
        try:
            text = path.read_bytes()
            manifest = json.loads(text)
            number, digest = manifest["format"], manifest["sha256"].encode()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: it is not the JSON of a manifest ({error}).") from error
        if type(number) is int and number > FORMAT:
            raise CheckpointError(
                f"{path} has format {number}, written by {manifest.get('written_by')}; this is Headrace "
                f"{version('headrace')}, which reads up to format {FORMAT}. Install a newer one."
            )
        if number != FORMAT or hashlib.sha256(text.replace(digest, _UNSIGNED, 1)).hexdigest().encode() != digest:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one that stands in it.")
        return manifest

    def _verify(self, name: str) -> None:
        path = self.folder / name
        try:
            told = self._manifest["files"][name]
            if (size := _size(path)) != told["size"]:
                raise CheckpointError(f"{path} is damaged: it is {size:,} bytes long, and {told['size']:,} were saved.")
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != told["sha256"]:
                raise CheckpointError(f"{path} is damaged: its SHA-256 is {found}, and {told['sha256']} was saved.")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
        except _UNFIT as error:
            raise CheckpointError(f"{self.folder / MANIFEST} is not as Headrace writes it: {error!r}.") from error
        self._verified.add(name)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        if name not in self._held:
            if name not in self._verified:
                self._verify(name)
            with safe_open(self.folder / name, framework="pt") as file:
                self._held[name] = {key: file.get_tensor(key).clone() for key in file.offset_keys()}
        return self._held[name]


def _check_weights(folder: Path, net: nn.Module, weights: Mapping[str, Any]) -> None:
    if found := _differences(net.state_dict(), weights):
        raise CheckpointError(
            f"{folder / WEIGHTS} is of another network: {'; '.join(found)}. Build the network as it was when this was "
            "saved, or give a checkpoint of this one."
        )


def _size(path: Path) -> int:
    """Bytes of a file. Raises CheckpointError where there is none: to open a pipe would wait for ever."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path} is missing: {error.strerror}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is no file.")
    return found.st_size


def _advice(folder: Path) -> str:
    """Where to go on from instead of a damaged checkpoint."""
    step = _STEP.fullmatch(folder.name)
    try:
        found = Checkpoints(folder.parent).latest(before=int(step[1])) if step else None
    except CheckpointError:
        found = None
    return (
        f"The newest intact one before it is {found.folder}." if found else "No intact one from before lies beside it."
    )


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What tells these weights from those of a network, name by name."""
    told = [f"it lacks {name}" for name in wanted if name not in found]
    told += [f"it has {name} beside" for name in found if name not in wanted]
    for name in wanted:
        have, want = found.get(name), wanted[name]
        if isinstance(have, Tensor) and (have.shape, have.dtype) != (want.shape, want.dtype):
            told.append(f"{name} is {have.dtype} {list(have.shape)}, the network's {want.dtype} {list(want.shape)}")
    return told


def _manifest(files: Mapping[str, Any], body: Mapping[str, Json]) -> bytes:
    by = {"headrace": version("headrace"), "torch": torch.__version__, "numpy": np.__version__}
    unsigned = {"sha256": _UNSIGNED.decode(), "format": FORMAT, "written_by": by, "files": files, **body}
    try:
        lines = ",\n".join(f'"{name}": {json.dumps(told, allow_nan=False)}' for name, told in unsigned.items())
        text = f"{{{lines}}}\n".encode()
    except ValueError as error:
        raise ConfigError(f"state has an integer that JSON cannot hold: {error}.") from error
    if len(text) > _LIMIT:
        raise ConfigError(
            f"without its tensors and arrays, state is {len(text):,} bytes of JSON; {_LIMIT:,} are the most. Hold long "
            "lists of numbers as arrays."
        )
    return text.replace(_UNSIGNED, hashlib.sha256(text).hexdigest().encode(), 1)


def _check_replaceable(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(f"{folder} is a link or a file. Give a folder, or a name that is not there yet.")
    others = sorted({*os.listdir(folder)} - {WEIGHTS, STATE, MANIFEST}) if folder.exists() else []
    if others:
        raise CheckpointError(f"{folder} has {', '.join(others[:3])} in it, which would be lost. Give an empty one.")
