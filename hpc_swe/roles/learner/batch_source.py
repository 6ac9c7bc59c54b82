"""What comes in between two steps: orders, signals, the next batch.

Rank 0 alone looks, and its verdict is broadcast with the step: ranks that looked for themselves could
see an order at different steps, and would then wait for one another for ever.
"""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from hpc_swe.errors import DeadlineError, HpcSweError
from hpc_swe.records import Batch, BatchManifest, StatusReport
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic, folders

PULSE_S = 30.0  # the other ranks hear from rank 0 at least this often

log = logging.getLogger(__name__)


class Order(Enum):
    """What all ranks do next."""

    TRAIN = auto()
    WAIT = auto()
    DRAIN = auto()
    """Save, and exit 0."""
    STOP = auto()
    """Exit now."""


@dataclass(frozen=True)
class NextBatch:
    """An order, and the batch to train."""

    order: Order
    manifest: BatchManifest | None = None


class BatchSource:
    """Rank 0's view of control/, signals and batches/."""

    def __init__(
        self,
        run: RunDir,
        wait_s: float,
        poll_s: float,
        interrupted: Callable[[], bool] = lambda: False,
        pulse_s: float = PULSE_S,
    ) -> None:
        self._run, self._wait_s, self._poll_s, self._interrupted = run, wait_s, poll_s, interrupted
        self._pulse_s = pulse_s
        self._since: float | None = None
        self._beat: int | None = None

    def look(self, step: int) -> NextBatch:
        """Wait for an order or the batch of `step`, but no longer than a pulse.

        Raises:
            DeadlineError: The coordinator lives, but has published no batch for `wait_s`.
        """
        until = time.monotonic() + self._pulse_s
        while True:
            upcoming = self._see(step)
            if upcoming is not None:
                self._since = None
                return upcoming
            self._check_deadline(step)
            if time.monotonic() >= until:
                return NextBatch(Order.WAIT)
            time.sleep(self._poll_s * random.uniform(0.5, 1.5))

    def _see(self, step: int) -> NextBatch | None:
        orders = {*atomic.names(self._run.control)}
        if {"STOP", "FINISHED"} & orders:
            return NextBatch(Order.STOP)
        if self._interrupted() or "DRAIN" in orders:
            return NextBatch(Order.DRAIN)
        try:
            return NextBatch(Order.TRAIN, folders.manifest(self._run.batch(step), BatchManifest))
        except FileNotFoundError:
            return None

    def _check_deadline(self, step: int) -> None:
        """A deadline fails only against a coordinator that lives; a dead one is waited for, aloud."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._beat = now, self._coordinator()[0]
        if now - self._since < self._wait_s:
            return
        beat, waits_for = self._coordinator()
        if beat == self._beat:
            log.warning("waiting for step %d: the coordinator is silent for %.0f s", step, self._wait_s)
            self._since = now
            return
        raise DeadlineError(
            f"no {self._run.batch(step)} for {self._wait_s:.0f} s; the coordinator, which publishes it, "
            f"waits for: {waits_for or 'it does not say'}"
        )

    def _coordinator(self) -> tuple[int | None, str]:
        try:
            report = atomic.get(self._run.status, StatusReport)
        except (OSError, HpcSweError):
            return None, ""  # no sign of life
        return report.beat, report.waits_for


def share(run: RunDir, manifest: BatchManifest, data_rank: int) -> Batch:
    """One data-parallel rank's part of a published batch."""
    folder, name = run.batch(manifest.step), run.rank_file(data_rank)
    return atomic.decode(folder / name, folders.read(folder, name, manifest), Batch)
