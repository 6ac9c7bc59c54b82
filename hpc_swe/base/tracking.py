"""Send a run's curves to a tracker of others beside TensorBoard: W&B without the network, or trackio.

Neither package is a dependency. A coordinator that starts opens a tracked run of its own and sends it all
curves from the first step, so the newest one of the group is complete whatever was killed before.
"""

import importlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

from hpc_swe.base.errors import StorageError
from hpc_swe.base.metrics import Tail
from hpc_swe.base.rundir import RunDir

Tracker = Literal["", "wandb", "trackio"]
FOLDERS = {"wandb": "WANDB_DIR", "trackio": "TRACKIO_DIR"}
"""Package -> the variable that says where it keeps what it is sent."""

log = logging.getLogger(__name__)


class Tracking:
    """Forward each line of the logs once."""

    def __init__(self, run: RunDir, package: str, run_id: str, settings: Mapping[str, Any]) -> None:
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
        self._send, self._is_stepped = tracker.log, package == "trackio"
        self._tail = Tail(run.metrics)

    def update(self) -> None:
        """Send what was logged since the last update."""
        try:
            for line in sorted(self._tail.new_lines(), key=lambda line: line.step):
                if self._is_stepped:
                    self._send(line.values, step=line.step)
                else:
                    self._send({**line.values, "step": line.step})
        except (OSError, StorageError) as error:
            log.warning("not tracked: %s", error)
