"""What only some placements promise: no pickling, idle waits, and whose global state is whose."""

# ruff: noqa: PT012  the failure of a role comes out of the crew's with-block as a whole

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from headrace import Processes, RoleFailed, role

pytestmark = pytest.mark.timeout(60)

SRC = Path(__file__).parents[2] / "src"


# No pickling


def forbid(allowed: int) -> Any:
    """A context in which every way to pickle raises, but for tensor-free values of up to so many bytes."""

    @contextmanager
    def forbidden() -> Iterator[None]:
        import io
        import pickle

        import cloudpickle
        import torch

        originals = {"dumps": pickle.dumps, "loads": pickle.loads}

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("pickled")

        class NoTensors(pickle._Pickler):  # type: ignore[name-defined, misc] # the one in Python, whose dispatch is seen
            def reducer_override(self, thing: Any) -> Any:
                if isinstance(thing, torch.Tensor):
                    raise AssertionError("a tensor was pickled")
                return NotImplemented

        def small_dumps(thing: Any, *args: Any, **kwargs: Any) -> bytes:
            if not allowed:
                refuse()
            NoTensors(io.BytesIO(), 5).dump(thing)
            data = originals["dumps"](thing, *args, **kwargs)
            assert len(data) <= allowed, "pickled"
            return data

        def small_loads(data: Any, *args: Any, **kwargs: Any) -> Any:
            assert len(data) <= allowed, "unpickled"
            return originals["loads"](data, *args, **kwargs)

        names = ["dump", "load", "Pickler", "Unpickler"]
        saved = {
            (module, name): getattr(module, name)
            for module in (pickle, cloudpickle)
            for name in names
            if hasattr(module, name)
        }
        saved |= {(cloudpickle, name): getattr(cloudpickle, name) for name in ("dumps", "loads")}
        saved |= {(pickle, name): getattr(pickle, name) for name in ("dumps", "loads")}
        for module, name in saved:
            setattr(module, name, refuse)
        pickle.dumps, pickle.loads = small_dumps, small_loads
        try:
            yield
        finally:
            for (module, name), value in saved.items():
                setattr(module, name, value)

    return forbidden


def test_structs_are_not_pickled(count: Any) -> None:
    forbidden = forbid(allowed=0)

    def echo(inward: Any, outward: Any, trees: Any, numbers: Any, count: Any) -> None:
        with forbidden():
            for k in range(5):
                taken = inward.take()
                assert taken.equal(count(k, 2000))
                outward.put(taken)
                slot = outward.reserve()
                slot.copy_(taken)
                outward.commit()
                trees.put({"a": taken.share, "n": k})
                numbers.put((k, 0.5))

    with Processes().crew() as crew:
        inward, outward = crew.channel(like=count(0, 2000)), crew.channel(2, like=count(0, 2000))
        trees, numbers = crew.channel(like={"a": torch.zeros(2000, 3), "n": 0}), crew.channel(like=(0, 0.0))
        crew.start(echo, inward, outward, trees, numbers, count)
        with forbidden():
            for k in range(5):
                inward.put(count(k, 2000), timeout=10.0)
                for _ in range(2):
                    assert outward.take(10.0).equal(count(k, 2000))
                tree = trees.take(10.0)
                assert (float(tree["a"].min()), tree["n"]) == (k, k)
                assert numbers.take(10.0, device="cpu") == (k, 0.5)
        crew.join(timeout=10.0)


def test_weights_and_vectors_are_not_pickled(count: Any) -> None:
    """A note is: a version and a few small values."""
    forbidden = forbid(allowed=400)

    def work(weights: Any, back: Any, group: Any) -> None:
        own = {"w": torch.zeros(5000)}
        with forbidden():
            for version in range(1, 4):
                weights.pull(own, version=version)
                own["w"] += 10
                back.publish(own, version, progress=0.5)
                group.mean(torch.ones(5000))

    def second(group: Any) -> None:
        for _ in range(3):
            group.mean(torch.ones(5000))

    with Processes().crew() as crew:
        weights, back = (
            crew.weights({"w": torch.zeros(5000)}, name="forth"),
            crew.weights({"w": torch.zeros(5000)}, name="back"),
        )
        group = crew.group(1, like=torch.zeros(5000))
        crew.start(work, weights, back, group)
        own = {"w": torch.zeros(5000)}
        with forbidden():
            for version in range(1, 4):
                own["w"].fill_(version)
                weights.publish(own, version)
                assert back.pull(own, version=version, timeout=10.0)["progress"] == 0.5
                assert own["w"].unique().tolist() == [version + 10]
        crew.join(timeout=10.0)


# Idle waits


@pytest.mark.slow
def test_a_blocked_role_costs_next_to_nothing() -> None:
    def block(ready: Any, channel: Any, full: Any, weights: Any, group: Any) -> None:
        rank = role().rank
        ready[rank].put(True)
        if rank == 0:
            channel.take()
        elif rank == 1:
            full.put(1)
            full.put(2)
        elif rank == 2:
            weights.pull({"w": torch.zeros(1)}, version=1)
        elif rank == 3:
            role().wait(channel_of(ready, rank), timeout=1000.0)
        else:
            role().sleep(1000.0)

    def channel_of(ready: Any, rank: int) -> Any:
        ready[rank].put(True)  # fills it: capacity 2
        return ready[rank].to_put

    with Processes().crew() as crew:
        ready = crew.lanes(5, capacity=2)
        ends = crew.channel(), crew.channel(), crew.weights({"w": torch.zeros(1)}), crew.group(5)
        members = crew.start(block, ready, *ends, copies=5)
        for rank in range(5):
            if rank != 3:
                ready[rank].take(10.0)
        time.sleep(0.5)
        roles = [psutil.Process(member.pid) for member in members]

        def used() -> list[float]:
            return [sum(process.cpu_times()[:2]) for process in roles]

        began, before = time.monotonic(), used()
        time.sleep(1.5)
        spent = [after - b for after, b in zip(used(), before, strict=True)]
        elapsed = time.monotonic() - began
    assert max(spent) <= max(0.02 * elapsed, 0.03), spent  # the kernel counts in hundredths of a second


@pytest.mark.slow
def test_a_waiting_driver_costs_next_to_nothing(beside: Any) -> None:
    def late(channel: Any) -> None:
        role().sleep(1.2)
        channel.put(1)

    with beside.crew() as crew:
        channel = crew.channel()
        crew.start(late, channel)
        role().sleep(0.1)
        before = time.process_time()
        channel.take(10.0)
        assert time.process_time() - before <= 0.06


# Roles are processes of their own


def test_pids(ask: Any) -> None:
    with Processes().crew() as crew:
        pids = ask(crew, os.getpid, name="pid", copies=3)
        assert len({*pids, os.getpid()}) == 4
        assert [member.pid for member in crew.members] == pids


def test_roles_share_the_driver_s_process_elsewhere(within: Any, ask: Any) -> None:
    with within.crew() as crew:
        assert ask(crew, os.getpid, name="pid") == [os.getpid()]
        assert crew.members[0].pid == os.getpid()


def state() -> dict[str, Any]:
    """The global state of this process, as text."""
    import numpy as np
    import torch

    return {
        "folder": os.getcwd(),
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch": hash(tuple(torch.get_rng_state().tolist())),
        "numpy": hash(str(np.random.get_state())),
        "random": hash(__import__("random").getstate()),
        "environment": hash(tuple(sorted(os.environ.items()))),
        "path": tuple(sys.path),
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
    }


def test_what_a_role_changes_reaches_nobody(ask: Any) -> None:
    look = state

    def spoil(turn: Any, told: Any) -> None:
        import numpy as np
        import torch

        rank = role().rank
        if rank == 0:
            os.chdir("/")
            torch.set_default_dtype(torch.float64)
            torch.set_num_threads(2)
            torch.set_float32_matmul_precision("medium")
            torch.manual_seed(1234)
            np.random.seed(1234)
            __import__("random").seed(1234)
            os.environ["HEADRACE_TEST"] = "spoilt"
            sys.path.append("/nowhere")
            sys.setrecursionlimit(5000)
            sys.setswitchinterval(0.01)
            turn[0].put(True)
        else:
            turn[0].take()
        told[rank].put({**look(), "spoilt": os.environ.get("HEADRACE_TEST", ""), "fresh": 0})

    before = state()
    with Processes().crew() as crew:
        turn, told = crew.lanes(1), crew.lanes(2)
        crew.start(spoil, turn, told, copies=2)
        spoilt, other = told.take_each(20.0)
        after = ask(crew, look, name="later")[0]
    assert state() == before
    assert (spoilt["folder"], spoilt["dtype"], spoilt["threads"], spoilt["spoilt"]) == (
        "/",
        "torch.float64",
        2,
        "spoilt",
    )
    for untouched in (other, after):
        assert untouched["folder"] == before["folder"]
        assert untouched["dtype"] == before["dtype"]
        assert untouched["precision"] == before["precision"]
        assert untouched["threads"] == 1
        assert untouched["path"] == before["path"]
        assert untouched["recursion"] != 5000
    assert other["spoilt"] == ""


@pytest.mark.slow
def test_settings_are_shipped_as_they_are_at_the_start(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> tuple[Any, ...]:
        return (
            os.environ.get("HEADRACE_TEST"), os.getcwd(), str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(), sys.path[-1], sys.argv[-1],
            float(torch.tensor([1e-310], dtype=torch.float64) * 1.0), torch.zeros(1).dtype == torch.float64,
        )  # fmt: skip

    plain = None
    with Processes().crew() as crew:
        (plain,) = ask(crew, look, name="before")
        monkeypatch.setenv("HEADRACE_TEST", "set")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path, "/added"])
        monkeypatch.setattr(sys, "argv", ["script", "--flag"])
        precision = torch.get_float32_matmul_precision()
        try:
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision("high")
            torch.use_deterministic_algorithms(True, warn_only=True)
            (shipped,) = ask(crew, look, name="after")
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(False)
    assert plain[0] is None
    assert plain[2:6] == ("torch.float32", precision, False, False)
    assert shipped[:8] == ("set", str(tmp_path), "torch.float64", "high", True, True, "/added", "--flag")
    assert shipped[9]


def test_global_generators_of_roles_differ_and_repeat(ask: Any) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def program(seed: int) -> Any:
        with Processes().crew(seed=seed) as crew:
            return ask(crew, draw, copies=2)

    first = program(1)
    assert first[0] != first[1]
    assert first == program(1)
    assert first != program(2)


def test_the_library_changes_nothing_global(within: Any, count: Any) -> None:
    """On placements within the driver's process: compared before, while roles run, and after."""

    def work(channel: Any, weights: Any, group: Any, count: Any) -> None:
        for k in range(3):
            channel.put(count(k))
            weights.publish({"w": torch.full((3,), float(k))}, k + 1)
            group.mean(torch.ones(3))
        role().sleep(0.01)

    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    hooks = sys.excepthook, threading.excepthook
    before = state()
    with within.crew() as crew:
        channel, weights = crew.channel(3, like=count()), crew.weights({"w": torch.zeros(3)})
        crew.start(work, channel, weights, crew.group(1, like=torch.zeros(3)), count, threads=1)
        assert channel.take(10.0).equal(count(0))
        assert state() == before
        crew.join(timeout=10.0)
        assert state() == before
    assert state() == before
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
    assert (sys.excepthook, threading.excepthook) == hooks


@pytest.mark.parametrize("placement", ["Inline", "Threads"])
@pytest.mark.slow
def test_torch_threads_of_the_driver_and_of_later_threads(placement: str) -> None:
    """In a process of its own, whose driver has not used torch before: its count is set at first use."""
    script = f"""
        import threading
        import torch
        from headrace import {placement}, role

        def look(lanes, wanted):
            lanes[role().rank].put(torch.get_num_threads())

        def later():
            seen = []
            thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            return seen[0]

        with {placement}().crew() as crew:
            roles = []
            for threads in (1, 3, 2):
                lanes = crew.lanes(2)
                crew.start(look, lanes, threads, copies=2, threads=threads, name=f"of {{threads}}")
                roles += lanes.take_each(10.0)
            during = torch.get_num_threads(), later()
        print(roles, during == (fresh, fresh), torch.get_num_threads() == later() == fresh)
    """
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    count = "import torch; print(torch.get_num_threads())"
    fresh = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, timeout=50, check=True).stdout
    command = [sys.executable, "-c", f"fresh = {int(fresh)}\n" + textwrap.dedent(script)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[1, 1, 3, 3, 2, 2] True True"


def test_grad_mode_of_a_driver_stays_its_own(within: Any, ask: Any) -> None:
    def look() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with within.crew() as crew, torch.no_grad():
        assert ask(crew, look) == [(True, False)]
        assert not torch.is_grad_enabled()


def test_output_of_roles_reaches_the_driver_s(capfd: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("from the role")
        print("and its errors", file=sys.stderr)

    with Processes().crew() as crew:
        crew.start(speak)
        crew.join(timeout=10.0)
    out, err = capfd.readouterr()
    assert "from the role" in out
    assert "and its errors" in err


def test_a_role_can_start_programs_and_threads(ask: Any) -> None:
    def start() -> tuple[int, list[int]]:
        import subprocess
        import threading

        seen: list[int] = []
        thread = threading.Thread(target=seen.append, args=(3,))
        thread.start()
        thread.join()
        return subprocess.run(["sh", "-c", "exit 5"], check=False).returncode, seen

    with Processes().crew() as crew:
        assert ask(crew, start) == [(5, [3])]


def test_roles_compute_with_several_torch_threads(ask: Any) -> None:
    """What a nursery preloads must not have run a torch operation, or two threads hang in its children."""

    def multiply() -> float:
        return float((torch.ones(300, 300) @ torch.ones(300, 300)).sum() + torch.ones(1_000_000).exp().sum() * 0)

    with Processes().crew() as crew:
        assert ask(crew, multiply, threads=2, copies=2) == [300.0**3] * 2


def test_a_crew_after_a_failed_crew(ask: Any) -> None:
    for _ in range(3):
        with pytest.raises(RoleFailed), Processes().crew() as crew:
            crew.start(lambda: os.abort(), name="abort", copies=2)
            crew.join()
        with Processes().crew() as crew:
            assert ask(crew, lambda: 1, name="one") == [1]


def test_crews_start_quickly(ask: Any) -> None:
    with Processes().crew() as crew:
        ask(crew, lambda: 1, name="one")
    times = []
    for _ in range(5):
        began = time.monotonic()
        with Processes().crew() as crew:
            ask(crew, lambda: 1, name="one")
        times.append(time.monotonic() - began)
    assert min(times) < 1.0, times


def test_what_roles_print_goes_to_a_file_each(tmp_path: Path) -> None:
    def talk() -> None:
        print("rank", role().rank)
        print("to the error output", file=sys.stderr)
        os.write(1, b"from below Python\n")

    with Processes(logs=str(tmp_path)).crew() as crew:
        crew.start(talk, copies=2)
        crew.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talk-0.log", "talk-1.log"]
    for rank in range(2):
        said = (tmp_path / f"talk-{rank}.log").read_text().splitlines()
        assert sorted(said) == ["from below Python", f"rank {rank}", "to the error output"]


def test_a_folder_for_logs_that_is_not_there_stops_nobody(tmp_path: Path) -> None:
    with Processes(logs=str(tmp_path / "nowhere")).crew() as crew:
        crew.start(lambda: None)
        crew.join()
