"""Weights & Biases beside the run folder, in a thread of its own that training never waits for."""

from __future__ import annotations

import importlib.util
import netrc
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from headrace.errors import ConfigError

__all__ = ["Tracker", "check_tracking"]

WAITING = 1_000  # rows that wait to be sent, at most
PATIENCE = 10.0  # seconds to send the rest at the end of a run


def check_tracking() -> None:
    """Raises ConfigError unless wandb is installed."""
    if "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            'tracking needs wandb, which is not installed. pip install "headrace[track]", or leave --track out.'
        )


class Tracker:
    """Sends rows to a W&B run: online where somebody has logged in, else offline into the run's folder.

    WANDB_MODE, if set, decides instead. Nothing is asked, and nothing here raises or waits: what fails is said once.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._folder, self._config, self._say = folder, dict(config), say
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(WAITING)
        self._failure: str | None = None
        self._told = False
        self._thread = threading.Thread(target=self._send, name="headrace-wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send these values, some time."""
        self._tell()
        if self._failure is None and values:
            try:
                self._rows.put_nowait((step, dict(values)))
            except queue.Full:
                self._failure = f"{WAITING} rows wait to be sent; it does not answer"
                self._tell()

    def close(self) -> None:
        """Wait until all is sent, for ten seconds at most."""
        if self._failure is None:
            with suppress(queue.Full):
                self._rows.put(None, timeout=PATIENCE)
            self._thread.join(PATIENCE)
        if self._thread.is_alive() and self._failure is None:
            self._failure = f"it did not finish within {PATIENCE:g} s"
        self._tell()

    def _tell(self) -> None:
        if self._failure is not None and not self._told:  # by the thread of the run: views are not for several
            self._told = True
            self._say(f"W&B: {self._failure}. Training goes on without it; the run folder has everything.")

    def _send(self) -> None:
        try:
            import wandb

            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "headrace"),
                name=self._folder.name,
                id=self._folder.name[-128:],
                resume="allow",
                dir=str(self._folder),
                config=self._config,
                settings={"silent": True, "console": "off"},  # a terminal belongs to the view
                mode=os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline"),
            )
            while (row := self._rows.get()) is not None:
                run.log(row[1], step=row[0])
            run.finish()
        except Exception as error:  # of somebody else's program, of any kind
            self._failure = f"{type(error).__name__}: {error}"


def _logged_in() -> bool:
    """Whether there is a key for W&B's server, so that it asks nobody for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
