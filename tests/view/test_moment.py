"""A moment and a heading go through JSON and come back the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.view.moment import Header, Moment


@pytest.mark.parametrize("fields", [{}, {"evaluation": None, "return_mean100": None, "dropped": {"stale": 3}}])
def test_a_moment_goes_through_json(moment: Callable[..., Moment], fields: dict[str, Any]) -> None:
    before = moment(**fields)
    assert Moment.from_json(json.loads(json.dumps(before.to_json(), allow_nan=False))) == before


def test_a_heading_goes_through_json(header: Header) -> None:
    assert Header.from_json(json.loads(json.dumps(header.to_json()))) == header


def test_fields_of_a_later_version_are_passed_over_and_missing_ones_are_named(moment: Callable[..., Moment]) -> None:
    found = {**moment().to_json(), "gpu": 0.4}
    assert Moment.from_json(found) == moment()
    del found["updates"]
    with pytest.raises(KeyError, match="updates"):
        Moment.from_json(found)
