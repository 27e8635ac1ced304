"""What a measuring program says to the harness. Imports nothing, so that every peer's environment can use it."""

import json
import platform
import time
from collections.abc import Callable


def report(name: str, figure: float, version: str = f"Python {platform.python_version()}", **settings: object) -> None:
    """Print one figure."""
    print(json.dumps({"name": name, "figure": figure, "version": version, "settings": settings}), flush=True)


def rate(step: Callable[[int], object], count: int, warm_up: int) -> float:
    """How often a second `step(number)` ran, over `count` times after `warm_up` times; numbers begin with 1."""
    for number in range(1, warm_up + 1):
        step(number)
    began = time.perf_counter()
    for number in range(warm_up + 1, warm_up + count + 1):
        step(number)
    return count / (time.perf_counter() - began)
