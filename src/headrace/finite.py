"""Numbers that are not finite: where the first one is, before anything is learned from it."""

from __future__ import annotations

import math

import optree
import torch

from headrace.data import Rollout
from headrace.errors import NonFinite
from headrace.struct import NAMESPACE, Struct

__all__ = ["ADVICE", "check_rollout", "not_finite"]

ADVICE = 'non_finite="skip" (--non-finite skip) would leave out such updates and count them.'


def not_finite(struct: Struct) -> tuple[str, list[int], float] | None:
    """Path, index and value of the first number in a Struct that is infinite or a NaN; first in its leading axis."""
    named = [(path, leaf) for path, leaf in struct.named_leaves() if leaf.is_floating_point()]
    sums = [leaf.sum() for _, leaf in named]  # a sum is not finite if a number is not, and seldom else
    if sums and sums[0].device.type == "cpu":
        if all(math.isfinite(total) for total in sums):
            return None
    elif not sums or torch.stack([total.double() for total in sums]).isfinite().all():
        return None
    found = []
    for path, leaf in named:
        wrong = (~leaf.isfinite()).nonzero()
        if len(wrong):
            place = wrong[0].tolist()
            found.append((path, place, float(leaf[tuple(place)])))
    return min(found, key=lambda entry: entry[1][:1], default=None)


def check_rollout(rollout: Rollout) -> None:
    """Raise NonFinite for a rollout that holds a number which is not finite, and say where it came from."""
    told = (rollout.observation, rollout.action, rollout.log_prob, rollout.reward)
    leaves: list[torch.Tensor] = optree.tree_leaves(told, namespace=NAMESPACE)  # type: ignore[arg-type]
    if all(math.isfinite(leaf.sum()) for leaf in leaves if leaf.is_floating_point()):
        return
    # What an actor remembers, or sums up, comes from rows that are looked at; unused lines of the table hold anything.
    found = not_finite(
        rollout.replace(memory=None, discounted_return=None, final_observation=None, running_return=None)
    )
    if found is None:
        return
    path, (row, column, *_), value = found
    raise NonFinite(
        f"{path} of environment {int(rollout.environment[column])} is {value}, in row {row} of rollout "
        f"{int(rollout.sequence[column])} of actor {int(rollout.rank[column])}, made with version "
        f"{int(rollout.version[0, column])}; nothing was learned from it. {ADVICE}"
    )
