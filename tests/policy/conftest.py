"""Run folders as training writes them, without the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import Checkpoints, Env, Inline, Learner, Method, Spec, SyncBatches
from headrace.configuration import configuration
from headrace.spec_json import spec_to_json


class Shown(Env):
    """Environments of which only the spec is known."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    @property
    def spec(self) -> Spec:
        return self._spec

    def make(self, indices: range) -> Any:
        raise NotImplementedError


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., tuple[Path, Learner]]:
    """new_run(method, env or spec, change=…): a run's folder with a checkpoint of step 128, and the learner in it.

    change(net) alters the weights before they are saved. config: values that stand in config.json instead.
    """

    def make(
        method: Method, env: Env | Spec, change: Callable[[Any], None] | None = None, **config: Any
    ) -> tuple[Path, Learner]:
        env = Shown(env) if isinstance(env, Spec) else env
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        told = configuration(method, env, SyncBatches(), Inline(), {}, total_timesteps=1000, seed=3)
        (folder / "config.json").write_text(json.dumps({**told, **config}))
        (folder / "spec.json").write_text(json.dumps(spec_to_json(env.spec)))
        learner = Learner(method, env.spec, seed=3)
        if change is not None:
            change(learner.net)
        Checkpoints(folder / "checkpoints").save(128, {"learner": learner.state()})
        return folder, learner

    return make
