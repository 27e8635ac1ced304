"""The views: what they print and how often, that they fit a terminal, and that they give it back."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence

import pytest
from rich.console import Console

from headrace.errors import ConfigError
from headrace.view import jsonlines, panel, plain
from headrace.view.choose import NAMES, Off, choose
from headrace.view.jsonlines import JsonLines
from headrace.view.moment import Header, Moment, Queue, Stage
from headrace.view.panel import Panel, draw, sparkline
from headrace.view.plain import Plain
from headrace.view.view import View
from headrace.view.wording import count, duration, eta, score

ESCAPE = "\x1b"
VERDICT = "the learner is the bottleneck (busy 97 %, the actors wait 45 %). Try a lower --update-epochs, where the "


class Clock:
    """Stands in for the module `time` in a view."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (plain, jsonlines, panel):
        monkeypatch.setattr(module, "time", made)
    return made


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def picture(header: Header, moment: Moment, returns: Sequence[float] = (), width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=24, highlight=False)
    console.print(draw(header, moment, returns, width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


# Plain lines and JSON -------------------------------------------------------------------------------------------------


def test_plain_has_a_heading_of_three_lines(header: Header) -> None:
    stream = io.StringIO()
    Plain(stream).begin(header)
    first, second, third = stream.getvalue().splitlines()
    assert "ppo on CartPole-v1 · preset ppo/CartPole-v1 · seed 1" in first
    assert "sync-batches" in second
    assert "processes" in second
    assert "cpu" in second
    assert header.folder in third
    assert "Ctrl-C once (saves), twice (quits)" in third


def test_plain_prints_a_line_each_five_seconds(header: Header, moment: Callable[..., Moment], clock: Clock) -> None:
    stream = io.StringIO()
    shown = Plain(stream)
    for k in range(81):
        shown.show(moment(env_steps=k), ())
        clock.now += 0.125  # eighths add up exactly
    steps = [line.split(" s  ")[1].split(" steps")[0] for line in stream.getvalue().splitlines()]
    assert steps == ["0", "40", "80"]
    shown.show(moment(env_steps=7777), ())
    shown.end(["done"])
    *_, last, done = stream.getvalue().splitlines()
    assert "7 777 steps" in last
    assert done == "done"
    shown.close()
    assert stream.getvalue().splitlines()[-1] == "done"


def test_plain_has_no_escape_codes_and_tells_all(header: Header, moment: Callable[..., Moment]) -> None:
    stream = io.StringIO()
    shown = Plain(stream)
    shown.begin(header)
    shown.show(moment(restarts=2, dropped={"stale": 1200}, verdict=VERDICT), [1.0])
    text = stream.getvalue()
    assert ESCAPE not in text
    for told in ("2 611 200 steps (26 %)", "3 477/s", "return 213.4", "eval 228.0 ± 31.0", "dropped 1 200 stale"):
        assert told in text
    assert "restarts 2" in text
    assert f"ETA {duration(751.0 * (10_000_000 - 2_611_200) / 2_611_200)}" in text
    assert f"verdict: {VERDICT}\n" in text


def test_plain_says_a_verdict_once_whatever_its_numbers(moment: Callable[..., Moment], clock: Clock) -> None:
    stream = io.StringIO()
    shown = Plain(stream)
    for opinion in ("a (1 %). b", "a (2 %). b", None, "a (1 %). b", "c (1 %). d"):
        shown.show(moment(verdict=opinion), ())
        clock.now += 6.0
    said = [line for line in stream.getvalue().splitlines() if line.startswith("verdict")]
    assert said == ["verdict: a (1 %). b", "verdict: c (1 %). d"]


def test_what_an_encoding_lacks_stops_nothing(header: Header, moment: Callable[..., Moment]) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    shown = choose("live", stream)
    shown.begin(header)
    shown.show(moment(), ())
    shown.end(["±"])
    assert raw.getvalue().endswith(b"?\n")
    assert b"ppo on CartPole-v1 ? preset" in raw.getvalue()


def test_json_is_an_object_a_line_a_second(header: Header, moment: Callable[..., Moment], clock: Clock) -> None:
    stream = io.StringIO()
    shown = JsonLines(stream)
    shown.begin(header)
    for k in range(9):  # quarters add up exactly
        shown.show(moment(env_steps=k), ())
        clock.now += 0.25
    shown.say("a line")
    shown.show(moment(env_steps=99), ())
    shown.end(["done"])
    shown.close()
    first, *moments, end = map(json.loads, stream.getvalue().splitlines())
    assert Header.from_json(first["header"]) == header
    assert end == {"end": ["done"]}
    assert [row["env_steps"] for row in moments if "env_steps" in row] == [0, 4, 8, 99]
    assert moments[-2] == {"line": "a line"}
    assert Moment.from_json(moments[0]) == moment(env_steps=0)


# The panel ------------------------------------------------------------------------------------------------------------


def test_the_panel_fits_and_tells_all(header: Header, moment: Callable[..., Moment]) -> None:
    lines = picture(header, moment(verdict=VERDICT), [1.0, 2.0, 8.0])
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    for told in (
        *("ppo · CartPole-v1 · sync-batches · processes · cpu", "12:31  ETA 35:25"),
        *("213.4 (last 100)  best 241.0  eval 228.0 ±31.0  goal 475", "2 611 200 / 10 000 000  26 %  3 477/s"),
        *("lag  p50 0  p95 1  max 1 updates", "dropped 0", "replay ratio 4.0", "75 % of 2", "restarts 0"),
        "cpu 1.8 of 2 cores   memory 812 MB   shared 31 MB",
    ):
        assert told in text
    assert " ".join(lines).count("the learner is the bottleneck") == 1
    (row,) = [line for line in lines if line.startswith("collect")]
    assert row.split() == ["collect", "×2", "7", "0.60", "0.15", "0.25", "collect[1]", "0.70"]
    (row,) = [line for line in lines if line.startswith("driver")]
    assert row.split() == ["driver", "3", "0.97", "0.03", "0.00"]


def test_the_largest_panel_fits(header: Header, moment: Callable[..., Moment]) -> None:
    many = moment(
        stages=tuple(
            Stage(f"a role with a long name {k}", r, 1e9, 0.3, 0.3, 0.4) for k in range(9) for r in range(999)
        ),
        queues=tuple(
            Queue(f"a queue with a long name {k}[{r}]", 1e9, 1.0, 10**6) for k in range(9) for r in range(999)
        ),
        dropped={"stale": 10**9, "of a role that was started again": 10**9},
        env_steps=10**12,
        total_timesteps=10**12,
        seconds=1e7,
        verdict=VERDICT * 2,
        restarts=10**6,
    )
    for width in (20, 40, 80, 200):
        lines = picture(header, many, [float(k) for k in range(10_000)], width)
        assert max(map(len, lines)) <= width
        if width >= 80:
            assert len(lines) <= 20  # what is above the panel stays in sight


def test_US_04_before_the_first_episode_ends_there_is_no_return_but_a_running_one(
    header: Header, moment: Callable[..., Moment]
) -> None:
    """Episodes of 10,000 steps, looked at every 500."""
    early = moment(
        return_mean100=None, best_return=None, episodes_finished=0, running_return=41.5, running_length=500.0
    )
    text = "\n".join(picture(header, early))
    assert "no episode has ended yet; 41.5 after 500 steps" in text
    stream = io.StringIO()
    Plain(stream).show(early, ())
    assert "no episode has ended yet; 41.5 after 500 steps" in stream.getvalue()
    stream = io.StringIO()
    JsonLines(stream).show(early, ())
    row = json.loads(stream.getvalue(), parse_constant=pytest.fail)
    assert (row["return_mean100"], row["episodes_finished"]) == (None, 0)
    assert (row["running_return"], row["running_length"]) == (41.5, 500.0)
    assert "nan" not in text.lower()


def test_a_sparkline_rises_with_its_curve() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 2.0, 14.0, 12.0], 2) == "▁█", "a bar is the mean of its part"
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([], 8) == ""
    assert len(sparkline([float(k) for k in range(1001)], 16)) == 16


def test_the_panel_is_redrawn_four_times_a_second(
    header: Header, moment: Callable[..., Moment], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(panel, "draw", lambda header, moment, returns, width: drawn.append(moment.env_steps) or "")
    shown = Panel(Terminal())
    shown.begin(header)
    try:
        for k in range(33):  # thirty-seconds of a second
            shown.show(moment(env_steps=k), ())
            clock.now += 1 / 32
        shown.show(moment(env_steps=99), ())
    finally:
        shown.close()
    assert drawn == [0, 8, 16, 24, 32, 99]
    shown.close()
    assert len(drawn) == 6


def test_a_view_that_is_not_due_costs_microseconds(header: Header, moment: Callable[..., Moment]) -> None:
    now = moment()
    for shown in (Panel(Terminal()), Plain(io.StringIO()), JsonLines(io.StringIO())):
        shown.begin(header)
        try:
            shown.show(now, ())
            took = []
            for _ in range(5):
                began = time.perf_counter()
                for _ in range(100):
                    shown.show(now, ())
                took.append((time.perf_counter() - began) / 100)
            assert min(took) < 1e-5
        finally:
            shown.close()


# Which one ------------------------------------------------------------------------------------------------------------


def test_each_name_is_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert [type(choose(name, Terminal())) for name in NAMES] == [Panel, Plain, JsonLines, Off]
    with pytest.raises(ConfigError, match=r"no view 'lively'. There are live, plain, json, off\."):
        choose("lively")


def test_live_is_plain_where_nothing_can_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert type(choose("live", io.StringIO())) is Plain
    monkeypatch.setenv("TERM", "dumb")
    assert type(choose("live", Terminal())) is Plain
    monkeypatch.delenv("TERM")
    assert type(choose("live", Terminal())) is Plain


def test_off_prints_nothing(header: Header, moment: Callable[..., Moment], capsys: pytest.CaptureFixture[str]) -> None:
    shown: View = choose("off")
    shown.begin(header)
    shown.show(moment(), ())
    shown.say("a line")
    shown.end(["done"])
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_numbers_as_people_write_them() -> None:
    assert [count(n) for n in (0, 999, 1000, 2_611_200.4)] == ["0", "999", "1 000", "2 611 200"]
    assert [duration(s) for s in (0.4, 59.6, 751, 3600, 360_000)] == ["00:00", "01:00", "12:31", "1:00:00", "100:00:00"]
    assert [score(x) for x in (None, 0.951, -157.26, 1e6)] == ["–", "0.95", "-157.3", "1000000.0"]
    assert [score(0.0, 500.0), score(0.0, 0.9), score(12.0, 0.9)] == ["0.0", "0.00", "12.00"]


def test_the_eta_is_that_of_the_whole_run(moment: Callable[..., Moment]) -> None:
    assert eta(moment(env_steps=0)) == "–"
    assert eta(moment(env_steps=250, total_timesteps=1000, seconds=100.0, steps_per_second=1e9)) == "05:00"
    assert eta(moment(env_steps=1200, total_timesteps=1000)) == "00:00"


# In a terminal --------------------------------------------------------------------------------------------------------

SCRIPT = """
import dataclasses, json, os, signal, sys, time
from headrace.view.choose import choose
from headrace.view.moment import Header, Moment

header, moment, end = json.loads(sys.argv[1])
shown = choose("live")
print(type(shown).__name__)
try:
    shown.begin(Header.from_json(header))
    moment = Moment.from_json(moment)
    for k in range(4):
        shown.show(dataclasses.replace(moment, env_steps=k), [0.0, 1.0, 2.0])
        print("printed by the driver", k)
        print("complained by the driver", k, file=sys.stderr)
        shown.say(f"said {k}")
        time.sleep(0.26)
    if end == "error":
        raise ArithmeticError
    if end == "ctrl-c":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5.0)
    shown.end(["closing words"])
finally:
    shown.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["good", "error", "ctrl-c"])
def test_the_terminal_is_given_back(header: Header, moment: Callable[..., Moment], end: str) -> None:
    told = json.dumps([header.to_json(), moment().to_json(), end])
    master, slave = pty.openpty()
    try:
        termios.tcsetwinsize(slave, (24, 80))
        before = termios.tcgetattr(slave)
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, told],
            stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm-256color"},
        )  # fmt: skip
        shown = ""
        while process.poll() is None or select.select([master], [], [], 0.0)[0]:
            if select.select([master], [], [], 0.05)[0]:
                shown += os.read(master, 65536).decode()
        after = termios.tcgetattr(slave)
    finally:
        os.close(master)
        os.close(slave)
    assert shown.startswith("Panel"), shown
    assert before == after
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor was hidden once and shown again"
    for k in range(4):
        for words in ("printed by the driver", "complained by the driver", "said"):
            assert shown.count(f"{words} {k}") == 1
    assert "3 / 10 000 000" in shown, "the last picture stays"
    if end == "good":
        assert process.returncode == 0
        assert shown.rstrip().endswith("closing words")
    else:
        assert process.returncode != 0
        assert {"error": "ArithmeticError", "ctrl-c": "KeyboardInterrupt"}[end] in shown.rpartition("\x1b[?25h")[2]
