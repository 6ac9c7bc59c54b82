"""Run the coordinator. Each iteration takes a snapshot of the run, does the mode's work, and cleans up.

consumes      nodes/, control/, and what the mode consumes
produces      state/endpoints.json, state/status.json, what the mode produces, and at last control/FINISHED
waits for     the mode's work to be done
unblocked by  time: it never blocks on anything

It has no state that is not in the run folder. When the file system refuses a write, or this process may have
been frozen, the mode is built again from the folder, exactly as after a restart, so there is only one way to
recover. Two coordinators do no harm: they write the same requests, and the one that loses the race for a
batch exits.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from hpc_swe.base.errors import DeadlineError, StorageError
from hpc_swe.base.records import Role, RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, orders
from hpc_swe.base.tracking import Tracking
from hpc_swe.config.settings import STATUS_LOOKS, WAIT_S
from hpc_swe.roles.coordinator.maintenance import Maintenance
from hpc_swe.roles.coordinator.snapshot import Progress, RunSnapshot
from hpc_swe.roles.coordinator.supervision import Supervision

if TYPE_CHECKING:
    from hpc_swe.base.drawing import Drawing

BACK_OFF_S = 300.0  # longest pause after the file system refused a write

log = logging.getLogger(__name__)


class Mode(Protocol):
    """Do the work of one mode: Training, Evaluating, WarmStart or ArchiveReplay."""

    def iterate(self, snapshot: RunSnapshot) -> Progress:
        """Do what can be done now, without waiting."""


class Coordinator:
    """Iterate until the mode has finished or an order ends the run.

    `mode` builds the mode from the run folder; it is called again after a refused write and after a
    freeze. `supervision` looks for parts of the run that make no progress; without it nobody does.
    """

    def __init__(
        self,
        run: RunDir,
        maintenance: Maintenance,
        mode: Callable[[], Mode],
        poll_s: float,
        desired: Mapping[Role, int],
        supervision: Supervision | None = None,
    ) -> None:
        self._run, self._maintenance, self._poll_s, self._desired = run, maintenance, poll_s, desired
        self._build_mode, self._supervision = mode, supervision
        self._mode: Mode | None = None
        self._drawings = drawings(run)
        self._draw_at = float("-inf")
        self._progress: tuple[object, float] = (None, 0.0)
        self._ended_at = float("inf")
        """When the last iteration ended, on the maintenance's clock."""
        self._is_late = False
        """The last iteration took longer than a lease lives."""

    def work(self) -> None:
        """Iterate until the work is done or an order says to end; after DRAIN until no rollout worker lives.

        Raise LostRace if another coordinator is running, DeadlineError if nothing changed for too long
        although other processes are alive, and StuckRun if a part of the run is stuck after all its restarts.
        """
        refusals = 0
        while True:
            if self._supervision:
                self._supervision.lease.turn()
            try:
                with atomic.storage(self._run.root):
                    if self._turn():
                        return
                refusals = 0
            except StorageError as error:
                self._mode = None
                refusals += 1
                log.warning("refused %d times: %s", refusals, error)
            pause = min(self._poll_s * 2**refusals, max(self._poll_s, BACK_OFF_S))
            time.sleep(pause * random.uniform(0.5, 1.5))

    def _turn(self) -> bool:
        """Run one iteration, or after DRAIN list the engines for workers; return True when all is done."""
        if not (ordered := orders.active(self._run)):
            return self.iterate()
        return ordered != [self._run.drain.name] or not self._maintenance.list_for_drain()

    def iterate(self) -> bool:
        """Run one iteration; return True when all work is done."""
        snapshot = self._maintenance.snapshot()
        if self._mode is None or self._maintenance.is_outdated(self._ended_at):
            self._mode = self._build_mode()
        self._maintenance.list_new_weights(snapshot)
        progress = self._mode.iterate(snapshot)
        self._ended_at = self._maintenance.now
        may_have_frozen = self._may_have_frozen(snapshot)
        if self._is_late:
            snapshot = self._maintenance.snapshot()
        status_s = STATUS_LOOKS * self._poll_s if progress.waits_for else 0.0
        self._maintenance.publish(snapshot, progress, self._desired, status_s)
        if not may_have_frozen:
            self._maintenance.clean_up(snapshot, progress.kept_steps)
        if not progress.waits_for or snapshot.now >= self._draw_at:
            for drawing in self._drawings:
                drawing.update()
            self._draw_at = snapshot.now + STATUS_LOOKS * self._poll_s
        if not progress.waits_for and not may_have_frozen:
            atomic.write(self._run.finished, b"")
            log.info("finished")
            return True
        if self._supervision:
            self._supervision.look(snapshot, progress)
        self._check_progress(snapshot, progress)
        return False

    def _may_have_frozen(self, snapshot: RunSnapshot) -> bool:
        """Return whether this iteration was late; a second late one in a row shows that it is slow."""
        was_late, self._is_late = self._is_late, self._maintenance.is_outdated(snapshot.now)
        if is_suspect := self._is_late and not was_late:
            self._mode = None
        return is_suspect

    def _check_progress(self, snapshot: RunSnapshot, progress: Progress) -> None:
        """Fail when nothing changed for `WAIT_S`, not counting time in which others are absent.

        They may be queued for days. Supervision comes first, since it restarts one part and knows which: its
        limit is added to `WAIT_S`, and each of its restarts is a change.
        """
        verdicts, longest_s = 0, 0.0
        if self._supervision:
            verdicts, longest_s = self._supervision.verdicts, self._supervision.longest_s
        state = (snapshot.scan, snapshot.newest, snapshot.learner_step, progress.step, verdicts)
        present = {node.role for node in snapshot.nodes} - {"coordinator"}
        brings_engines = "inference" in self._desired.keys() - present  # of a hybrid run, in its own job
        is_idle = not (progress.awaits_learner or brings_engines)
        idle = {"coordinator", "learner"} if is_idle else {"coordinator"}
        awaited = {role for role, count in self._desired.items() if count} - idle
        if state != self._progress[0] or not present or awaited - present:
            self._progress = (state, snapshot.now)
        unchanged_s = snapshot.now - self._progress[1]
        if unchanged_s > longest_s + WAIT_S:
            alive = ", ".join(sorted({node.owner for node in snapshot.nodes if node.role != "coordinator"}))
            raise DeadlineError(
                f"nothing changed for {unchanged_s:.0f} s (supervision's limit, then {WAIT_S:g} s); it "
                f"waits for {progress.waits_for}; alive: {alive}; see their logs in {self._run.root / 'logs'}"
            )


def drawings(run: RunDir) -> list["Drawing | Tracking"]:
    """Return what draws the run's curves: TensorBoard, unless it is not installed, and the tracker."""
    found: list[Drawing | Tracking] = []
    try:
        from hpc_swe.base import drawing

        found.append(drawing.Drawing(run))
    except ImportError as error:
        log.warning("no curves: %s; pip install tensorboard into the environment of jobs", error)
    settings = msgspec.json.decode(atomic.read(run.config)) if run.config.exists() else {}
    if package := settings.get("tracker"):
        found.append(Tracking(run, package, atomic.get(run.manifest, RunManifest).run_id, settings))
    return found
