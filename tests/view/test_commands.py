"""`headrace watch` and `headrace plot`, on run folders of which every number is known."""

from __future__ import annotations

import csv
import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headrace.commands import plot, watch
from headrace.errors import ConfigError
from headrace.record.folder import RunFolder
from headrace.view.moment import Header, Moment

RESULT = {"status": "finished", "env_steps": 4_000, "wall_seconds": 61.0, "final_return": 500.0, "error": None}

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, header: Header, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make("a", seed=2, slope=3.0, result=…): a run folder runs/a whose return is slope × k at step 1000 k, k s."""
    monkeypatch.chdir(tmp_path)

    def build(
        name: str, slope: float = 1.0, result: Mapping[str, Any] | None = RESULT, rows: int = 5, **config: Any
    ) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        settings = {"method": "ppo", "env": "CartPole-v1", "plan": "sync-batches", "place": "inline", "seed": 1}
        settings |= {"plan.max_lag": 0, "total_timesteps": 4_000, **config}
        (folder / "config.json").write_text(json.dumps({**settings, "origins": dict.fromkeys(settings, "flag")}))
        (folder / "header.json").write_text(json.dumps(header.to_json()))
        lines = [{"global_step": 0, "time": 0.0, "updates": 0}]  # no episode has ended yet
        lines += [
            {"global_step": 1000 * k, "time": float(k), "updates": 10 * k, "charts/return_mean100": slope * k}
            for k in range(1, rows)
        ]
        lines += [{"global_step": 4000, "time": 4.0, "eval/episodic_return": 1e9}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if result is not None:
            (folder / "result.json").write_text(json.dumps(result))
        return folder

    return build


def numbers(path: Path) -> dict[str, list[list[float]]]:
    """What a CSV holds, by group: runs, at, iqm, low, high."""
    found: dict[str, list[list[float]]] = {}
    for name, *row in list(csv.reader(path.read_text().splitlines()))[1:]:
        found.setdefault(name, []).append([float(cell) for cell in row])
    return found


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Drawing takes half a second; here only what is drawn is noted."""
    drawn: list[Any] = []
    monkeypatch.setattr("headrace.view.curves.draw", lambda *args, **named: drawn.append((args, named)))
    monkeypatch.setattr("headrace.view.curves.RESAMPLES", 200)
    return drawn


# plot -----------------------------------------------------------------------------------------------------------------


def test_seeds_of_one_setting_are_a_group(make: Make, no_picture: list[Any], capsys: Any) -> None:
    for seed in (1, 2, 3):
        make(f"r{seed}", slope=float(seed), seed=seed)
    assert plot.main(["r1", "r2", "runs/r3"]) == 0
    picture = Path("runs/r1/plots/comparison.png")
    (((_, axis, path), named),) = no_picture
    assert (axis, path, named["title"]) == ("environment steps", picture, "ppo · CartPole-v1 · sync-batches")
    (rows,) = numbers(picture.with_suffix(".csv")).values()
    assert rows[0] == [3, 1000, 2, 1, 3]
    assert rows[-1] == [3, 4000, 8, 4, 12]
    out = capsys.readouterr().out
    assert "8.0 [4.0, 12.0] at 4,000, n = 3" in out
    assert "note" not in out


@pytest.mark.parametrize(("x", "end"), [("steps", 4000), ("time", 4), ("updates", 40)])
def test_the_axis(make: Make, no_picture: list[Any], x: str, end: float) -> None:
    make("a")
    plot.main(["a", "--x", x, "--output", "out/p.svg"])
    (rows,) = numbers(Path("out/p.csv")).values()
    assert rows[-1] == [1, end, 4, 4, 4]


def test_a_folder_of_runs_is_all_of_them_and_by_tells_them_apart(
    make: Make, no_picture: list[Any], capsys: Any
) -> None:
    make("a", **{"plan.max_lag": 0})
    make("b", slope=2.0, seed=2, **{"plan.max_lag": 1})
    (Path("runs") / "latest").symlink_to("b")
    assert plot.main(["runs", "--output", "p.png"]) == 0
    assert "differ in plan.max_lag (0, 1). --by plan.max_lag tells them apart." in capsys.readouterr().out
    (rows,) = numbers(Path("p.csv")).values()
    assert rows[-1][0] == 2
    assert plot.main(["runs", "--by", "plan.max-lag", "--output", "p.png"]) == 0
    assert "note" not in capsys.readouterr().out
    found = numbers(Path("p.csv"))
    assert {name: rows[-1][:3] for name, rows in found.items()} == {
        "plan.max_lag 0": [1, 4000, 4],
        "plan.max_lag 1": [1, 4000, 8],
    }


def test_environments_are_never_mixed(make: Make, no_picture: list[Any]) -> None:
    make("a", place="inline")
    make("b", place="inline", env="Acrobot-v1")
    make("c", place="threads", seed=2)
    plot.main(["runs/", "--by", "place", "--output", "p.png"])
    assert set(numbers(Path("p.csv"))) == {"inline · CartPole-v1", "inline · Acrobot-v1", "threads · CartPole-v1"}


def test_a_seed_that_is_there_twice_is_named(make: Make, no_picture: list[Any], capsys: Any) -> None:
    make("a", seed=7)
    make("b", seed=7, total_timesteps=8_000)
    plot.main(["a", "b", "a"])
    out = capsys.readouterr().out
    assert "n = 2" in out, "the run that is named twice counts once"
    assert "has seed 7 more than once" in out


def test_what_cannot_be_plotted(make: Make, no_picture: list[Any], tmp_path: Path) -> None:
    make("a", rows=1)
    with pytest.raises(ConfigError, match="has no returns yet"):
        plot.main(["a"])
    with pytest.raises(ConfigError, match=r"no 'plan\.lag' in its config\.json"):
        plot.main(["a", "--by", "plan.lag"])
    with pytest.raises(ConfigError, match="nearest: --output"):
        plot.main(["a", "--outptu", "p.png"])
    with pytest.raises(ConfigError, match="no run 'b'"):
        plot.main(["b"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is no run folder"):
        plot.main(["empty"])
    make("c")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"could not be written: .*Give --output FILE"):
        plot.main(["c", "--output", "file/p.png"])


@pytest.mark.slow
def test_the_picture_itself(make: Make) -> None:
    make("a", slope=1.0)
    make("b", slope=2.0, seed=2)
    assert plot.main(["a", "b", "--output", "p.png"]) == 0
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


# watch ----------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_over_is_shown_once(make: Make, moment: Callable[..., Moment], capsys: Any) -> None:
    folder = make("a")
    with open(folder / "timeline.jsonl", "w") as file:
        for k in range(3):
            file.write(json.dumps(moment(env_steps=1000 * k).to_json()) + "\n")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert watch.main(["a", "--ui", "json"]) == 0
    heading, last, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert heading["header"]["env"] == "CartPole-v1"
    assert Moment.from_json(last) == moment(env_steps=2000)
    assert end == {"end": ["finished after 4 000 steps in 01:01, final return 500.0"]}
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert watch.main(["a"]) == 0
    out = capsys.readouterr().out
    assert "2 000 steps" in out
    assert "leave: Ctrl-C (the run goes on)" in out


def test_how_a_run_failed_is_told(make: Make, capsys: Any) -> None:
    error = {"type": "EnvironmentFault", "message": "environment 3 raised", "traceback": "…"}
    make("a", result={**RESULT, "status": "failed", "final_return": None, "error": error})
    assert watch.main(["a", "--ui", "plain"]) == 0
    *_, ended, why = capsys.readouterr().out.splitlines()
    assert ended == "failed after 4 000 steps in 01:01"
    assert why == "EnvironmentFault: environment 3 raised"


def test_a_tail_waits_for_the_end_of_a_line_and_notes_a_file_that_shrank(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = watch.Tail(path)
    assert tail.rows() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.rows() == [{"a": 1}]
    assert tail.rows() == []
    with open(path, "a") as file:
        file.write(': 2}\n{"a": 3}\n')
    assert tail.rows() == [{"a": 2}, {"a": 3}]
    path.write_text('{"a": 9}\n')
    assert tail.rows() == [{"a": 9}]


def test_a_run_is_followed_until_it_is_over(
    make: Make, moment: Callable[..., Moment], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that `watch` sleeps, the run writes a line; in the end half of one, and the result."""
    folder = make("a", result=None)
    monkeypatch.setattr("headrace.view.jsonlines.EVERY", 0.0)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        with open(folder / "timeline.jsonl", "a") as file:
            if len(naps) <= 3:
                file.write(json.dumps(moment(env_steps=len(naps)).to_json()) + "\n")
            else:
                file.write('{"seconds": 1')
                (folder / "result.json").write_text(json.dumps(RESULT))

    monkeypatch.setattr(watch.time, "sleep", nap)
    assert watch.main(["a", "--ui", "json"]) == 0
    _, *moments, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["env_steps"] for row in moments] == [1, 2, 3]
    assert naps == [watch.EVERY] * 4


def test_silence_is_said_once(make: Make, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("a", result=None)
    monkeypatch.setattr(watch, "QUIET", 0.0)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 4:
            (folder / "result.json").write_text(json.dumps(RESULT))

    monkeypatch.setattr(watch.time, "sleep", nap)
    watch.main(["a", "--ui", "plain"])
    assert capsys.readouterr().out.count("no news for") == 1


def test_ctrl_c_leaves(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def nap(seconds: float) -> None:
        raise KeyboardInterrupt

    make("a", result=None)
    monkeypatch.setattr(watch.time, "sleep", nap)
    assert watch.main(["a", "--ui", "plain"]) == 0


def test_watch_refuses_what_is_no_run(make: Make) -> None:
    with pytest.raises(ConfigError, match="there is no run in runs/ yet"):
        watch.main([])
    make("a")
    with pytest.raises(ConfigError, match="no run 'b'"):
        watch.main(["b"])
    with pytest.raises(ConfigError, match="invalid choice: 'off'"):
        watch.main(["a", "--ui", "off"])


# The picture in the README --------------------------------------------------------------------------------------------


def test_the_picture_of_the_panel_is_of_a_run_s_own_numbers(make: Make, moment: Callable[..., Moment]) -> None:
    folder = make("a")
    with open(folder / "timeline.jsonl", "w") as file:
        for k in range(1, 5):
            stood = moment(env_steps=1000 * k, total_timesteps=4000, return_mean100=100.5 + k, restarts=40 + k)
            file.write(json.dumps(stood.to_json()) + "\n")
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_panel.py"))
    text = script["picture"](RunFolder(folder), 0.5).replace("&#160;", " ")
    ElementTree.fromstring(text)
    assert "2 000 / 4 000" in text
    assert "102.5" in text
    assert "restarts 42" in text
    assert "▁█" in text, "the curve up to then has two points"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
