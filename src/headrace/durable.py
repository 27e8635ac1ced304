"""Files and folders that are there whole or not at all, whatever ends the process or the machine, and when."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["discard", "replacing", "settle", "standing", "standing_for", "write"]

_BESIDE = re.compile(r"\.(.+)\.(new|old)")
"""A folder's name while it is written or removed (new), and while one takes its place (old)."""


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to write into, beside one whose place it takes at the end of the with-block.

    An exception leaves what was there. Killed between two renames, what was there lies aside, until it is settled.
    """
    new, old = _new(folder), _old(folder)
    _make(folder.parent)
    settle(folder)
    try:
        os.mkdir(new)
        yield new
        _sync(new)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        _sync(folder.parent)
        _remove(old)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.is_dir() and not folder.exists():
            os.rename(old, folder)
        raise


def standing_for(path: Path) -> Path | None:
    """The folder for which this one lies aside: still being written, half removed, or replaced; None for any other."""
    found = _BESIDE.fullmatch(path.name)
    return path.with_name(found[1]) if found else None


def standing(folder: Path) -> Path:
    """Where a folder is to be read: aside, if a replacement of it was killed before its end."""
    return old if not folder.exists() and (old := _old(folder)).is_dir() else folder


def settle(folder: Path) -> None:
    """Take away what a killed process left beside a folder, or put it back."""
    if (old := standing(folder)) != folder:
        os.rename(old, folder)
    _remove(_new(folder))
    _remove(_old(folder))


def discard(folder: Path) -> None:
    """Remove a folder; killed on the way, it is gone nevertheless."""
    new = _new(folder)
    os.rename(folder, new)
    _remove(new)


def write(path: Path, parts: Iterable[Any]) -> dict[str, Any]:
    """Write a new file, and wait until it lies on the disk. Returns its size in bytes and its SHA-256."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _new(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.new")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _remove(path: Path) -> None:
    """Remove a folder and what is in it, or a link, but nothing that a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    """Make a folder and those above it."""
    if not folder.is_dir():
        _make(folder.parent)
        os.mkdir(folder)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder lie on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
