"""Send a run's curves to a tracker of others beside TensorBoard: W&B without the network, or trackio.

Neither package is a dependency. A coordinator that starts opens a tracked run of its own and sends it all
curves from the first step, so the newest one of the group is complete whatever was killed before. An error
of the package is one warning and ends the tracking: no training fails for its curves.
"""

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from hpc_swe.base.metrics import Tail
from hpc_swe.base.rundir import RunDir

Tracker = Literal["", "wandb", "trackio"]
FOLDERS = {"wandb": "WANDB_DIR", "trackio": "TRACKIO_DIR"}
"""Package -> the variable that says where it keeps what it is sent."""

log = logging.getLogger(__name__)


class Tracking:
    """Forward each line of the logs once."""

    def __init__(self, run: RunDir, package: str, run_id: str, settings: Mapping[str, Any]) -> None:
        self._package, self._tail = package, Tail(run.metrics)
        self._send: Callable[..., object] | None = None
        with self._until_it_fails():
            self._send = _opened(run, package, run_id, settings)

    def update(self) -> None:
        """Send what was logged since the last update."""
        if self._send is None:
            return
        try:
            lines = sorted(self._tail.new_lines(), key=lambda line: line.step)
        except OSError as error:
            log.warning("not tracked: %s", error)
            return
        with self._until_it_fails():
            for line in lines:
                if self._package == "trackio":
                    self._send(line.values, step=line.step)
                else:
                    self._send({**line.values, "step": line.step})

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  a package may fail in any way
            self._send = None
            log.warning("tracking ended by %s: %s: %s", self._package, type(error).__name__, error)


def _opened(run: RunDir, package: str, run_id: str, settings: Mapping[str, Any]) -> Callable[..., object]:
    """Open a tracked run, and return what sends a line to it."""
    folder = run.tracked / package
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDERS[package]] = str(folder)
    for variable, value in (("WANDB_MODE", "offline"), ("WANDB_CONSOLE", "off")):
        os.environ.setdefault(variable, value)
    tracker: Any = importlib.import_module(package)
    name = f"{run_id}-{time.time_ns() // 10**9}"
    tracker.init(project="hpc_swe", name=name, group=run_id, config=dict(settings))
    if package == "wandb":  # it drops lines whose step is below that of another process's line
        tracker.define_metric("*", step_metric="step")
    send: Callable[..., object] = tracker.log
    return send
