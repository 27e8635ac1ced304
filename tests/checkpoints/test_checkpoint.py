"""Checkpoints: what is saved comes back, whole or not at all, and what is damaged or of something else is named."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import math
import os
import pickle
import re
import resource
import runpy
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headrace import A2C, CheckpointError, Checkpoints, ConfigError, Inline, Learner, SyncBatches
from headrace.channel import Note
from headrace.checkpoint import load, load_weights, save, verify
from headrace.durable import discard
from headrace.envs.toy import Identity

pytestmark = pytest.mark.timeout(60)

FILES = ("manifest.json", "state.safetensors", "weights.safetensors")
STEPS = ("mkdir", "open", "write", "flush", "fsync", "rename", "unlink", "rmdir", "close")
"""Calls of which each changes what is on the disk, or makes sure of it."""


DRIVERS = Path(__file__).parent / "drivers"
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


class Pair(NamedTuple):
    left: Any
    right: Any


class Inner:
    class Pair(NamedTuple):
        left: Any


def small(value: float = 0.0) -> dict[str, Any]:
    """A state with the least that a snapshot has."""
    return {"learner": {"net": {"weight": torch.full((3,), value), "bias": torch.zeros(2)}}, "lanes": [torch.ones(2)]}


def same(left: Any, right: Any) -> bool:
    """Whether two trees are equal in all types, orders and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and raw(left) == raw(right)
    if isinstance(left, np.ndarray | np.generic):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, float):
        return np.float64(left).tobytes() == np.float64(right).tobytes()
    if isinstance(left, OrderedDict) and not same(vars(left), vars(right)):
        return False
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Note):
        return same((left.version, left.values), (right.version, right.values))
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def told(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def signed(folder: Path, **changes: Any) -> None:
    """Change a manifest, with sizes and SHA-256 that fit: what somebody could do on purpose."""
    manifest = {**told(folder), **changes, "sha256": "0" * 64}
    for name in ("weights.safetensors", "state.safetensors"):
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def replaced(path: Path, data: bytes) -> None:
    """As a new file: some file systems wait for the disk when one is written over."""
    path.unlink()
    path.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def driven(script: str, *arguments: Any) -> Any:
    """What a script of drivers/ prints as JSON, in a process of its own."""
    command = [sys.executable, str(DRIVERS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# What comes back

VALUES = {
    "nothing": None,
    "bools": [True, False],
    "integers": [0, -1, 2**63, -(2**200)],
    "floats": [0.0, -0.0, 1.5, 5e-324, math.pi, math.inf, -math.inf, math.nan, -math.nan],
    "strings": ["", "ä ∇ 😀", "\ud800", "$tuple", "\n\0"],
    "bytes": [b"", bytes(range(256))],
    "empty": [[], (), {}, OrderedDict()],
    "nested": [(1, [2, (3,)]), ((),)],
    "keys": {0: "integer", "0": "string", 1.5: None, (1, "a"): [], None: 1, True: 2, b"b": 3, "$tuple": 4},
    "like a tag": {"$tuple": [1, 2]},
    "ordered": OrderedDict([("b", 1), ("a", (2,))]),
    "named": [Pair(1, (2,)), Pair(Pair(None, []), "x"), Inner.Pair(3)],
    "note": (Note(7, {"progress": 0.25, "env_steps": 3}), [torch.ones(2)]),
    "scalars": [np.float32(1.1), np.int64(3), np.bool_(True), np.uint8(255), np.complex128(1 + 2j), np.float64("nan")],
    "days": [np.datetime64("2020-01-02"), np.timedelta64(5, "s"), np.array(["2020-01-02"], "datetime64[D]")],
    "arrays": [np.arange(6.0).reshape(2, 3).T, np.array(3), np.zeros((0, 4), np.int16), np.array(["ab", "c"])],
    "other bytes": [np.arange(3, dtype=">i4"), np.array([b"x", b""]), np.array([], bool), np.float16([1, np.inf])],
    "shapes": [torch.tensor(2.5), torch.zeros(0), torch.zeros(2, 0, 3), torch.arange(24).reshape(2, 3, 4).mT],
    "views": [torch.arange(10)[::3], torch.arange(10).expand(2, 10), torch.arange(4.0)[1:3]],
    "conjugate": [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag],
    "special": torch.tensor([math.nan, -0.0, math.inf, 1e-45]),
}
DTYPES = sorted({str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)})


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    state = {**small(), "value": VALUES[name], name: VALUES[name]}
    save(tmp_path / "one", state)
    assert same(load(tmp_path / "one"), state)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_dtype_come_back(tmp_path: Path) -> None:
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name.removeprefix("torch."))
        if not name.startswith(("torch.q", "torch.bits")) and (size := dtype.itemsize) and "int" not in name[:9]:
            tensors[name] = torch.arange(4 * size, dtype=torch.uint8).view(dtype) if name != "torch.bool" else None
    tensors["torch.bool"] = torch.tensor([True, False])
    tensors |= {
        str(dtype): torch.arange(3).to(dtype) for dtype in (torch.int8, torch.int64, torch.uint16, torch.uint64)
    }
    assert {"torch.complex128", "torch.bfloat16", "torch.float8_e4m3fn", "torch.float64"} <= set(tensors)
    state = {"learner": {"net": dict(tensors)}, "tensors": tensors, "alone": [each[:1] for each in tensors.values()]}
    save(tmp_path / "one", state)
    assert same(load(tmp_path / "one"), state)


def test_what_a_tensor_loses_is_its_gradient(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    save(tmp_path / "one", {"learner": {"net": {"w": parameter}}, "loss": parameter * 2})
    state = load(tmp_path / "one")
    for tensor in (state["learner"]["net"]["w"], state["loss"]):
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor.is_leaf
        assert tensor.device.type == "cpu"


def test_shared_tensors_are_written_once_and_stay_shared(tmp_path: Path) -> None:
    big, base = torch.arange(10_000.0), torch.arange(100.0)
    state = {**small(), "a": big, "b": [big, (big,)], "parts": [base[:50], base[25:], base]}
    save(tmp_path / "one", state)
    assert (tmp_path / "one" / "state.safetensors").stat().st_size < 2 * big.nbytes
    found = load(tmp_path / "one")
    assert same(found, state)
    assert found["a"] is found["b"][0] is found["b"][1][0]


def test_tied_weights_are_all_there_by_name(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    save(tmp_path / "one", {"learner": {"net": net.state_dict()}})
    found = load_file(tmp_path / "one" / "weights.safetensors")
    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert same(found["1.weight"], net[0].weight.detach())
    net.load_state_dict(load(tmp_path / "one")["learner"]["net"])


def test_a_state_dict_keeps_the_versions_of_its_modules(tmp_path: Path) -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    save(tmp_path / "one", {"learner": {"net": net.state_dict()}})
    for found in (load(tmp_path / "one")["learner"]["net"], load_weights(tmp_path / "one")):
        assert found._metadata == net.state_dict()._metadata
        assert same(found, net.state_dict())


def test_other_tools_read_the_weights(tmp_path: Path) -> None:
    """The files are what safetensors itself writes, up to the order in which it puts tensors of the same size."""
    weights = {"b": torch.ones(3, dtype=torch.bool), "a": torch.arange(2.0), "d": torch.arange(3), "c": torch.ones(())}
    save(tmp_path / "one", {"learner": {"net": weights}})
    written = tmp_path / "one" / "weights.safetensors"
    save_file(weights, tmp_path / "theirs")
    found, theirs = load_file(written), load_file(tmp_path / "theirs")
    assert same({name: found[name] for name in weights}, weights)
    assert same({name: theirs[name] for name in weights}, weights)
    for name, tensor in found.items():
        assert tensor.data_ptr() % tensor.element_size() == 0, name


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "set"),
        (defaultdict(int), "defaultdict"),
        (threading.Lock(), "lock"),
        (lambda: None, "function"),
        (np.array([None]), "ndarray"),
        (np.zeros(2, "i4,f4"), "ndarray"),
        (np.str_("a"), "str_"),
        (torch.eye(2).to_sparse(), "Tensor"),
        (torch.zeros(2, device="meta"), "Tensor"),
        (torch.float32, "dtype"),
        (torch.Size([2]), "Size"),
        (NamedTuple("Local", [("a", int)])(1), "Local"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"state\['deep'\]\[1\]\['x'\] is a .*{what}; .*Give one of these"):
        save(tmp_path / "one", {**small(), "deep": [0, {"x": value}]})
    with pytest.raises(ConfigError, match=rf"info\['x'\] is a .*{what}"):
        save(tmp_path / "one", small(), {"x": value})
    assert names(tmp_path) == []


def test_states_and_info_that_do_not_fit(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    for state, message in [
        ({}, "state has nothing; give what a report's snapshot"),
        ({"learner": {}}, r"state has \['learner'\]"),
        ({"learner": {"net": 3}}, "snapshot"),
        ({**small(), "loop": loop}, "holds itself"),
        ({**small(), "long": "x" * 9_000_000}, "Hold long lists of numbers as arrays"),
        ({**small(), "huge": 10**5000}, "integer"),
    ]:
        with pytest.raises(ConfigError, match=message):
            save(tmp_path / "one", state)
    with pytest.raises(ConfigError, match="info holds tensors or arrays: mean"):
        save(tmp_path / "one", small(), {"mean": torch.zeros(2)})
    assert names(tmp_path) == []


def test_info_is_told_without_its_tensors(tmp_path: Path) -> None:
    info = {"method": "PPO", "score": math.nan, "sizes": (1, 2), "rate": np.float32(3)}
    save(tmp_path / "one", small(), info)
    assert same(verify(tmp_path / "one"), info)
    save(tmp_path / "two", small())
    assert verify(tmp_path / "two") == {}


def test_weights_are_read_without_the_rest(tmp_path: Path) -> None:
    save(tmp_path / "one", small(4))
    (tmp_path / "one" / "state.safetensors").unlink()
    assert same(load_weights(tmp_path / "one"), small(4)["learner"]["net"])
    flipped(tmp_path / "one" / "weights.safetensors", 8 * 150)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors is damaged"):
        load_weights(tmp_path / "one")


def test_files_are_as_readable_as_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(tmp_path / "runs" / "one", small())
    finally:
        os.umask(before)
    assert [(tmp_path / "runs" / "one" / name).stat().st_mode & 0o777 for name in FILES] == [0o640] * 3
    assert (tmp_path / "runs" / "one").stat().st_mode & 0o777 == 0o750
    assert names(tmp_path / "runs" / "one") == list(FILES)


# What is refused


def test_each_damage_is_told_with_its_file_and_what_to_do(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=None)
    for step in (1, 2, 3):
        checkpoints.save(step, small(step))
    damages: list[tuple[str, Callable[[Path], Any], str]] = [
        (name, damage, rf"{name} {message}")
        for name in FILES
        for damage, message in [
            (lambda path: path.unlink(), "is missing: No such file"),
            (lambda path: path.write_bytes(path.read_bytes()[:-9]), "is damaged"),
            (lambda path: path.write_bytes(b""), "is damaged"),
            (lambda path: flipped(path, 4 * path.stat().st_size + 3), "is damaged"),
            (lambda path: (path.unlink(), path.mkdir()), "is no file"),
            (lambda path: (path.unlink(), os.mkfifo(path)), "is no file"),
        ]
    ]
    for name, damage, message in damages:
        folder = checkpoints.save(3, small(3))
        damage(folder / name)
        with pytest.raises(CheckpointError, match=rf"{message}.* newest intact one before it is .*step_000000002\."):
            load(folder)
        found = checkpoints.latest()
        assert found is not None
        assert (found.step, len(found.skipped)) == (2, 1)
        assert name in str(found.skipped[0])
        assert same(load(found.folder), small(2))
        if (folder / name).is_dir():
            (folder / name).rmdir()
    for step in (1, 2):
        (tmp_path / f"step_00000000{step}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="No intact one from before lies beside it"):
        load(folder)
    with pytest.raises(
        CheckpointError, match=rf"no checkpoint in {tmp_path} is intact.*step_000000003.*step_000000001"
    ):
        checkpoints.latest()


def test_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is no folder"):
        load(tmp_path / "nowhere")
    for checkpoints in (Checkpoints(tmp_path), Checkpoints(tmp_path / "nowhere")):
        assert checkpoints.latest() is None
        assert checkpoints.best() is None


def test_another_method_and_another_network(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    save(tmp_path / "one", {"learner": {"net": net.state_dict()}}, {"method": "PPO"})
    load(tmp_path / "one", net=net, expect={"method": "PPO"})
    with pytest.raises(CheckpointError, match=r"manifest\.json says method 'PPO', and 'A2C' was expected\. Go on with"):
        load(tmp_path / "one", expect={"method": "A2C"})
    with pytest.raises(CheckpointError, match="says env None, and 'CartPole-v1' was expected"):
        load(tmp_path / "one", expect={"env": "CartPole-v1"})
    for other, message in [
        (nn.Linear(4, 2), r"weight is torch\.float32 \[2, 3\], the network's torch\.float32 \[2, 4\]"),
        (nn.Linear(3, 2).double(), r"bias is torch\.float32 \[2\], the network's torch\.float64"),
        (nn.Linear(3, 2, bias=False), "it has bias beside"),
        (nn.Sequential(nn.Linear(3, 2)), r"it lacks 0\.weight; it lacks 0\.bias; it has weight beside"),
    ]:
        with pytest.raises(CheckpointError, match=rf"weights\.safetensors is of another network: .*{message}"):
            load(tmp_path / "one", net=other)


def test_CR_10_versions_unknown_fields_and_missing_classes(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    save(folder, {**small(5), "pair": Pair(1, 2)})
    signed(folder, later="a field of another version")
    assert same(load(folder), {**small(5), "pair": Pair(1, 2)})
    signed(folder, format=2, written_by={"headrace": "9.1"})
    with pytest.raises(CheckpointError, match=r"format 2, written by .*9\.1.*; this is Headrace \d.* up to format 1\."):
        load(folder)
    for number in (0, -1, "1", None, 1.5, [], True):
        signed(folder, format=number)
        if number is not True:  # it is 1 in Python, and nobody writes it
            with pytest.raises(CheckpointError, match="damaged"):
                load(folder)
    signed(folder, format=1)
    text = (folder / "manifest.json").read_text().replace(f"{__name__}:Pair", "gone:Pair")
    (folder / "manifest.json").write_text(text)
    signed(folder)
    with pytest.raises(CheckpointError, match=r"has a gone:Pair with fields left, right.* load_weights"):
        load(folder)
    assert same(load_weights(folder), small(5)["learner"]["net"])


def test_CR_11_malicious_files(tmp_path: Path) -> None:
    folder, canary = tmp_path / "one", tmp_path / "canary"

    class Payload:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {canary}",)

    payload = pickle.dumps(Payload())
    for name in FILES:
        save(folder, small())
        (folder / name).write_bytes(payload)
        with pytest.raises(CheckpointError, match=name):
            load(folder)
        if name != "manifest.json":
            signed(folder)
            with pytest.raises(CheckpointError, match="not as Headrace writes it"):
                load(folder)
    hostile: list[Any] = [
        {"$named": ["os:system", [], ["touch x"]]},
        {"$named": ["builtins:tuple", [], []]},
        {"$named": ["subprocess:Popen", ["args"], [f"touch {canary}"]]},
        {"$named": ["antigravity:x", [], []]},
        {"$raw": ["lanes/0", "load", [2]]},
        {"$raw": ["lanes/0", "float32", [10**12]]},
        {"$array": ["lanes/0", "O", [1]]},
        {"$array": ["lanes/0", "<f4", [-1]]},
        {"$array": ["lanes/0", "|S0", [10**12]]},
        {"$scalar": ["O", "00" * 8]},
        {"$float": "00"},
        {"$bytes": "no base64"},
        {"$dict": [[[], 1]]},
        {"$dict": 3},
        {"$note": [1]},
        {"$tensor": {"a": 1}},
        {"$what": 1},
        {"$tensor": "../../elsewhere"},
    ]
    for node in hostile:
        save(folder, small())
        signed(folder, state={**told(folder)["state"], "x": node})
        with pytest.raises(CheckpointError):
            load(folder)
    save(folder, small())
    for name in ("../weights.safetensors", "/etc/passwd"):  # files are asked for by our names, never by theirs
        signed(folder, files={**told(folder)["files"], name: {"size": 1, "sha256": "0"}})
        load(folder)
    assert "antigravity" not in sys.modules
    (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)
    (folder / "manifest.json").write_text("[" + "0," * 5_000_000 + "0]")
    with pytest.raises(CheckpointError, match="is no manifest"):
        load(folder)
    assert not canary.exists()
    assert names(tmp_path) == ["one"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_CR_11_flips_and_truncations_are_all_found(count: int, tmp_path: Path) -> None:
    folder, rng = tmp_path / "one", np.random.default_rng(count)
    save(folder, {**small(), "pair": (1, math.nan)}, {"method": "PPO"})
    whole = {name: (folder / name).read_bytes() for name in FILES}
    for _ in range(count):
        name = FILES[rng.integers(3)]
        data = bytearray(whole[name])
        match rng.integers(3):
            case 0:
                data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
            case 1:
                data[rng.integers(len(data))] ^= int(rng.integers(1, 256))
            case _:
                del data[rng.integers(len(data)) :]
        replaced(folder / name, data)
        with pytest.raises(CheckpointError):
            load(folder)
        replaced(folder / name, whole[name])
    load(folder)


def test_CR_15_missing_and_extra_arrays_are_listed(tmp_path: Path) -> None:
    for file, there in (("weights.safetensors", "weight"), ("state.safetensors", "lanes/0")):
        save(tmp_path / "one", small())
        path = tmp_path / "one" / file
        held = load_file(path)
        for changed, message in [
            ({name: held[name] for name in held if name != there}, f"{file} lacks {there}, and has nothing"),
            ({**held, "more": torch.zeros(1), "most": torch.ones(1)}, f"{file} lacks nothing, and has more, most"),
        ]:
            save_file(changed, path)
            with pytest.raises(CheckpointError, match="is damaged"):
                load(tmp_path / "one")
            signed(tmp_path / "one")
            with pytest.raises(CheckpointError, match=message):
                load(tmp_path / "one")


def test_CR_09_the_inventory_is_tensors_and_plain_json(tmp_path: Path) -> None:
    state = {
        **small(),
        "memory": {"hidden": torch.ones(4, 8)},
        "normaliser": [np.ones(3)],
        "rng": torch.get_rng_state(),
    }
    save(tmp_path / "one", state, {"exploration": 0.5})
    held = load_file(tmp_path / "one" / "state.safetensors")
    assert set(held) == {"lanes/0", "memory/hidden", "normaliser/0", "rng"}
    plain = json.loads((tmp_path / "one" / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert plain["state"]["memory"] == {"hidden": {"$tensor": "memory/hidden"}}
    for name in FILES:
        data = (tmp_path / "one" / name).read_bytes()
        assert b"cpu" not in data.replace(torch.__version__.encode(), b""), "a device is named"
        assert b"cuda" not in data


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_CR_08_what_is_saved_on_a_device_loads_on_the_cpu(device: str, tmp_path: Path) -> None:
    env, method = Identity(), A2C(hidden=(8,))
    learner = Learner(method, env.spec, devices=(device,), seed=1)
    memory = torch.arange(6, device=device).reshape(2, 3).to(torch.complex128).mT
    save(tmp_path / "one", {"learner": learner.state(), "memory": memory})
    state = load(tmp_path / "one")
    assert same(state["memory"], memory.cpu())
    assert {each.device.type for each in state["learner"]["net"].values()} == {"cpu"}
    other = Learner(method, env.spec, seed=2)
    other.load_state(state["learner"])
    observation = torch.rand(100, *env.spec.observation.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        there, here = (
            method.act(net, observation.to(where), None, None)
            for net, where in ((learner.net, device), (other.net, "cpu"))
        )
    assert torch.equal(there.action.cpu(), here.action)
    assert torch.allclose(there.logits.cpu(), here.logits, atol=1e-5)
    assert device == "cuda" or not torch.cuda.is_initialized()


# Whole or not at all


def steps_of(act: Callable[[], None]) -> Iterator[tuple[int, BaseException | None]]:
    """Do it again and again, each time failing at a later step on the disk, until it does not fail."""
    for number in range(1, 1000):
        count = 0

        def fail(frame: Any, event: str, function: Any, number: int = number) -> None:
            nonlocal count
            if (
                event == "c_call"
                and getattr(function, "__name__", "") in STEPS
                and "headrace" in frame.f_code.co_filename
            ):
                count += 1
                if count == number:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        sys.setprofile(fail)
        try:
            act()
        except CheckpointError as error:
            sys.setprofile(None)
            yield number, error
        else:
            sys.setprofile(None)
            yield number, None
            if count < number:
                return
        finally:
            sys.setprofile(None)
    pytest.fail("it never succeeded")


@pytest.mark.parametrize("there", [True, False])
def test_CR_14_a_failure_at_each_step_leaves_what_was_there(there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    if there:
        save(folder, small(1))
    failures = 0
    for number, error in steps_of(lambda: save(folder, small(2))):
        if error is None:
            assert same(load(folder), small(2))
            break
        failures += 1
        assert "could not be saved" in str(error)
        assert "No space left" in str(error)
        assert "Free some space, and save again" in str(error)
        if folder.exists():
            assert same(load(folder), small(1)) or same(load(folder), small(2)), number
            if not there:
                discard(folder)
        else:
            assert not there, number
    assert failures > 15
    assert names(folder.parent) == ["one"]


def test_CR_14_a_full_disk_leaves_older_ones_and_nothing_half_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, small(1))
    state = {**small(2), "big": torch.zeros(50_000)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for share in (0, 0.1, 0.5, 0.9, 0.99):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * 200_000), before[1]))
        try:
            with pytest.raises(CheckpointError, match=r"step_000000002 could not be saved.*File too large.*Free some"):
                checkpoints.save(2, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert names(tmp_path) == ["step_000000001"]
    found = checkpoints.latest()
    assert found is not None
    assert same(load(found.folder), small(1))
    assert same(load(checkpoints.save(2, state)), state)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [("mkdir", "fsync", "rename", "rmdir"), STEPS], ids=["some", "all"])
def test_CR_06_killed_at_each_step_the_old_or_the_new_one_is_there(steps: tuple[str, ...], tmp_path: Path) -> None:
    for outcomes in driven("killed.py", tmp_path / "runs", *steps):
        assert len(outcomes) >= 10
        assert outcomes == sorted(outcomes), "once the new one is there it stays"
        assert set(outcomes) == {1, 2}


@pytest.mark.slow
def test_CR_06_killed_at_300_random_moments_of_a_loop_of_saves(tmp_path: Path) -> None:
    """At most the one that was being written is lost, and what was left behind is gone after the next save."""
    lost = driven("killed.py", tmp_path / "runs", "300")
    assert len(lost) == 300
    assert set(lost) <= {0, 1}


def test_CR_06_all_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without power, what was not synced is lost: so all is, in this order, and the name last."""
    synced: list[tuple[str, Any]] = []
    fsync, rename = os.fsync, os.rename

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, names(path) if path.is_dir() else path.stat().st_size))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        synced.append((source.name, target.name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path / "runs" / "one", small())
    sizes = [(name, (tmp_path / "runs" / "one" / name).stat().st_size) for name in reversed(FILES)]
    assert synced == [
        (tmp_path.name, ["runs"]),
        *sizes,
        (".one.new", list(FILES)),
        (".one.new", "one"),
        ("runs", ["one"]),
    ]


def test_what_a_killed_save_left_is_taken_away_and_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    checkpoints = Checkpoints(tmp_path / "runs", keep=1)
    checkpoints.save(1, small(1))
    left = tmp_path / "runs" / ".step_000000007.new"
    left.mkdir()
    (left / "half").write_text("x")
    (left / "link").symlink_to(outside)
    (tmp_path / "runs" / ".step_000000008.new").symlink_to(outside)
    (tmp_path / "runs" / "step_000000000").symlink_to(outside)
    for other in (".hidden.new", ".step_x.new", "notes.txt", "step_1.txt"):
        (tmp_path / "runs" / other).write_text("not ours")
    checkpoints.save(2, small(2))
    assert names(tmp_path / "runs") == [".hidden.new", ".step_x.new", "notes.txt", "step_000000002", "step_1.txt"]
    assert names(outside) == ["precious"]


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match=r"mine has thesis\.tex in it, which would be lost"):
        save(tmp_path / "mine", small())
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "file").write_text("precious")
    for name in ("link", "file"):
        with pytest.raises(CheckpointError, match=f"{name} is a link or a file"):
            save(tmp_path / name, small())
    with pytest.raises(CheckpointError, match="could not be saved"):
        save(tmp_path / "file" / "below", small())
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", small(1))
    save(tmp_path / "empty", small(2))
    assert same(load(tmp_path / "empty"), small(2))
    assert names(tmp_path) == ["empty", "file", "link", "mine"]


# Which ones stay


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    scores = {10: 1.0, 20: 5.0, 30: None, 40: math.nan, 50: 4.0, 60: 5.0}
    kept = {10: {10}, 20: {10, 20}, 30: {20, 30}, 40: {20, 30, 40}, 50: {20, 40, 50}, 60: {50, 60}}
    for step, score in scores.items():
        folder = checkpoints.save(step, small(step), {"method": "PPO"}, score=score)
        assert folder == tmp_path / f"step_{step:09d}"
        assert {int(name.removeprefix("step_")) for name in names(tmp_path)} == kept[step]
        newest = checkpoints.latest()
        assert newest is not None
        assert (newest.folder, newest.step, newest.skipped) == (folder, step, ())
        assert same(newest.info, {"method": "PPO", "step": step, "score": score})
    best = checkpoints.best()
    assert best is not None
    assert best.step == 60, "the newest of equal ones"
    flipped(best.folder / "weights.safetensors", 8 * 150)
    best = checkpoints.best()
    assert best is not None
    assert (best.step, len(best.skipped)) == (50, 1)


def test_one_that_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1))
    rename = os.rename

    def refused(source: Path, target: Path) -> None:
        if source.name == "step_000000001":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(CheckpointError, match=r"could not be tidied up: .*Input/output error"):
        checkpoints.save(2, small(2))
    monkeypatch.undo()
    assert same(load(tmp_path / "step_000000002"), small(2))
    checkpoints.save(3, small(3))
    assert names(tmp_path) == ["step_000000003"]


def test_all_stay_if_so_asked_and_one_that_goes_back_stays(tmp_path: Path) -> None:
    every = Checkpoints(tmp_path / "every", keep=None)
    for step in range(5):
        every.save(step, small())
    assert len(names(tmp_path / "every")) == 5
    assert every.best() is None
    back = Checkpoints(tmp_path / "back", keep=1)
    back.save(300, small())
    folder = back.save(200, small())
    assert folder.is_dir()


def test_steps_and_keeps_that_do_not_fit(tmp_path: Path) -> None:
    for keep in (0, -1, 1.5, True, "3"):
        with pytest.raises(ConfigError, match="keep="):
            Checkpoints(tmp_path, keep=keep)  # type: ignore[arg-type]
    for step in (-1, 1.5, True, None):
        with pytest.raises(ConfigError, match="step="):
            Checkpoints(tmp_path).save(step, small())  # type: ignore[arg-type]


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    Path("program.py").write_text(program)
    ended = runpy.run_path("program.py")
    assert ended["report"].env_steps >= 2_000
    assert len(names(tmp_path / "checkpoints")) == 3


# Going on in another process


def test_going_on_from_a_file_is_going_on_from_memory(tmp_path: Path) -> None:
    learned = runpy.run_path(str(DRIVERS / "going_on.py"))["learned"]
    state, _, _ = learned("ppo", 2)
    save(tmp_path / "one", state)
    found = load(tmp_path / "one")
    assert same(found, state)
    assert learned("ppo", 5, found)[1:] == learned("ppo", 5, state)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "a2c", "dqn"])
def test_CR_01_a_run_that_goes_on_in_another_process_is_the_same(name: str, tmp_path: Path) -> None:
    """Of 20 updates, stopped after 1, 7, 13 and 19. Environments begin new episodes there, in both runs."""
    learned = runpy.run_path(str(DRIVERS / "going_on.py"))["learned"]
    expected = {}
    for k in (1, 7, 13, 19):
        state, _, _ = learned(name, k)
        save(tmp_path / f"{k}", state, {"method": name})
        expected[str(k)] = list(learned(name, 20, state)[1:])
    assert driven("going_on.py", name, tmp_path, *expected) == expected
    straight = learned(name, 20)[1]
    assert len({straight, *(digest for digest, _ in expected.values())}) == 5, "the digest tells runs apart"


def test_CR_15_what_is_restored_acts(tmp_path: Path) -> None:
    """Every parameter is the saved one, on the learner and in what the actors take, and they say so."""
    env, method = Identity(), A2C(hidden=(8,))
    plan = SyncBatches(actors=2, num_envs=4, num_steps=4)
    reports = plan.run(Learner(method, env.spec, seed=1), env, Inline(), env_steps=10**9)
    for report in reports:
        if report.version == 10:
            save(tmp_path / "one", report.snapshot())
            break
    reports.close()  # type: ignore[attr-defined]
    learner = Learner(method, env.spec, seed=2)
    state = load(tmp_path / "one", net=learner.net)
    seen: list[Any] = []
    prepare = learner.prepare

    def prepared(rollout: Any) -> Any:
        seen.append((sorted(set(rollout.version.flatten().tolist())), copy.deepcopy(learner.net.state_dict())))
        return prepare(rollout)

    learner.prepare = prepared  # type: ignore[method-assign]
    following = plan.run(learner, env, Inline(), env_steps=10**9, state=state)
    for _ in range(2):
        next(following)
    following.close()  # type: ignore[attr-defined]
    assert same(dict(seen[0][1]), dict(state["learner"]["net"]))
    assert [versions for versions, _ in seen] == [[10], [11]]
    ((note, tensors),) = state["weights"]
    assert note.version == 10
    assert sorted(map(raw, tensors)) == sorted(map(raw, state["learner"]["net"].values()))
