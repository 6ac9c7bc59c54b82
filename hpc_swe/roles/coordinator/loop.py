"""The coordinator: one look at the run a round, one round of its work, and the house kept in order.

consumes      nodes/, control/, and what its work consumes
produces      state/endpoints.json, state/status.json, what its work produces, and at last state/finished
waits for     its work to be done
unblocked by  time: it never blocks on anything

It holds no state that the run folder does not. When the file system refuses, its work is made anew
from the folder, exactly as after a restart: there is no second way back. Two coordinators do no harm:
they ask for the same, and whoever loses a batch leaves.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from hpc_swe.drawing import Drawing
from hpc_swe.errors import DeadlineError, StorageError
from hpc_swe.records import Role
from hpc_swe.roles.coordinator.maintenance import Maintenance, Progress, RunSnapshot
from hpc_swe.rundir import RunDir
from hpc_swe.settings import CoordinatorConfig
from hpc_swe.store import atomic

BACK_OFF_S = 300.0  # longest pause after refusals of the file system

log = logging.getLogger(__name__)


class Mode(Protocol):
    """The work of one mode: Training, Evaluating or WarmStart."""

    def iterate(self, snapshot: RunSnapshot) -> Progress:
        """Do what can be done now, without waiting."""


class Coordinator:
    """Runs `mode`, made anew from the run folder at need, until it is done or a person orders an end."""

    def __init__(
        self,
        run: RunDir,
        maintenance: Maintenance,
        mode: Callable[[], Mode],
        config: CoordinatorConfig,
        desired: Mapping[Role, int],
    ) -> None:
        self._run, self._maintenance, self._config, self._desired = run, maintenance, config, desired
        self._make = mode
        self._mode: Mode | None = None
        self._drawing = Drawing(run)
        self._draw_at = float("-inf")
        self._progress: tuple[object, float] = (None, 0.0)

    def work(self) -> None:
        """Until all is done.

        Raises:
            LostRace: Another coordinator is at work.
            DeadlineError: Nothing moved for `wait_s` although others live.
        """
        refusals = 0
        while True:
            try:
                with atomic.storage(self._run.root):
                    if self._is_over() or self.iterate():
                        return
                refusals = 0
            except StorageError as error:
                self._mode = None
                refusals += 1
                log.warning("refused %d times: %s", refusals, error)
            pause = min(self._config.poll_s * 2**refusals, max(self._config.poll_s, BACK_OFF_S))
            time.sleep(pause * random.uniform(0.5, 1.5))

    def iterate(self) -> bool:
        """One look and one round; True when all is done."""
        snapshot = self._maintenance.snapshot()
        if self._mode is None:
            self._mode = self._make()
        progress = self._mode.iterate(snapshot)
        status_s = self._config.status_s if progress.waits_for else 0.0
        self._maintenance.publish(snapshot, progress, self._desired, status_s)
        self._maintenance.clean_up(snapshot)
        if snapshot.now >= self._draw_at:
            self._drawing.update()
            self._draw_at = snapshot.now + self._config.status_s
        if not progress.waits_for:
            self._drawing.update()
            atomic.write(self._run.finished, b"")
            log.info("finished")
            return True
        self._check_progress(snapshot, progress)
        return False

    def _is_over(self) -> bool:
        return any(path.exists() for path in (self._run.drain, self._run.stop, self._run.finished))

    def _check_progress(self, snapshot: RunSnapshot, progress: Progress) -> None:
        """A peer that lives and does nothing for so long is a fault; without peers, only time can tell."""
        seen = (snapshot.scan, snapshot.newest, snapshot.learner_step, progress.step)
        if seen != self._progress[0] or all(node.role == "coordinator" for node in snapshot.nodes):
            self._progress = (seen, snapshot.now)
        silent_s = snapshot.now - self._progress[1]
        if silent_s > self._config.wait_s:
            alive = ", ".join(sorted({node.owner for node in snapshot.nodes if node.role != "coordinator"}))
            raise DeadlineError(
                f"nothing moved for {silent_s:.0f} s (coordinator.wait_s); waits for {progress.waits_for}; "
                f"alive: {alive}; see their logs under {self._run.root / 'logs'}"
            )
