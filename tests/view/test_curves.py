"""Curves of several seeds: the interquartile mean, its interval, the common axis, the picture and its numbers."""

from __future__ import annotations

import csv
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.view.curves import Band, band, draw, interval, iqm, write


def middle_half(values: Sequence[float]) -> float:
    """The mean between the quartiles: each value weighs as much as its share of the ranks lies in [1/4, 3/4]."""
    share = 1 / len(values)
    weights = [max(0.0, min(0.75, (k + 1) * share) - max(0.25, k * share)) for k in range(len(values))]
    return sum(weight * value for weight, value in zip(weights, sorted(values), strict=True)) / 0.5


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([7.0], 7.0),
        ([6.0, 1.0, 2.0], (1 / 4 + 2 + 6 / 4) / 1.5),
        ([1.0, 2.0, 3.0, 100.0], 2.5),
        ([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 5.0], 5.25),  # 3, 5, 6, 7
    ],
)
def test_the_interquartile_mean_is_of_the_middle_half(values: list[float], wanted: float) -> None:
    assert iqm(values) == pytest.approx(wanted, rel=1e-12)
    assert middle_half(values) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("count", range(1, 14))
def test_the_interquartile_mean_of_any_number(count: int) -> None:
    values = np.random.default_rng(count).normal(size=(2, 5, count))
    assert iqm(values).shape == (2, 5)
    np.testing.assert_allclose(iqm(values), np.apply_along_axis(middle_half, -1, values), rtol=1e-12)


@pytest.mark.parametrize("count", [4, 5])
def test_the_interval_is_that_of_all_resamples(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count).tolist()
    every = sorted(middle_half(resample) for resample in itertools.product(values, repeat=count))

    def quantile(share: float) -> float:
        return every[math.floor(share * len(every))]

    low, high = interval(values)
    assert quantile(0.02) <= low <= quantile(0.03)  # of 10,000 resamples the 250th lies within 3 deviations
    assert quantile(0.97) <= high <= quantile(0.98)


def test_the_interval_of_three_values_is_their_range() -> None:
    """One resample in 27 is the lowest value thrice, which is more than one in 40."""
    np.testing.assert_allclose(interval([[3.0, 1.0, 2.0], [5.0, 5.0, 5.0]]), [[1.0, 5.0], [3.0, 5.0]])
    assert interval(np.zeros((2, 3, 4))).shape == (2, 2, 3)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point of a band takes milliseconds."""
    monkeypatch.setattr("headrace.view.curves.POINTS", 11)


@pytest.mark.usefixtures("few")
def test_a_band_is_of_runs_on_a_common_axis() -> None:
    """Three lines through the origin, with points at other places, known from 10 to 100."""
    found = band([([0, 50, 100], [0, 50, 100]), ([10, 200], [20, 400]), ([5, 60, 150], [15, 180, 450])])
    assert found.runs == 3
    assert (found.at[0], found.at[-1]) == (10, 100)
    np.testing.assert_allclose(found.iqm, [middle_half([x, 2 * x, 3 * x]) for x in found.at])
    np.testing.assert_allclose(found.low, found.at)
    np.testing.assert_allclose(found.high, 3 * found.at)


def test_the_band_of_one_run_is_its_curve() -> None:
    found = band([([0, 10], [5, 25])])
    assert found.runs == 1
    for curve in (found.iqm, found.low, found.high):
        np.testing.assert_allclose(curve, 5 + 2 * found.at)


def test_runs_with_nothing_in_common_are_refused() -> None:
    with pytest.raises(ConfigError, match="ends at 10, before another one's begins, at 20"):
        band([([0, 10], [1, 1]), ([20, 30], [1, 1])])


@pytest.mark.usefixtures("few")
def test_the_numbers_are_kept_as_csv(tmp_path: Path) -> None:
    bands = {"a, b": band([([0, 10], [5, 25])]), "c": band([([0, 10], [1, 1]), ([0, 10], [3, 3])])}
    write(bands, "seconds", tmp_path / "out.csv")
    first, *rows = csv.reader((tmp_path / "out.csv").read_text().splitlines())
    assert first == ["group", "runs", "seconds", "return_iqm", "return_low", "return_high"]
    assert len(rows) == 2 * len(bands["c"].at)
    assert rows[0] == ["a, b", "1", "0", "5", "5", "5"]
    assert rows[-1] == ["c", "2", "10", "2", "1", "3"]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[plot\]'"):
        draw({}, "seconds", tmp_path / "out.png")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_shows_every_group(tmp_path: Path, ending: str) -> None:
    flat = np.arange(5.0)
    path = tmp_path / f"out.{ending}"
    draw({"first": Band(3, flat, flat, flat - 1, flat + 1), "second": Band(1, flat, flat, flat, flat)}, "steps", path)
    begins = path.read_bytes()[:400]
    assert begins.startswith(b"\x89PNG") if ending == "png" else b"<svg" in begins
    with pytest.raises(ConfigError, match=r"cannot be written as 'out\.xyz'"):
        draw({}, "steps", tmp_path / "out.xyz")
