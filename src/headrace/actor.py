"""The actor: steps environments with a copy of the network, and plays whole episodes for evaluation."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeAlias

import numpy as np
import optree
import torch
from torch import Tensor, nn

from headrace.channel import Beat, Note, Weights
from headrace.data import Decision, Rollout
from headrace.envs.base import CheckedVectorEnv, Env, VectorEnv
from headrace.errors import ConfigError, Stalled
from headrace.method import Method
from headrace.struct import NAMESPACE, Tree

__all__ = ["Actor", "Decide", "evaluate"]

ADVICE = "raise the plan's env_timeout if it was only slow"

Decide: TypeAlias = Callable[[Tree, Tree | None, Tree], Decision]
"""decide(observation, memory, noise): who chooses. An actor's own network, or a role that serves many actors."""


class Actor:
    """B environments and a copy of the policy, which make rollouts. A context manager, which closes the environments.

    environments: their indices among all of the run. seed: of this run and this life of the actor; environments draw
    from it and their own index, whichever actor they belong to.
    decide: asked for every step; by default the method's `act` on this actor's own network.
    watch: `role().watch` or the like, so that an environment that hangs is found and named. timeout: seconds that to
    make the environments, a reset or a step may take; None: as long as they like.
    """

    def __init__(
        self,
        method: Method,
        net: nn.Module,
        env: Env,
        environments: range,
        num_steps: int,
        seed: Sequence[int] = (0,),
        rank: int = 0,
        decide: Decide | None = None,
        watch: Callable[[str, float | None, str], Beat] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.method, self.net, self.num_steps, self.version = method, net, num_steps, 0
        self._now = method  # with what its schedules give
        self._decide = decide or self._act
        self._device = _device_of(net)
        self._rng = torch.Generator().manual_seed(_word((*seed, zlib.crc32(b"actor"), rank)))
        count = len(environments)
        rollout = method.example(net, env.spec, num_steps, count)
        rollout.environment.copy_(torch.arange(environments.start, environments.stop))
        rollout.rank.fill_(rank)
        self._rollout, self._rows = rollout, _by_step(rollout.observation, num_steps + 1)
        self._written = [leaf.numpy() for leaf in _leaves(rollout.observation)]
        self._count = count
        self._memory = self._fresh = method.initial_memory(net, count)
        self._ended = np.zeros(count, np.bool_)  # in the row before the next one
        self._limit = env.spec.shortest_truncation  # None: the row after an end only resets
        self._discount, self._discounted = method.return_discount, np.zeros(count)
        self._returns, self._lengths = np.zeros(count), np.zeros(count, np.int64)  # of the running episodes
        span = f"environments {environments.start} to {environments.stop - 1}"
        if watch is not None:
            watch(f"making {span}", timeout, ADVICE)()
        self._env: VectorEnv = env.make(environments)
        self._watched: Beat | None = None
        self._apart = isinstance(self._env, CheckedVectorEnv) and self._env.apart
        if watch is not None:
            doing = (
                "environment {} (episode {}, step {}, seed {})" if self._apart else f"{span} (row {{}} of rollout {{}})"
            )
            self._watched = watch(f"stepping {doing}", timeout, ADVICE)
            if self._apart:
                self._env.beat = self._watched  # type: ignore[attr-defined]
            else:
                self._watched(0, 0)
        self._last = [leaf.copy() for leaf in _leaves(self._env.reset(_word(seed)))]  # observed, not acted on yet
        if self._watched is not None:
            self._watched.idle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._env.close()

    def load(self, weights: Weights, version: int | None = None, at_least: int | None = None) -> Note:
        """Act from now on with these weights, and with what the method's schedules give there."""
        note = weights.pull(self.net, version, at_least)
        self.heed(note)
        return note

    def heed(self, note: Note) -> None:
        """Act from now on as of this version and share of the run, with the network as it is."""
        self.version = note.values.get("updates", note.version)  # where versions of the weights count something else
        self._now = self.method.anneal(note.values.get("progress", 0.0))

    def rollout(self, sequence: int = 0, stop: Callable[[int], bool] | None = None) -> Rollout:
        """The next T steps of all environments, numbered `sequence`: views that the next call overwrites.

        stop: asked after each step with how many there are; true ends the rollout there. The rows that it lacks are not
        valid, and of version −1.
        """
        rollout, method, made = self._rollout, self._now, self.num_steps
        reward, terminated, truncated = (
            held.numpy() for held in (rollout.reward, rollout.terminated, rollout.truncated)
        )
        written, single = self._written[0], isinstance(self._rows[0], Tensor)
        beat = None if self._apart else self._watched
        # Where nobody else is asked: past two calls that only pass on.
        own = self._device is None and self._decide == self._act
        decide = partial(method.act, self.net) if own else self._decide
        actions: list[Tree] = []
        log_probs: list[Tensor] = []
        logits: list[Tensor] = []  # of a method that gives these instead
        resets = self._ended
        with torch.inference_mode():
            memory = self._memory
            if memory is not None:
                _map(Tensor.copy_, rollout.memory, memory)
            if rollout.final_step is not None:
                rollout.final_step.fill_(-1)
            noise = _by_step(method.noise(self.net, self.num_steps, self._count, self._rng), self.num_steps)
            for held, leaf in zip(self._written, self._last, strict=True):
                held[0] = leaf
            for step, row in enumerate(self._rows[:-1]):
                decision = decide(row, memory, noise[step])
                action = decision.action if decision.environment_action is None else decision.environment_action
                if beat is not None:
                    beat(step, sequence)
                observation, reward[step], terminated[step], truncated[step] = self._env.step(_numpy(action))
                if single:
                    written[step + 1] = observation
                else:
                    for held, leaf in zip(self._written, _leaves(observation), strict=True):
                        held[step + 1] = leaf
                actions.append(decision.action)
                if decision.log_prob is not None:
                    log_probs.append(decision.log_prob)
                elif decision.logits is not None:
                    logits.append(decision.logits)
                if self._limit is not None:
                    self._keep_final(step, truncated[step] & ~terminated[step])
                if decision.memory is not None:  # forgotten where the next row begins an episode
                    ended = terminated[step] | truncated[step]
                    memory = self._forget(decision.memory, resets if self._limit is None else ended)
                    resets = ended
                if stop is not None and stop(step + 1):
                    made = step + 1
                    break
            whole, rollout = rollout, rollout if made == self.num_steps else rollout.at(T=slice(0, made))
            for held, *column in zip(_leaves(rollout.action), *map(_leaves, actions), strict=True):
                torch.stack(column, out=held)
            if rollout.log_prob is not None:
                if log_probs:
                    torch.stack(log_probs, out=rollout.log_prob)
                else:
                    rollout.log_prob.copy_(self._log_prob(torch.stack(logits), rollout.action))
        if self._watched is not None:
            self._watched.idle()
        self._memory = memory
        self._last = [held[made].copy() for held in self._written]
        ended = (terminated | truncated)[:made]
        self._account(rollout, ended)
        if rollout.discounted_return is not None:
            self._discount_returns(rollout, ended)
        rollout.version.fill_(self.version)
        rollout.sequence.fill_(sequence)
        if made < self.num_steps:
            self._pad(made)
        return whole

    def _pad(self, made: int) -> None:
        """Fill the rows that a rollout of so many lacks: nothing in them counts, and all of it is finite."""
        rest = self._rollout.at(T=slice(made, self.num_steps))
        for held in self._written:
            held[made + 1 :] = held[made]
        rows = (rest.log_prob, rest.reward, rest.terminated, rest.truncated, rest.valid)
        for leaf in (*_leaves(rest.action), *rows, rest.episode_return, rest.episode_length):
            if leaf is not None:
                leaf.zero_()
        rest.version.fill_(-1)

    def _act(self, observation: Tree, memory: Tree | None, noise: Tree) -> Decision:
        return _decide(self._now, self.net, self._device, observation, memory, noise)

    def _log_prob(self, logits: Tensor, action: Tree) -> Tensor:
        """Of all steps [T, B] at once: what that takes a step costs more than all of them together."""
        if self._device is not None:
            logits, action = (_map(lambda leaf: leaf.to(self._device), tree) for tree in (logits, action))
        return self._now.log_prob(self.net, logits, action)

    def _forget(self, memory: Tree, where: np.ndarray[Any, Any]) -> Tree:
        """The memory, fresh in these environments."""
        if not where.any():
            return memory
        rows = torch.from_numpy(where)

        def chosen(held: Tensor, fresh: Tensor) -> Tensor:
            return torch.where(rows.to(held.device).view(-1, *[1] * (held.ndim - 1)), fresh, held)

        return _map(chosen, memory, self._fresh)

    def _keep_final(self, step: int, truncated: np.ndarray[Any, Any]) -> None:
        """Keep what these episodes [B] ended with, which no row shows."""
        if not truncated.any():
            return
        held = self._rollout.final_step
        assert held is not None
        lines = held.numpy()
        for column in np.flatnonzero(truncated):
            free = np.flatnonzero(lines[:, column] < 0)
            if not free.size:
                raise ConfigError(
                    f"environment {int(self._rollout.environment[column])} truncated more episodes than fit into "
                    f"{self.num_steps} steps; its spec says shortest_truncation={self._limit}. Give a lower one."
                )
            lines[free[0], column] = step
            finals = _leaves(self._env.final_observation())
            for kept, leaf in zip(_leaves(self._rollout.final_observation), finals, strict=True):
                kept.numpy()[free[0], column] = leaf[column]

    def _discount_returns(self, rollout: Rollout, ended: np.ndarray[Any, Any]) -> None:
        """Tell the running discounted returns before the first row, and go on to those after the last."""
        assert self._discount is not None
        assert rollout.discounted_return is not None
        before = rollout.discounted_return.numpy()
        # After a reward that was not finite, whose batch a learner may leave out, the sum begins anew.
        before[:] = running = np.nan_to_num(self._discounted, nan=0.0, posinf=0.0, neginf=0.0)
        for reward, end in zip(rollout.reward.numpy(), ended, strict=True):
            running = np.where(end, 0.0, self._discount * running + reward)
        self._discounted = running

    def _account(self, rollout: Rollout, ended: np.ndarray[Any, Any]) -> None:
        """Fill in what follows from where episodes ended [T, B]: valid rows, steps, returns and lengths."""
        valid = rollout.valid.numpy()
        if self._limit is None:
            np.logical_not(self._ended, out=valid[0])
            np.logical_not(ended[:-1], out=valid[1:])
        else:
            valid.fill(True)
        np.sum(valid, 0, out=rollout.env_steps.numpy())
        self._ended = ended[-1]
        returns, lengths = rollout.episode_return.zero_().numpy(), rollout.episode_length.zero_().numpy()
        reward, counted = rollout.reward.numpy().astype(np.float64), valid.astype(np.int64)
        reward[0] += self._returns
        counted[0] += self._lengths
        # Column after column as pieces, one for each episode or part of one. Each is summed by itself: what is not
        # finite in one does not reach the next.
        rows, ends = len(ended), ended.T.ravel()
        begins = np.append(True, ends[:-1])
        begins[::rows] = True
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(ends)) - 1
        done, (column, row) = ends[last], np.divmod(last, rows)
        at_end = row == rows - 1  # one in each column, in order
        for running, told, values in ((self._returns, returns, reward), (self._lengths, lengths, counted)):
            sums = np.add.reduceat(values.T.ravel(), first)
            told[row[done], column[done]] = sums[done]
            running[:] = np.where(done, 0, sums)[at_end]
        for held, running in ((rollout.running_return, self._returns), (rollout.running_length, self._lengths)):
            if held is not None:
                held.numpy()[:] = running


def evaluate(
    method: Method, net: nn.Module, env: Env, episodes: int, seed: int = 0, max_steps: int | None = None
) -> np.ndarray[Any, Any]:
    """The raw returns of so many fresh episodes, one in each of as many environments, acting greedily.

    The network and the environments of training are left alone: these have seeds of their own.
    max_steps: of an episode; Stalled is raised where one is longer. None: as long as they like.
    """
    stepped = env.make(range(episodes))
    try:
        memory = method.initial_memory(net, episodes)
        returns, running = np.zeros(episodes), np.ones(episodes, np.bool_)
        observation, device = stepped.reset(_word((seed, zlib.crc32(b"evaluation")))), _device_of(net)
        with torch.inference_mode():
            step = 0
            while running.any():
                if step == max_steps:
                    raise Stalled(
                        f"{running.sum()} of {episodes} episodes of the evaluation had not ended after {step:,} steps. "
                        "Give the environment a time limit, or a higher max_steps."
                    )
                seen = _map(lambda leaf: torch.from_numpy(np.array(leaf)), observation)
                decision = _decide(method, net, device, seen, memory, None)
                memory = decision.memory
                action = decision.action if decision.environment_action is None else decision.environment_action
                observation, reward, terminated, truncated = stepped.step(_numpy(action))
                returns += reward * running
                running &= ~(terminated | truncated)
                step += 1
        return returns
    finally:
        stepped.close()


def _decide(
    method: Method, net: nn.Module, device: torch.device | None, observation: Tree, memory: Tree | None, noise: Tree
) -> Decision:
    """The method's choice on the network's device, for and from the host; the memory stays on the device."""
    if device is None:
        return method.act(net, observation, memory, noise)
    observation, noise = (_map(lambda leaf: leaf.to(device), tree) for tree in (observation, noise))
    decision = method.act(net, observation, memory, noise)
    return decision.to("cpu").replace(memory=decision.memory)


def _device_of(net: nn.Module) -> torch.device | None:
    """Where the network is, if that is not the host."""
    device = next(iter(net.parameters()), torch.empty(0)).device
    return None if device.type == "cpu" else device


def _word(entropy: Sequence[int]) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


def _leaves(tree: Tree) -> list[Any]:
    """The arrays or tensors of a tree."""
    if isinstance(tree, Tensor | np.ndarray):  # the common case, at each step
        return [tree]
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def _numpy(action: Tree) -> Tree:
    return action.numpy() if isinstance(action, Tensor) else _map(Tensor.numpy, action)


def _map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    return optree.tree_map(function, tree, *others, namespace=NAMESPACE)


def _by_step(tree: Tree, num_steps: int) -> list[Tree]:
    """A tree [T, ...] as T trees."""
    if isinstance(tree, Tensor):
        return list(tree.unbind())
    leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    columns = [leaf.unbind() for leaf in leaves]
    return [structure.unflatten([column[step] for column in columns]) for step in range(num_steps)]
