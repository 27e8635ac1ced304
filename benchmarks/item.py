"""The item that `transport` moves: eight fields, as a rollout of 128 steps has them. NumPy only, for every system."""

import numpy as np

STEPS = 128
ENVIRONMENTS = {"59kb": 16, "58mb": 15_488}
COUNTS = {"59kb": 30_000, "58mb": 100}  # items that are measured
WARM_UPS = {"59kb": 2_000, "58mb": 8}
SOURCES = {"59kb": 8, "58mb": 2}  # items that the writer fills in turn

FIELDS = (
    ("observation", np.float32, (STEPS + 1, 0, 4)),  # 0 stands for the number of environments
    ("action", np.int32, (STEPS, 0)),
    ("reward", np.float32, (STEPS, 0)),
    ("log_prob", np.float32, (STEPS, 0)),
    ("terminated", np.bool_, (STEPS, 0)),
    ("environment", np.int32, (0,)),
    ("env_steps", np.int64, (0,)),
    ("sequence", np.int64, (0,)),
)


def arrays(size: str) -> tuple[np.ndarray, ...]:
    """One item, every array allocated by itself and touched."""
    count = ENVIRONMENTS[size]
    return tuple(np.full([length or count for length in shape], 1, dtype) for _, dtype, shape in FIELDS)


def item_bytes(size: str) -> int:
    return sum(array.nbytes for array in arrays(size))


def stamp(first: np.ndarray, last: np.ndarray, number: int) -> None:
    """Mark an item, given its first and last field, as this one."""
    first[0, 0, 0] = number
    last[0] = number


def look(first: np.ndarray, last: np.ndarray, number: int) -> None:
    """Read what `stamp` wrote."""
    if first[0, 0, 0] != number or last[0] != number:
        raise RuntimeError(f"item {number} came as {first[0, 0, 0]}, {last[0]}")
