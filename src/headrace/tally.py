"""What a learner notes until its next report: what rollouts told, and the metrics of gradient steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from headrace.data import Loss, Mean, Rollout
from headrace.struct import Struct, axes

__all__ = ["Heard", "Metrics", "Told", "identity"]


def identity(vector: Tensor, weight: Tensor | float) -> Tensor:
    """The mean over one learner."""
    return vector


class Told(Struct):
    """What a rollout tells of episodes and steps, without what is learned from. The fields are those of Rollout."""

    valid: Tensor = axes("T B", torch.bool)
    version: Tensor = axes("T B", torch.int32)
    sequence: Tensor = axes("B", torch.int64)
    env_steps: Tensor = axes("B", torch.int64)
    episode_return: Tensor = axes("T B", torch.float32)
    episode_length: Tensor = axes("T B", torch.int32)
    running_return: Tensor | None = axes("B", torch.float32, default=None)
    running_length: Tensor | None = axes("B", torch.int32, default=None)

    @classmethod
    def of(cls, rollout: Rollout, **fields: Any) -> Self:
        """What this rollout tells. fields: those that a subclass adds."""
        return cls(**{name: getattr(rollout, name) for name in Told.__dataclass_fields__}, **fields)


class Heard:
    """What rollouts told since the last report."""

    def __init__(self) -> None:
        self._returns: list[np.ndarray[Any, Any]] = []
        self._lengths: list[np.ndarray[Any, Any]] = []
        self._lags: list[np.ndarray[Any, Any]] = []
        self._running: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def add(self, rollout: Rollout | Told, version: int) -> None:
        lengths = rollout.episode_length.numpy()
        ended = lengths > 0
        self._returns.append(rollout.episode_return.numpy()[ended])
        self._lengths.append(lengths[ended])
        self._lags.append(version - rollout.version.numpy()[rollout.valid.numpy()])
        if rollout.running_return is not None and rollout.running_length is not None:
            self._running.append((rollout.running_return.numpy().copy(), rollout.running_length.numpy().copy()))

    def running(self) -> tuple[float, float] | None:
        """The mean return and length so far of the episodes that have begun and not ended; None if there is none."""
        told, self._running = self._running, []
        returns, lengths = (np.concatenate(columns) for columns in zip(*told, strict=True)) if told else ((), ())
        begun = np.asarray(lengths) > 0
        count = int(np.count_nonzero(begun))
        return (float(returns[begun].sum() / count), float(lengths[begun].sum() / count)) if count else None

    def tell(self) -> Iterator[np.ndarray[Any, Any]]:
        for held, dtype in ((self._returns, np.float32), (self._lengths, np.int32), (self._lags, np.int32)):
            yield np.concatenate(held) if held else np.empty(0, dtype)
            held.clear()


class Metrics:
    """Means over the gradient steps of an update, computed once, at its end."""

    def __init__(self, mean: Mean) -> None:
        self._mean = mean
        self._sums: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[Tensor]] = {}
        self._rows: list[Tensor] = []
        self._priorities: list[Tensor] = []

    def add(self, losses: Sequence[Loss], weight: Tensor, first: bool) -> bool:
        """Take in one gradient step; False if it is beyond the limits that its loss sets."""
        if first:
            self._rows.append(weight)
        self._priorities += [loss.priority.detach().cpu() for loss in losses if loss.priority is not None]
        limits = losses[0].limits
        sums = {
            name: torch.stack([loss.metrics[name].to(weight.device) for loss in losses]).sum()
            if len(losses) > 1
            else value
            for name, value in losses[0].metrics.items()
        }
        for name, value in sums.items():
            self._sums.setdefault(name, []).append(value)
            self._weights.setdefault(name, []).append(weight)
        return all(
            float(self._mean((sums[name] / weight).reshape(1), weight)) <= limit for name, limit in limits.items()
        )

    @property
    def priorities(self) -> Tensor | None:
        return torch.cat(self._priorities) if self._priorities else None

    @property
    def samples(self) -> int:
        return round(float(torch.stack(self._rows).double().sum())) if self._rows else 0

    def means(self, described: Mapping[str, Tensor]) -> dict[str, float]:
        """Those of the losses, and what was described of the batch; of all who learn together."""
        names, means = [*self._sums, *described], [torch.stack([*described.values()])] if described else []
        weight: Tensor | float = 1.0
        if self._sums:
            weights = torch.stack([torch.stack(weights).sum() for weights in self._weights.values()])
            sums = torch.stack([torch.stack(sums).sum() for sums in self._sums.values()])
            means.insert(0, sums / weights)
            weight = weights[0]
        if not means:
            return {}
        every = torch.cat([part.float() for part in means])
        if self._mean is not identity:
            every = self._mean(every, weight)
        return dict(zip(names, every.tolist(), strict=True))
