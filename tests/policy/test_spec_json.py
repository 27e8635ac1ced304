"""A Spec through JSON and back is equal, and what is none is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Box, ConfigError, Discrete, MultiBinary, MultiDiscrete, Spec
from headrace.spec_json import spec_from_json, spec_to_json

FLOATS = (torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint64, torch.bool)

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    dtype, shape = draw(st.sampled_from((*FLOATS, *INTEGERS))), draw(shapes)
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    if dtype in FLOATS:
        values = st.floats(allow_nan=False, width=8 * kind.itemsize)  # infinities included
    elif dtype == torch.bool:
        values = st.booleans()
    else:
        values = st.integers(int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    size = int(np.prod(shape))
    if draw(st.booleans()):  # one number for all
        bounds = [[draw(values)] * size for _ in range(2)]
    else:
        bounds = [draw(st.lists(values, min_size=size, max_size=size)) for _ in range(2)]
    low, high = (np.array(bound, kind).reshape(shape) for bound in bounds)
    return Box(np.minimum(low, high), np.maximum(low, high), dtype)


numbers = st.lists(st.tuples(st.integers(1, 5), st.integers(-3, 3)), min_size=1, max_size=3)
spaces = st.recursive(
    st.one_of(
        boxes(),
        st.builds(Discrete, st.integers(1, 2**40), st.integers(-(2**40), 2**40)),
        numbers.map(lambda pairs: MultiDiscrete(*map(tuple, zip(*pairs, strict=True)))),
        st.lists(st.integers(1, 3), min_size=1, max_size=2).map(lambda shape: MultiBinary(tuple(shape))),
    ),
    lambda inner: st.one_of(
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
    ),
    max_leaves=4,
)


@settings(max_examples=20)
@given(spaces, spaces, st.none() | st.integers(1, 9), st.integers(1, 9))
def test_a_spec_comes_back_equal(observation: Any, action: Any, shortest: int | None, frame_skip: int) -> None:
    spec = Spec(observation, action, shortest, frame_skip)
    text = json.dumps(spec_to_json(spec), allow_nan=False)
    back = spec_from_json(json.loads(text))
    assert back == spec
    assert repr(back) == repr(spec)  # dtypes and the order of dicts, which equality of dicts does not tell


def test_no_spec_is_equal_to_another_after_json() -> None:
    """A law that holds of constant functions too holds nothing: what differs, differs after it."""
    box = Box(np.zeros(2), np.ones(2))
    others = [
        Box(np.zeros(2), np.ones(2), torch.float64),
        Box(np.zeros(2), [1, 2]),
        Box([-np.inf, 0], np.ones(2)),
        Box(np.zeros((1, 2)), np.ones((1, 2))),
        {"a": box},
        (box,),
        (box, box),
        Discrete(2),
        Discrete(2, 1),
        MultiDiscrete((2,)),
        MultiBinary((2,)),
    ]
    specs = [Spec(space, Discrete(2)) for space in (box, *others)]
    specs += [Spec(box, Discrete(3)), Spec(box, Discrete(2), 3), Spec(box, Discrete(2), None, 4)]
    back = [spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) for spec in specs]
    for place, one in enumerate(back):
        assert [other == one for other in specs] == [number == place for number in range(len(specs))]


def test_infinities_are_words() -> None:
    box = Box([-np.inf, -np.inf], [4.5, np.inf])
    held = spec_to_json(Spec(box, Discrete(2, start=-1)))
    assert held == {
        "observation": {"box": {"shape": [2], "dtype": "float32", "low": "-inf", "high": [4.5, "inf"]}},
        "action": {"discrete": {"n": 2, "start": -1}},
        "shortest_truncation": None,
        "frame_skip": 1,
        "stacked": None,
    }
    assert spec_from_json(json.loads(json.dumps(held, allow_nan=False))).observation == box


def test_bounds_that_are_all_equal_take_one_number() -> None:
    pixels = Box(np.zeros((4, 84, 84)), np.full((4, 84, 84), 255), torch.uint8)
    assert len(json.dumps(spec_to_json(Spec(pixels, Discrete(6))))) < 300


GOOD = spec_to_json(Spec(Box(np.zeros(2), np.ones(2)), Discrete(2)))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ([], "a list"),
        ({**GOOD, "color": 1}, "color"),
        ({"observation": GOOD["observation"]}, "'action'"),
        ({**GOOD, "frame_skip": "2"}, "frame_skip is '2'"),
        ({**GOOD, "frame_skip": 0}, "frame_skip=0"),
        ({**GOOD, "action": {"ball": {}}}, "action is {'ball': {}}"),
        ({**GOOD, "action": {"discrete": {"n": 0, "start": 0}}}, "n=0"),
        ({**GOOD, "observation": {"box": {**GOOD["observation"]["box"], "dtype": "float"}}}, None),
        ({**GOOD, "observation": {"box": {**GOOD["observation"]["box"], "dtype": "nn"}}}, "observation cannot be read"),
        ({**GOOD, "observation": {"box": {**GOOD["observation"]["box"], "low": [0.0]}}}, "observation cannot be read"),
        ({**GOOD, "observation": {"dict": [["a", {"tuple": [3]}]]}}, "observation['a'][0] is 3"),
    ],
)
def test_what_is_no_spec_is_refused(changed: Any, says: str | None) -> None:
    if says is None:  # another name of float32
        assert spec_from_json(changed) == spec_from_json(GOOD)
        return
    with pytest.raises(ConfigError) as caught:
        spec_from_json(changed)
    assert says in str(caught.value)


def test_keys_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"observation has the key \(1, 2\)"):
        spec_to_json(Spec({(1, 2): Discrete(2)}, Discrete(2)))
