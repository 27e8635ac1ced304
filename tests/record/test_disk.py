"""Files beside training: whole lines or none, a full disk that stops nothing, and the next write that works."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.record.disk import Failures, Lines, replace


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """No file can grow beyond this: a write is cut off there, and fails from there on, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 10, 50, 90, 99])
def test_CR_14_a_line_on_a_full_disk_is_lost_whole_and_the_next_one_is_written(tmp_path: Path, room: int) -> None:
    said: list[tuple[str, str]] = []
    failures = Failures(lambda kind, line: said.append((kind, line)))
    path = tmp_path / "lines"
    lines = Lines(path, "metrics.jsonl", failures)
    lines.write("a" * 99)
    with largest_file(100 + room):
        for _ in range(3):
            lines.write("b" * 99)
        assert path.read_text() == "a" * 99 + "\n"
    lines.write("c")
    lines.close()
    assert path.read_text() == "a" * 99 + "\nc\n"
    assert (lines.count, failures.counts) == (2, {"metrics.jsonl": 3})
    assert len(said) == 1
    assert said[0][0] == "metrics.jsonl"
    assert "File too large" in said[0][1]


def test_lines_where_there_is_no_folder_until_there_is_one(tmp_path: Path) -> None:
    failures = Failures(lambda kind, line: None)
    lines = Lines(tmp_path / "later" / "lines", "a kind", failures)
    lines.write("lost")
    (tmp_path / "later").mkdir()
    lines.write("kept")
    lines.close()
    assert (tmp_path / "later" / "lines").read_text() == "kept\n"
    assert failures.counts == {"a kind": 1}


@pytest.mark.parametrize(
    ("keep", "there", "left"),
    [
        (None, "1\n2\n3\n", "1\n2\n3\n"),
        (None, "1\n2\nhal", "1\n2\n"),
        (2, "1\n2\n3\n", "1\n2\n"),
        (5, "1\n2\n", "1\n2\n"),
        (0, "1\n2\n", ""),
    ],
)
def test_lines_of_an_earlier_life_are_cut_off(tmp_path: Path, keep: int | None, there: str, left: str) -> None:
    path = tmp_path / "lines"
    path.write_text(there)
    lines = Lines(path, "a kind", Failures(lambda kind, line: pytest.fail(line)), keep)
    assert (path.read_text(), lines.count) == (left, left.count("\n"))
    lines.write("new")
    lines.close()
    assert path.read_text() == left + "new\n"


@pytest.mark.parametrize("room", [0, 500])
def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, room: int) -> None:
    path = tmp_path / "result.json"
    replace(path, "old")
    with largest_file(room), pytest.raises(OSError, match="File too large"):
        replace(path, "new" * 1000)
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "old"
    (tmp_path / ".result.json.new").write_text("of a killed process")
    replace(path, "new")
    assert path.read_text() == "new"
