"""The learner: owns the network and its optimizers, and turns batches into new weights."""

from __future__ import annotations

import copy
import hashlib
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn, optim

from headrace.data import Gradient, Loss, Mean, Rollout, Transitions
from headrace.errors import ConfigError, NonFinite
from headrace.finite import ADVICE, check_rollout, not_finite
from headrace.method import Method
from headrace.parameters import Replica
from headrace.report import Report
from headrace.spaces import Spec
from headrace.struct import Struct
from headrace.tally import Heard, Metrics, Told, identity

__all__ = ["Learner"]

_ELEMENTWISE = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD)
_building = threading.Lock()  # whoever builds has the global generator for itself
_Told: TypeAlias = tuple[dict[str, float], Tensor | None]
"""The metrics of an update, and the priorities that it gives the rows which it learned from."""
_TINY = torch.finfo(torch.float32).tiny


class Learner:
    """The network, its optimizers and its counters.

    devices: where the network lives; of several, each takes a share of every minibatch, and gradients are summed in
    their order. microbatch_size: rows of which the gradient is computed at a time, None: a whole minibatch.
    threads: torch threads while it computes, whatever the caller uses; another number gives other bits.
    non_finite: what becomes of an update whose batch or gradient holds an infinite number or a NaN. "raise": NonFinite,
    which says where. "skip": it is left out whole, and its environment steps are counted in `dropped`. Either way no
    such number reaches a weight, an optimizer's state or a running statistic.
    stream: which of those that learn together this is. Their networks begin equal, and each draws numbers of its own.
    """

    def __init__(
        self,
        method: Method,
        spec: Spec,
        devices: Sequence[str | torch.device] = ("cpu",),
        seed: int = 0,
        *,
        microbatch_size: int | None = None,
        threads: int = 1,
        non_finite: Literal["raise", "skip"] = "raise",
        stream: Sequence[int] = (),
    ) -> None:
        if isinstance(devices, str) or not devices:
            raise ConfigError(f'devices={devices!r}: give a sequence of at least one, such as ("cpu",).')
        if microbatch_size is not None and microbatch_size < 1:
            raise ConfigError(f"microbatch_size={microbatch_size}: give at least 1, or None.")
        if non_finite not in ("raise", "skip"):
            raise ConfigError(f'non_finite={non_finite!r}: choose "raise" or "skip".')
        self.method, self.spec, self.seed, self.non_finite = method, spec, seed, non_finite
        self.devices = tuple(map(torch.device, devices))
        self.microbatch_size, self.threads = microbatch_size, threads
        word = zlib.crc32(b"learner")
        build, learn = (int(drawn) for drawn in np.random.SeedSequence((seed, word)).generate_state(2, np.uint64))
        if stream:
            _, learn = np.random.SeedSequence((seed, word, *stream)).generate_state(2, np.uint64).tolist()
        self._rng = torch.Generator().manual_seed(learn)
        with _own_randomness(build) as rng, self._settings():
            net = method.build(spec, rng)
        nets = [net if number == 0 else copy.deepcopy(net) for number in range(len(self.devices))]
        self._replicas = []
        for copied, device in zip(nets, self.devices, strict=True):
            optimizers = method.optimizers(copied.to(device))
            self._replicas.append(Replica(copied, optimizers))
            if len(self._replicas) == 1:
                self._optimizers = optimizers
        self.net = net
        for name, optimizer in self._optimizers.items():
            if type(optimizer) in _ELEMENTWISE:  # then a vector is stepped as its parts are, in a third of the time
                for group, vector in zip(optimizer.param_groups, self._replicas[0].groups[name].vectors, strict=True):
                    group["params"] = [vector]
        self._annealed = method
        self.version = self.env_steps = self.gradient_steps = self.samples_learned = 0
        self.dropped: dict[str, int] = {}
        self._prepared = 0  # environment steps that no update has been given yet
        self._norms: list[tuple[str, Tensor]] = []  # of gradients that were not looked at yet
        self._looks = self.devices[0].type == "cpu"  # at every norm; an accelerator is waited for once an update
        self._heard = Heard()

    @property
    def acting(self) -> nn.Module:
        """The part of the network that actors need."""
        return self.method.acting(self.net)

    @property
    def maker(self) -> Callable[..., Learner]:
        """Makes a learner with the same settings wherever it is called, given devices= and stream=."""
        settings = {"microbatch_size": self.microbatch_size, "threads": self.threads, "non_finite": self.non_finite}
        return partial(Learner, self.method, self.spec, seed=self.seed, **settings)  # type: ignore[arg-type]

    def owns(self, vector: Tensor) -> bool:
        """Whether this is a vector that it computes gradients in: the mean of such a one may be stored in its place."""
        return any(vector is group.gradient for group in self._replicas[0].groups.values())

    @property
    def longest(self) -> int:
        """Bytes of the longest vector that it takes a mean of with others, unless a method has longer ones."""
        gradients = [group.gradient.nbytes for group in self._replicas[0].groups.values()]
        return max(*gradients, *(8 * buffer.numel() + 8 for buffer in self.net.buffers()), 2**16)

    def example(self, num_steps: int, num_envs: int) -> Rollout:
        """A rollout of zeros with these sizes, as actors of this method make them."""
        return self.method.example(self.acting, self.spec, num_steps, num_envs)

    def anneal(self, progress: float) -> None:
        """Learn from now on with what the method's schedules give at this share (0 to 1) of the run."""
        annealed = self.method.anneal(min(1.0, progress))
        if annealed != self._annealed:
            self._learn_by(annealed)

    def hear(self, rollout: Rollout) -> int:
        """Count a rollout and note what it tells of episodes, and return its environment steps.

        Raises NonFinite, unless such are to be skipped.
        """
        if self.non_finite == "raise":
            check_rollout(rollout)
        return self._count(rollout)

    def hear_of(self, told: Told) -> None:
        """Count a rollout of which somebody else computes the gradient, as `prepare` counts one."""
        self._prepared += self._count(told)

    def prepare(self, rollout: Rollout) -> Struct:
        """Hear a rollout and make of it what `update` learns from. Raises NonFinite, unless such are to be skipped."""
        self._prepared += self.hear(rollout)
        with self._settings(), torch.no_grad():
            return self._annealed.prepare(self.net, rollout.to(self.devices[0]))

    def update(self, batch: Struct, mean: Mean = identity) -> Report:
        """Learn from a batch, which makes the next version. Raises NonFinite, unless such are to be skipped.

        mean: averages over all who learn together; every one of them calls it equally often, in the same order.
        """
        with self._settings():
            for replica in self._replicas:
                for name, group in replica.groups.items():
                    group.check(name)
            told, priorities = self._whole(lambda: self._learn_from(batch, mean))
            self._finish()
        return self.report(told, priorities)

    def gradient(self, batch: Struct, mean: Mean = identity) -> tuple[Gradient, dict[str, float]]:
        """The mean gradient over a batch, for somebody else to `apply`, and its metrics. Changes no weight.

        Raises ConfigError unless the method learns from a batch in one gradient step of one group, and NonFinite for a
        batch that is not finite; if such are to be skipped, the gradient is NaN instead, which `apply` leaves out.
        """
        wrong = False
        try:
            self._check_batch(batch, identity)
        except NonFinite:
            if self.non_finite == "raise":
                raise
            wrong = True
        minibatches = list(self._annealed.minibatches(batch, self._rng, mean))
        if len(self._optimizers) != 1 or len(minibatches) != 1:
            raise ConfigError(
                f"{type(self.method).__name__} learns from a batch in {len(minibatches)} minibatches and has "
                f"{len(self._optimizers)} optimizers; only one gradient step of one optimizer is a gradient to hand on."
            )
        with self._settings():
            found = self._differentiate(self._begin(minibatches[0]))
            assert found is not None
            losses, weight = found
            flat = self._replicas[0].groups[losses[0].group].gradient / weight
            if wrong:
                flat.fill_(torch.nan)
            metrics = Metrics(identity)
            metrics.add(losses, weight, first=True)
            with torch.no_grad():
                described = self._annealed.describe(batch)
        norm = losses[0].max_grad_norm
        gradient = Gradient(
            flat=flat.cpu(),
            weight=weight.double().reshape(1).cpu(),
            max_grad_norm=torch.tensor([torch.inf if norm is None else norm], dtype=torch.float64),
        )
        return gradient, metrics.means(described)

    def moments(self, batch: Struct) -> Tensor:
        """What this batch moves statistics by [N] float64, for somebody else to `apply`. Moves those of this network.

        It is what the method takes means of: whoever gives its `statistics` the same means moves them in the same way.
        """
        noted = [torch.empty(0, dtype=torch.float64)]

        def note(vector: Tensor, weight: Tensor | float) -> Tensor:
            noted.append(vector.detach().to("cpu", torch.float64))
            return vector

        with self._settings(), torch.no_grad():
            self._annealed.statistics(self.net, batch, note)
        return torch.cat(noted)

    def apply(
        self,
        gradient: Gradient,
        metrics: Mapping[str, float] | None = None,
        moments: Sequence[Tensor] = (),
        like: Struct | None = None,
    ) -> Report:
        """Step with a gradient that was computed elsewhere, which makes the next version. Raises as `update` does.

        metrics: to report. moments: what `moments` told of each batch behind the gradient; like: a batch of any
        content, shaped as theirs.
        """
        (name,) = self._optimizers
        with self._settings():
            told, _ = self._whole(lambda: self._apply(name, gradient, dict(metrics or {}), moments, like))
            self._finish()
        return self.report(told)

    def report(self, metrics: Mapping[str, float] | None = None, priorities: Tensor | None = None) -> Report:
        """What it has come to, and what was heard since the last report. For plans; an update reports by itself."""
        running = self._heard.running()
        returns, lengths, lags = self._heard.tell()
        rates = {name: float(optimizer.param_groups[0]["lr"]) for name, optimizer in self._optimizers.items()}
        return Report(
            version=self.version,
            env_steps=self.env_steps,
            frames=self.env_steps * self.spec.frame_skip,
            gradient_steps=self.gradient_steps,
            samples_learned=self.samples_learned,
            dropped=dict(self.dropped),
            episode_returns=returns,
            episode_lengths=lengths,
            running_return=running[0] if running else None,
            running_length=running[1] if running else None,
            lags=lags,
            metrics=dict(metrics or {}),
            learning_rates=rates,
            priorities=priorities,
        )

    def digest(self) -> str:
        """The SHA-256 of the weights: of all tensors in the network's `state_dict`, in its order."""
        held = self.net.state_dict().values()
        return hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in held)).hexdigest()

    def state(self) -> dict[str, Any]:
        """All that learning goes on from: network, optimizers, counters and generator, as copies."""
        return copy.deepcopy(
            {
                "net": self.net.state_dict(),
                "optimizers": {name: optimizer.state_dict()["state"] for name, optimizer in self._optimizers.items()},
                "rng": self._rng.get_state(),
                "counters": {
                    "version": self.version,
                    "env_steps": self.env_steps,
                    "gradient_steps": self.gradient_steps,
                    "samples_learned": self.samples_learned,
                },
                "dropped": self.dropped,
            }
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. Raises ConfigError when it is of another method or network."""
        try:
            for replica in self._replicas:
                replica.net.load_state_dict(state["net"])
            for name, optimizer in self._optimizers.items():
                held = copy.deepcopy(state["optimizers"][name])  # without settings: those are the method's
                optimizer.load_state_dict({"state": held, "param_groups": optimizer.state_dict()["param_groups"]})
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"this state is not of {type(self.method).__name__} on this network: {error}") from error
        self._learn_by(self.method)  # not by the learning rate of whom the state is from
        self._rng.set_state(state["rng"])
        for name, value in state["counters"].items():
            setattr(self, name, value)
        self.dropped = dict(state["dropped"])

    def _learn_by(self, method: Method) -> None:
        """Let the optimizers take over what this method sets, and keep their state."""
        self._annealed = method
        for name, fresh in method.optimizers(self.net).items():
            for group, given in zip(self._optimizers[name].param_groups, fresh.param_groups, strict=True):
                group.update({key: value for key, value in given.items() if key != "params"})

    def _finish(self) -> None:
        """Make it the next version."""
        self.version += 1
        with torch.no_grad():
            for replica in self._replicas[1:]:  # what statistics() moved
                for buffer, moved in zip(replica.net.buffers(), self.net.buffers(), strict=True):
                    buffer.copy_(moved)
            for replica in self._replicas:
                self._annealed.after_update(replica.net, self.version)

    # One update

    def _learn_from(self, batch: Struct, mean: Mean) -> _Told:
        """All gradient steps on a batch, and what its statistics move."""
        method = self._annealed
        if not isinstance(batch, Transitions):  # of which replay holds none that was not looked at
            self._check_batch(batch, mean)
        with torch.no_grad():
            described = method.describe(batch)
        metrics = Metrics(mean)
        for minibatch in method.minibatches(batch, self._rng, mean):
            if not self._learn(minibatch, mean, metrics):
                break
        self._check_norms()
        with torch.no_grad():
            method.statistics(self.net, batch, mean)
        self.samples_learned += metrics.samples
        return metrics.means(described), metrics.priorities

    def _apply(
        self, name: str, gradient: Gradient, metrics: dict[str, float], moments: Sequence[Tensor], like: Struct | None
    ) -> _Told:
        self._replicas[0].groups[name].gradient.copy_(gradient.flat)
        norm = float(gradient.max_grad_norm)
        self._step(name, self._norm(name), None if norm == torch.inf else norm)
        self._check_norms()
        with torch.no_grad():
            for told in moments:
                self._move(told, like)
        self.gradient_steps += 1
        self.samples_learned += round(float(gradient.weight))
        return metrics, None

    def _move(self, told: Tensor, like: Struct | None) -> None:
        """Move statistics by what `moments` told."""
        if not len(told):
            return
        if like is None:
            raise ConfigError("moments without like: give a batch shaped as those that they are of.")
        at = 0

        def repeat(vector: Tensor, weight: Tensor | float) -> Tensor:
            nonlocal at
            at += len(vector)
            return told[at - len(vector) : at].to(vector.device, vector.dtype)

        self._annealed.statistics(self.net, like, repeat)

    def _count(self, told: Rollout | Told) -> int:
        steps = int(told.env_steps.sum())
        self.env_steps += steps
        self._heard.add(told, self.version)
        return steps

    def _whole(self, learn: Callable[[], _Told]) -> _Told:
        """What `learn` returns. If it meets a number that is not finite, it is undone, and raised or counted."""
        steps, prepared = self.gradient_steps, self._prepared
        self._prepared = 0
        self._norms.clear()
        # Where every norm is looked at before its step, what was learned up to there may stay when it raises.
        before = self._kept() if self.non_finite == "skip" or not self._looks else None
        try:
            return learn()
        except NonFinite:
            if before is not None:
                self._restore(*before)
                self.gradient_steps = steps
            if self.non_finite == "raise":
                raise
            self.dropped["non_finite"] = self.dropped.get("non_finite", 0) + prepared
            return {}, None

    def _kept(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Copies of all that an update changes: weights, buffers and the state of the optimizers."""
        states = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in self._optimizers.items()}
        return [tensor.clone() for tensor in self._replicas[0].tensors()], states

    def _restore(self, tensors: Sequence[Tensor], states: Mapping[str, Any]) -> None:
        for replica in self._replicas:
            for tensor, kept in zip(replica.tensors(), tensors, strict=True):
                tensor.copy_(kept)
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(states[name])

    def _check_batch(self, batch: Struct, mean: Mean) -> None:
        """Raise NonFinite if anybody's batch is not finite; all who learn together then leave theirs out."""
        found = not_finite(batch)
        if self.non_finite == "skip" and mean is not identity:
            share = float(mean(torch.tensor([float(found is not None)], device=self.devices[0]), 1.0))
            if share > 0 and found is None:
                raise NonFinite("somebody who learns together with this learner has a batch that is not finite.")
        if found is not None:
            path, place, value = found
            raise NonFinite(
                f"{path} at {place} of the batch is {value}, before update {self.version + 1}; nothing was learned "
                f"from it. {ADVICE}"
            )

    # One gradient step

    def _learn(self, minibatch: Struct, mean: Mean, metrics: Metrics) -> bool:
        """One gradient step for every loss; False if one was beyond its limits."""
        parts = self._begin(minibatch)
        number = 0
        while (found := self._differentiate(parts)) is not None:
            losses, weight = found
            group = losses[0].group
            gradient = self._replicas[0].groups[group].gradient.div_(weight)
            if mean is not identity:
                gradient.copy_(mean(gradient, weight))
            norm = self._norm(group)
            if not metrics.add(losses, weight, first=number == 0):
                return False
            self._step(group, norm, losses[0].max_grad_norm)
            number += 1
        self.gradient_steps += 1
        return True

    def _begin(self, minibatch: Struct) -> list[tuple[Replica, Iterator[Loss]]]:
        """The parts of a minibatch whose gradients are computed one after the other: on which replica, which losses."""
        method, step, replicas = self._annealed, self.gradient_steps, self._replicas
        if len(replicas) == 1 and self.microbatch_size is None:
            if self.devices[0].type != "cpu":
                minibatch = minibatch.to(self.devices[0])
            return [(replicas[0], method.losses(self.net, minibatch, step))]
        names = minibatch.axis_names
        axis = "T*B" if "T*B" in names else "B"
        total = minibatch.size(axis)
        rows = (
            minibatch.size("T") if axis == "B" and "T" in names else 1
        )  # in each column of a batch that has both axes
        size = max(1, total if self.microbatch_size is None else self.microbatch_size // rows)
        parts = []
        for number, (replica, device) in enumerate(zip(replicas, self.devices, strict=True)):
            low, high = total * number // len(replicas), total * (number + 1) // len(replicas)
            for start in range(low, high, size):
                part = minibatch.at(**{axis: slice(start, min(start + size, high))}).to(device)
                parts.append((replica, method.losses(replica.net, part, step)))
        return parts

    def _differentiate(self, parts: Sequence[tuple[Replica, Iterator[Loss]]]) -> tuple[list[Loss], Tensor] | None:
        """The next loss of every part and the sum of their weights, with gradients summed; None after the last."""
        home = self._replicas[0]
        several = len(self._optimizers) > 1
        losses: list[Loss] = []
        weights: list[Tensor] = []
        for replica, following in parts:
            loss = next(following, None)
            if loss is None:
                continue
            if not losses:
                for each in self._replicas:
                    each.groups[loss.group].gradient.zero_()
            # Before the next part's loss is computed: one graph at a time is what microbatches are for.
            parameters = replica.groups[loss.group].parameters if several else None
            loss.total.backward(inputs=parameters)  # type: ignore[no-untyped-call]
            weights.append(torch.as_tensor(loss.weight, dtype=torch.float32, device=self.devices[0]))
            losses.append(loss)
        if not losses:
            return None
        gradient = home.groups[losses[0].group].gradient
        for replica in self._replicas[1:]:
            gradient.add_(replica.groups[losses[0].group].gradient.to(gradient.device))
        weight = weights[0] if len(weights) == 1 else torch.stack(weights).sum()
        # A minibatch in which no row counts has a gradient of 0, whatever that is divided by.
        return losses, weight.clamp_min(_TINY)

    def _norm(self, name: str) -> Tensor:
        """The norm of a group's gradient, before it is clipped. Raises NonFinite where norms are looked at."""
        norm: Tensor = torch.linalg.vector_norm(self._replicas[0].groups[name].gradient)
        self._norms.append((name, norm))
        if self._looks:
            self._check_norms()
        return norm

    def _check_norms(self) -> None:
        """Raise NonFinite if a norm since the last check was not finite."""
        norms, self._norms = self._norms, []
        if not norms:
            return
        values = [float(norms[0][1])] if len(norms) == 1 else torch.stack([norm for _, norm in norms]).tolist()
        for (name, _), value in zip(norms, values, strict=True):
            if not math.isfinite(value):
                rate = self._optimizers[name].param_groups[0]["lr"]
                raise NonFinite(
                    f"the gradient of group {name!r} has norm {value}, in update {self.version + 1}, at a learning "
                    f"rate of {rate:g}; no step was taken with it. {ADVICE}"
                )

    def _step(self, name: str, norm: Tensor, max_grad_norm: float | None) -> None:
        group = self._replicas[0].groups[name]
        if max_grad_norm is not None:
            group.gradient.mul_(max_grad_norm / norm.clamp_min(max_grad_norm))
        self._optimizers[name].step()
        for replica in self._replicas[1:]:
            replica.groups[name].flat.copy_(group.flat)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Compute with this learner's threads and with gradients, and leave the caller's settings as they were."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            torch.set_num_threads(before)


@contextmanager
def _own_randomness(seed: int) -> Iterator[torch.Generator]:
    """A generator to build a network with, while torch's global one, for layers that ask it, begins from the seed."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)
