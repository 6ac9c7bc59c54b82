"""Decide what the ranks do next: obey an order or a signal, or train the next batch.

Rank 0 alone reads the run folder, and its decision is broadcast together with the step. Ranks that read it
themselves could see an order at different steps, and would then wait for one another for ever.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto

from hpc_swe.base.errors import DeadlineError, HpcSweError, StorageError
from hpc_swe.base.records import FILLER, Batch, BatchManifest, StatusReport
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders, orders, weights

PULSE_S = 30.0  # rank 0 sends the other ranks a decision at least this often
SILENT_PULSES = 20  # a silent coordinator is logged once in so many

log = logging.getLogger(__name__)


class Order(Enum):
    """List the orders that all ranks obey."""

    DRAIN = auto()
    """The run ends: save a checkpoint, publish a full version where the last one is a delta, exit with 0."""
    LEAVE = auto()
    """The scheduler takes the node: save a checkpoint, and exit with 0."""
    STOP = auto()
    """Exit now."""
    REPUBLISH = auto()
    """Publish the weights once more, as a full version: engines could not load the last one."""


Decision = BatchManifest | Order | None
"""The batch to train next, or an order; None while there is neither."""


class BatchSource:
    """Watch control/, signals and batches/ on rank 0."""

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
        self._beat: int | None = None
        self._silent = 0
        """Pulses in a row in which the coordinator's beat did not change."""
        self._waited_s = 0.0
        """Seconds of the wait for this batch in which the coordinator was alive."""
        self._republished = -1
        """The last step at which the weights were published once more."""

    def wait(self, step: int) -> Decision:
        """Wait for an order or for the batch of `step`; return None when neither came for `pulse_s`.

        Raise DeadlineError if the coordinator was alive for `wait_s`, but has published no batch.
        """
        until = time.monotonic() + self._pulse_s
        while (decision := self.look(step)) is None:
            if time.monotonic() >= until:
                self._check_deadline(step)
                return None
            time.sleep(self._poll_s * random.uniform(0.5, 1.5))
        self._silent, self._waited_s = 0, 0.0
        return decision

    def look(self, step: int) -> Decision:
        """Return the order or the batch that is there; None, too, when the file system refuses to say.

        All ranks would lose what they trained since the last checkpoint for a client that reconnects.
        """
        try:
            return self._look(step)
        except StorageError as error:
            log.warning("looking again: %s", error)
            return None

    def _look(self, step: int) -> Decision:
        active = orders.active(self._run)
        if "STOP" in active:
            return Order.STOP
        if "DRAIN" in active or "FINISHED" in active:  # a run may have ended early
            return Order.DRAIN
        if self._interrupted():
            return Order.LEAVE
        try:
            return folders.manifest(self._run.batch(step), BatchManifest)
        except FileNotFoundError:
            if step == self._republished or not weights.is_full_wanted(self._run):
                return None
            self._republished = step  # once: if engines refuse that one, too, the file is not at fault
            return Order.REPUBLISH

    def _check_deadline(self, step: int) -> None:
        """Count the time up to a new beat, but no long silence: it may be queued. Fail at the deadline."""
        before, (self._beat, waits_for) = self._beat, self._coordinator()
        if self._beat in (None, before):
            self._silent += 1
            if self._silent % SILENT_PULSES == 0:
                silent_s = self._silent * self._pulse_s
                log.warning("waiting for step %d: the coordinator is silent for %.0f s", step, silent_s)
            return
        alive = 1 + (self._silent if self._silent < SILENT_PULSES else 0)
        self._waited_s += alive * self._pulse_s
        self._silent = 0
        if self._waited_s >= self._wait_s:
            raise DeadlineError(
                f"no {self._run.batch(step)} for {self._wait_s:.0f} s; the coordinator, which publishes it, "
                f"waits for: {waits_for or 'nothing that it reports'}"
            )

    def _coordinator(self) -> tuple[int | None, str]:
        try:
            report = atomic.get(self._run.status, StatusReport)
        except (OSError, HpcSweError):
            return None, ""  # an unreadable report counts as none
        return report.beat, report.waits_for


def read_batch(
    run: RunDir, manifest: BatchManifest, name_of: Callable[[int], str], rank: int, ranks: int
) -> Batch:
    """Read what a data-parallel rank trains, or with other names what it validates with.

    A batch that was cut for another number of ranks, before `learner.data_parallel` changed, is dealt anew.
    """
    folder = run.batch(manifest.step)

    def read(name: str) -> Batch:
        return atomic.decode(folder / name, folders.read(folder, name, manifest), Batch)

    cut = [name for name in map(name_of, range(len(manifest.files))) if name in manifest.files]
    if len(cut) == ranks:
        return read(name_of(rank))
    return deal([read(name) for name in cut], rank, ranks)


def deal(shares: Sequence[Batch], rank: int, ranks: int) -> Batch:
    """Return a rank's share of a batch that was cut into other shares.

    All ranks get equally many microbatches. The weights of tokens hold the denominator of the whole step, so
    only the order of sums changes.
    """
    counts = shares[0].minibatches or [len(shares[0].microbatches)]
    dealt, first = [], 0
    for count in counts:
        rows = zip(*(share.microbatches[first : first + count] for share in shares), strict=True)
        whole = [micro for row in rows for micro in row]
        own = whole[rank::ranks]
        dealt.append([*own, *[FILLER] * (-(-len(whole) // ranks) - len(own))])
        first += count
    return Batch(
        step=shares[0].step,
        rank=rank,
        microbatches=[micro for part in dealt for micro in part],
        minibatches=[len(part) for part in dealt] if shares[0].minibatches else [],
    )
