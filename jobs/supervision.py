"""Obey verdicts about the processes of a job, and watch the coordinator, on behalf of their watchdog.

The coordinator finds stuck parts of the run and publishes verdicts; the watchdog of a process, its parent,
acts on those that name it. The coordinator's own watchdog finds a coordinator whose main loop stands still.
A thread reads the run folder, so a file system that hangs does not keep the watchdog from its other duties.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from hpc_swe.base.errors import CorruptRecord, HpcSweError
from hpc_swe.base.records import Node
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, orders, supervision
from hpc_swe.base.store.supervision import Clocks, RunPart, StuckProcess, Verdict
from hpc_swe.cluster.executors.base import own_job_id
from hpc_swe.config.settings import RunConfig
from jobs import stacks

MOST_FILES = 8  # processes of one verdict that write their stacks
WRITE_S = 20.0
LONGEST_LOOK_S = 60.0
CLEAN_UP_S = 60.0  # a child that is not stuck ends so soon after it has seen the order

log = logging.getLogger(__name__)


class VerdictReader:
    """Read the run's verdicts in a thread, and find those about the processes of this job."""

    def __init__(
        self, run: RunDir, role: str, config: RunConfig, is_on_one_node: bool, clean_up_s: float = CLEAN_UP_S
    ) -> None:
        self._run, self._config, self._role, self._clean_up_s = run, config, role, clean_up_s
        self._mark = "" if is_on_one_node else f"-{own_job_id()}-"  # in the owners of all nodes of this job
        self._children: Collection[int] = ()
        self._latest: Verdict | None = None
        self._own: Verdict | None = None
        """Our verdict about the coordinator."""
        self._obeyed: int | None = None
        """Number of the last verdict that needs nothing more; None before the first look."""
        self._clocks = Clocks(supervision.LONGEST_LOOK_BEATS * config.lease.beat_s)
        self._ends_at: float | None = None
        if config.supervision.stuck_s:
            threading.Thread(target=self._read_on, name="verdicts", daemon=True).start()

    def about(self, children: Collection[int]) -> Verdict | None:
        """Return a new verdict about one of the children, once."""
        self._children = children
        for verdict in filter(None, (self._own, self._latest)):
            is_new = self._obeyed is not None and verdict.number > self._obeyed
            if is_new and any(self._is_ours(process) for process in verdict.processes):
                self._obeyed = verdict.number
                log.error("%s", verdict.message(self._config.max_restarts))
                return verdict
        return None

    @property
    def is_run_over(self) -> bool:
        """Return whether the run ended, or was ordered to stop, so long ago that a child must be stuck."""
        return self._ends_at is not None and time.monotonic() > self._ends_at

    def record(self, verdict: Verdict) -> None:
        """Publish a verdict of our own, once the coordinator is dead: it might wake up and write another.

        A coordinator that is given up can order no stop, so its watchdog does.
        """
        if verdict is self._own:
            _in_time(lambda: supervision.publish(self._run, verdict))
        if verdict.gave_up and self._role == "coordinator":
            _in_time(lambda: atomic.write(self._run.stop, b""))

    def write_stacks(self, verdict: Verdict, folder: Path) -> None:
        """Write the stacks of the children into the run folder, and give up when that takes too long."""
        ours = [process for process in verdict.processes[:MOST_FILES] if self._is_ours(process)]
        if not ours:
            return
        text = f"{verdict.reason}\n\n{stacks.collect(list(self._children), folder)}".encode()
        path = self._run.stack(verdict.number, ours[0].owner)
        _in_time(lambda: _write(path, text))

    def _is_ours(self, process: StuckProcess) -> bool:
        if self._mark and self._mark in process.owner:
            return True
        return process.host == socket.gethostname() and process.pid in self._children

    def _read_on(self) -> None:
        # A look counts no more than the longest pause that `Clocks` believes.
        longest_s = min(LONGEST_LOOK_S, supervision.LONGEST_LOOK_BEATS * self._config.lease.beat_s)
        pause_s = min(self._config.supervision.stuck_s / 8, longest_s)
        while True:
            try:
                self._latest = supervision.read(self._run)
                # The number falls when the cell was lost, or when our own verdict could not be written.
                number = self._latest.number
                self._obeyed = number if self._obeyed is None else min(self._obeyed, number)
                if not {"STOP", "FINISHED"} & {*orders.active(self._run)}:
                    self._ends_at = None
                elif self._ends_at is None:
                    self._ends_at = time.monotonic() + self._config.supervision.stuck_s + self._clean_up_s
                if self._role == "coordinator":
                    self._watch_coordinator()
            except (HpcSweError, OSError) as error:
                log.warning("looking again for verdicts: %s", error)
            time.sleep(pause_s)

    def _watch_coordinator(self) -> None:
        """Publish a verdict about our coordinator when its main loop stands still."""
        names = [name for name in atomic.names(self._run.nodes) if name.startswith("coordinator-")]
        cells: list[Node] = []
        for name in names:
            with contextlib.suppress(FileNotFoundError, CorruptRecord):  # not ours: it ended, or died
                cells.append(atomic.get(self._run.nodes / name, Node))
        ours = [n for n in cells if n.host == socket.gethostname() and n.pid in self._children]
        reason = "the main loop of the coordinator stands still"
        limit_s = self._config.supervision.stuck_s
        parts = [RunPart(n.owner, n.role, [n], str(n.loops), reason, limit_s) for n in ours]
        self._clocks.look(parts, time.monotonic())
        if stuck := supervision.find_stuck(parts, self._clocks.still):
            found = [StuckProcess(owner=n.owner, host=n.host, pid=n.pid) for n in stuck[0].nodes]
            self._clocks.restart()
            before = supervision.read(self._run)
            self._own = supervision.following(before, "coordinator", found, reason, self._config.max_restarts)


def _write(path: Path, text: bytes) -> None:
    with atomic.storage(path.parent):
        path.parent.mkdir(exist_ok=True)
    atomic.write(path, text)


def _in_time(write: Callable[[], None]) -> None:
    """Write in a thread, and go on without the result when the file system refuses or takes too long."""

    def run() -> None:
        try:
            write()
        except (HpcSweError, OSError) as error:
            log.warning("not written: %s", error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WRITE_S)
