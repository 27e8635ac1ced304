"""going_on.py METHOD FOLDER K…: goes on from the checkpoint in FOLDER/K to 20 updates, for each K.

Prints {K: [SHA-256 of all state, metrics of each update]}.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

from headrace import A2C, DQN, PPO, Inline, Learner, SyncBatches, SyncReplay
from headrace.checkpoint import load
from headrace.envs.toy import Recall

BATCHES = SyncBatches(actors=2, num_envs=4, num_steps=5, max_lag=1)
REPLAY = SyncReplay(
    actors=2, num_envs=4, num_steps=5, max_lag=1, ratio=0.5, batch_size=8, buffer_size=160, learning_starts=40
)
METHODS = {
    "ppo": (PPO(hidden=(8,), num_minibatches=2, memory="gru", normalize_observation=True, anneal_lr=True), BATCHES),
    "a2c": (A2C(hidden=(8,), memory="gru", normalize_reward=True), BATCHES),
    "dqn": (DQN(hidden=(8,), n_step=2, prioritized_replay_alpha=0.5, target_update_interval=4), REPLAY),
}


def digest(tree):
    """The SHA-256 of a tree of dicts, lists, tensors and numbers."""
    sha = hashlib.sha256()

    def add(value):
        if isinstance(value, dict):
            value = list(value.items())
        if isinstance(value, list | tuple):
            sha.update(f"{len(value)}".encode())
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            sha.update(f"{value.dtype}{value.shape}".encode() + value.contiguous().numpy().tobytes())
        else:
            sha.update(repr(value).encode())

    add(tree)
    return sha.hexdigest()


def learned(name, updates, state=None):
    """Learn up to so many updates: the snapshot there, its digest, and the metrics of each update."""
    env, (method, plan) = Recall(length=4), METHODS[name]
    learner = Learner(method, env.spec, seed=1)
    metrics = []
    reports = plan.run(learner, env, Inline(), env_steps=500, state=state)
    for report in reports:
        metrics.append(dict(report.metrics))
        if report.version == updates and not report.more:
            snapshot = report.snapshot()
            reports.close()
            return snapshot, digest(snapshot), metrics
    raise AssertionError(f"it ended after {len(metrics)} updates")


if __name__ == "__main__":
    _, name, folder, *stops = sys.argv
    found = {k: learned(name, 20, load(Path(folder) / k, expect={"method": name}))[1:] for k in stops}
    print(json.dumps(found))
