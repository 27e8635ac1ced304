"""The folder of a run: where its files lie, and how they are read."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from headrace.checkpoint import Checkpoints
from headrace.errors import ConfigError
from headrace.record.disk import json_text, replace
from headrace.record.machine import describe_machine
from headrace.spaces import Spec
from headrace.spec_json import spec_from_json, spec_to_json
from headrace.view.moment import Header, Moment

__all__ = ["RunFolder"]

_Path: TypeAlias = str | os.PathLike[str]
LATEST = "latest"
_UNFIT_FOR_NAMES = re.compile(r"[^\w.+-]+")


class RunFolder:
    """A run's folder, whether it is there or not. docs/run-folder.md says what is in every file.

    What reads raises ConfigError where a file is missing or damaged, with its path.
    """

    def __init__(self, path: _Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.json"
        self.command_path = self.path / "command.txt"
        self.machine_path = self.path / "machine.json"
        self.header_path = self.path / "header.json"
        self.spec_path = self.path / "spec.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.timeline_path = self.path / "timeline.jsonl"
        self.roles_path = self.path / "roles.json"
        self.schedule_path = self.path / "schedule.txt"
        self.result_path = self.path / "result.json"
        self.log_path = self.path / "logs" / "run.log"
        self.plot_path = self.path / "plots" / "return.png"
        self.checkpoints = Checkpoints(self.path / "checkpoints")

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Its last part, by which `find` knows it."""
        return self.path.name

    @property
    def called(self) -> str:
        """What a person types to mean it: "latest" where that leads here, else its path."""
        is_latest = (self.path.parent / LATEST).resolve() == self.path.resolve() and self.path.parent == Path("runs")
        return LATEST if is_latest else str(self.path)

    @classmethod
    def new(cls, root: _Path, env: str, method: str, plan: str, seed: int) -> RunFolder:
        """Make a folder for a run that begins now, named after these, and let `latest` in root lead to it.

        Raises ConfigError where it cannot be made.
        """
        root = Path(root)
        words = (env, method, plan, f"s{seed}", time.strftime("%Y%m%d-%H%M%S"))
        name = "__".join(_UNFIT_FOR_NAMES.sub("-", word).strip("-.") for word in words)
        _make(root, anew=False)
        number = 1
        while True:  # another run may have begun in the same second
            folder = cls(root / (name if number == 1 else f"{name}-{number}"))
            try:
                _make(folder.path, anew=True)
                break
            except FileExistsError:
                number += 1
        link = root / f".{LATEST}.{os.getpid()}"
        with suppress(OSError):  # a file system without links has no `latest`, and `find` says so
            link.symlink_to(folder.name, target_is_directory=True)
            os.replace(link, root / LATEST)
        return folder

    @classmethod
    def at(cls, path: _Path) -> RunFolder:
        """Make this folder for a run that begins now. Raises ConfigError where it is not empty or cannot be made."""
        folder = cls(path)
        _make(folder.path, anew=False)
        if any(folder.path.iterdir()):
            raise ConfigError(
                f"{folder.path} is not empty: a run overwrites nothing. Give a folder that is not there yet, or go on "
                f"with the run in it: headrace resume {folder.path}"
            )
        return folder

    @classmethod
    def find(cls, text: _Path, root: _Path = "runs") -> RunFolder:
        """The run that is meant by "latest", by a path, or by a name in root.

        Raises ConfigError, with the nearest names, where there is none.
        """
        root, text = Path(root), os.fspath(text)
        for folder in (cls(root / LATEST),) if text == LATEST else (cls(text), cls(root / text)):
            if folder.config_path.is_file():
                return cls(folder.path.resolve()) if text == LATEST else folder
        names = [path.parent.name for path in sorted(root.glob("*/config.json")) if path.parent.name != LATEST]
        if Path(text).is_dir() and text != LATEST:
            raise ConfigError(f"{text} is no run folder: it has no config.json. {_nearest(text, names, root)}")
        if text == LATEST and not names:
            raise ConfigError(f"there is no run in {root}/ yet. Begin one: headrace train ppo CartPole-v1")
        raise ConfigError(f"no run {text!r}, neither as a path nor in {root}/. {_nearest(text, names, root)}")

    def write(self, settings: Mapping[str, Any], spec: Spec, command: Sequence[str]) -> None:
        """Write what is known of a run before it begins, and the machine. Raises ConfigError where that fails.

        settings: as config.json holds them, with "place" and "device". command: the words of the command line, if the
        run was begun by one.
        """
        machine = {**describe_machine(), "place": settings.get("place"), "device": settings.get("device")}
        texts = {
            self.config_path: json_text(settings, indent=1),
            self.spec_path: json_text(spec_to_json(spec), indent=1),
            self.machine_path: json_text(machine, indent=1),
            self.command_path: shlex.join(command),
        }
        for path, text in texts.items():
            try:
                replace(path, text + "\n")
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error}. Mend that, or give another folder.") from error

    def config(self) -> dict[str, Any]:
        """All settings of the run, flat, as in config.json."""
        found: dict[str, Any] = _read(self.config_path)
        return found

    def header(self) -> Header:
        """What a view shows above the run."""
        found = _read(self.header_path)
        try:
            return Header.from_json(found)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{self.header_path} was written by another version of Headrace: {error!r}.") from error

    def spec(self) -> Spec:
        """What the run's environments show and take."""
        return spec_from_json(_read(self.spec_path))

    def result(self) -> dict[str, Any] | None:
        """What the run came to; None while it runs, and where it was killed."""
        found: dict[str, Any] | None = _read(self.result_path) if self.result_path.exists() else None
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, evaluations among them; none where nothing was written yet."""
        return list(_rows(self.metrics_path))

    def timeline(self) -> list[Moment]:
        """How the run stood, second by second; none where nothing was written yet."""
        try:
            return [Moment.from_json(row) for row in _rows(self.timeline_path)]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{self.timeline_path} was written by another version of Headrace: {error!r}.") from error


def _make(path: Path, anew: bool) -> None:
    """Make a folder. Raises FileExistsError where a new one is there already, and ConfigError where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=not anew)
    except OSError as error:
        if anew and isinstance(error, FileExistsError):
            raise
        raise ConfigError(
            f"the run folder {path} cannot be made: {error}. Give another one with --run, or mend that."
        ) from error


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: give the folder of a run that has begun.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, without a last one that is still being written."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}, is damaged: {error}.") from error


def _nearest(text: str, names: list[str], root: Path) -> str:
    near = difflib.get_close_matches(Path(text).name, names, n=3, cutoff=0)
    return f"Nearest: {', '.join(near)}." if near else f"There is no run in {root}/."
