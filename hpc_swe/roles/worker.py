"""Run the claim loop of every worker: turn messages of one spool into messages of the next.

It consumes `source`, produces `results`, and waits for ready messages, which the previous role publishes. One
thread claims messages and reads orders, with one listing per iteration for the whole process; each claimed
message is worked on in a thread of its own.
"""

import logging
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Generic, TypeVar

from hpc_swe.base.errors import StorageError
from hpc_swe.base.records import Record
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import orders
from hpc_swe.base.store.lease import Lease
from hpc_swe.base.store.spool import Claim, Spool
from hpc_swe.cluster.processes import Flag

M = TypeVar("M", bound=Record)
R = TypeVar("R", bound=Record)
FIRST_PAUSE_S = 0.05
MAX_SLOWDOWN = 10.0  # times poll_s; by default orders are seen within 7.5 s, before `launch stop --now` kills
MAX_STORAGE_PAUSE_S = 300.0
FIRST_REFUSAL_PAUSE_S, MAX_REFUSAL_PAUSE_S = 1.0, 60.0  # between two tries to publish a result
MAX_ITERATION_S = 60.0  # the most that one iteration adds to a claim's clock: a frozen process did no work

log = logging.getLogger(__name__)


class GiveBack(Exception):
    """Return the message to its spool: what the work needs went away before anything was done."""


class Work(Generic[R]):
    """Process one message."""

    def run(self) -> R:
        """Produce the result, in a thread of its own; raise GiveBack to return the message to its spool.

        Any other exception ends the process: the claim is lost.
        """
        raise NotImplementedError

    def after(self) -> None:
        """Do extra work in the same thread after publication; a drain neither starts nor awaits it."""

    def steps(self, thread: threading.Thread) -> int:
        """Count, in any unit, what `run` has done so far in `thread`: a long one can be told from a hang."""
        return 0

    def overdue(self) -> R | None:
        """Return the result to publish when `run` hangs; None while it may still end."""
        return None

    def stop(self) -> None:
        """Make `run` harmless: its message goes back to the spool, and another worker may take it."""


@dataclass
class Backoff:
    """Choose a worker's pause between iterations: thousands of workers share one metadata server.

    The pause doubles after each iteration that found nothing, up to `poll_s`. A lost race is a sign of too
    many requests: it doubles all pauses, and an iteration that claimed without one halves them, so that
    workers lose hardly more races than they win, whatever their number. Without a free slot a worker only
    reads orders; a thread that ends wakes it.
    """

    poll_s: float
    max_slowdown: float = MAX_SLOWDOWN
    pause_s: float = FIRST_PAUSE_S
    _idle_s: float = FIRST_PAUSE_S
    _slowdown: float = 1.0

    def after(self, free: int, found: int, lost: int) -> None:
        """Set the pause after an iteration: `found` claims, `lost` races, and `free` slots left."""
        if lost:
            self._slowdown = min(2 * self._slowdown, self.max_slowdown)
        elif found:
            self._slowdown = max(self._slowdown / 2, 1.0)
        self._idle_s = FIRST_PAUSE_S if found or not free else min(2 * self._idle_s, self.poll_s)
        self.pause_s = self._slowdown * self._idle_s if free else self.max_slowdown * self.poll_s


@dataclass
class _Slot(Generic[M, R]):
    """Hold a claim and its work; the first thread to settle it decides what happens to the claim."""

    claim: Claim[M]
    work: Work[R]
    thread: threading.Thread = field(init=False)
    crash: BaseException | None = None
    has_result: bool = False
    """The work has ended; its result is published, or waits until the file system takes it."""
    is_published: bool = False
    """The result is published, or the message given back; only `after` may still run."""
    is_over: bool = False
    """The worker is done with it; the thread of overdue work may still run."""
    worked_s: float = 0.0
    """Seconds since the claim, without those in which what it needs was away."""
    _unsettled: threading.Lock = field(default_factory=threading.Lock)

    def settle(self) -> bool:
        """Return True to the first caller only."""
        return self._unsettled.acquire(blocking=False)

    def unsettle(self) -> None:
        """Let others decide, after a publication that the file system refused."""
        self._unsettled.release()


@dataclass
class Worker(Generic[M, R]):
    """Work on `slots` messages at once in one process."""

    run: RunDir
    lease: Lease
    source: Spool[M]
    results: Spool[R]
    make_work: Callable[[Claim[M]], Work[R]]
    slots: int
    poll_s: float
    cleanup_s: float = 0.0
    """Seconds that threads get to clean up when the process must end."""
    can_work: Callable[[], bool] = lambda: True
    """Return whether what the work needs is there. If not, nothing is claimed and the claims' clocks stop."""
    _active: list[_Slot[M, R]] = field(default_factory=list, init=False)
    _wake: Flag = field(default_factory=Flag, init=False)
    _must_stop: bool = field(default=False, init=False)
    _is_warned: bool = field(default=False, init=False)
    """The scheduler will end this process before long; SIGTERM follows."""
    _draining: Flag = field(default_factory=Flag, init=False)
    _storage_error: StorageError | None = field(default=None, init=False)
    _storage_pause_s: float = field(default=1.0, init=False)
    _clocked_at: float = field(default_factory=time.monotonic, init=False)
    _backoff: Backoff = field(init=False)

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.poll_s)

    def work(self) -> None:
        """Work until STOP, SIGTERM or the run's end; after DRAIN or SIGUSR2 finish the claimed work first."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                signal.signal(number, self._on_signal)
        try:
            self.lease.publish(state="ready", slots=self.slots)
            while self._iterate():
                self._wake.wait(random.uniform(0.5, 1.5) * self._backoff.pause_s)
                self._wake.clear()
        finally:
            self._give_back_all()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self._is_warned = True
        else:
            self._must_stop = True
        self._wake.set()

    def _iterate(self) -> bool:
        """Read orders, collect ended work, fill free slots; return False when the worker must end."""
        self._reap()
        self.lease.turn()
        try:
            active = orders.active(self.run)
            if self._is_warned or "DRAIN" in active:
                self._draining.set()
            else:
                self._draining.clear()
            has_drained = self._draining.is_set() and all(slot.is_published for slot in self._active)
            if self._must_stop or {"STOP", "FINISHED"} & {*active} or has_drained:
                return False
            can_work = self._advance_clocks()
            if self._draining.is_set():
                self._backoff.after(0, 0, 0)
            elif self._storage_error is None:
                self._claim() if can_work else self._backoff.after(self.slots, 0, 0)
        except StorageError as error:
            self._storage_error = error
        self.lease.update(  # after a refusal, too: what the cell does not name counts as forgotten
            claims=[slot.claim.name for slot in self._active],
            worked_s=[slot.worked_s for slot in self._active],
            state="draining" if self._draining.is_set() else "ready",
            steps=[slot.work.steps(slot.thread) for slot in self._active],
        )
        self._pause_after_refusal()
        return True

    def _reap(self) -> None:
        """Forget work that has ended, raise its errors, and publish for work that hangs."""
        for slot in list(self._active):
            works_on = not (slot.is_over or slot.has_result)
            if works_on and (result := slot.work.overdue()) is not None:
                slot.is_over = self._publish(slot, result)
            if slot.is_over:
                self._active.remove(slot)
            if slot.crash is not None:
                raise slot.crash

    def _advance_clocks(self) -> bool:
        """Add the time since the last iteration to the claims' clocks, if what they need is there."""
        can_work, now = self.can_work(), time.monotonic()
        if can_work:
            for slot in (each for each in self._active if not each.has_result):
                slot.worked_s += min(now - self._clocked_at, MAX_ITERATION_S)
        self._clocked_at = now
        return can_work

    def _claim(self) -> None:
        before, misses = len(self._active), self.source.misses
        for claim in islice(self.source.claims(self.lease.owner), self.slots - before):
            log.info("claimed %s", claim.name)
            slot = _Slot(claim, self.make_work(claim))
            slot.thread = threading.Thread(target=self._run, args=(slot,), name=claim.name, daemon=True)
            self._active.append(slot)
            slot.thread.start()
        now = len(self._active)
        self._backoff.after(self.slots - now, now - before, self.source.misses - misses)

    def _run(self, slot: _Slot[M, R]) -> None:
        try:
            result, pause_s = slot.work.run(), FIRST_REFUSAL_PAUSE_S
            slot.has_result = True
            while not self._publish(slot, result):  # work of hours is kept until there is room for it
                if self._draining.is_set():  # a stop gives the message back
                    time.sleep(FIRST_REFUSAL_PAUSE_S)
                elif not self._draining.wait(pause_s):
                    pause_s = min(2 * pause_s, MAX_REFUSAL_PAUSE_S)
            slot.is_published = True
            if not self._draining.is_set():
                slot.work.after()
        except GiveBack as reason:
            if slot.settle():
                log.warning("given back %s: %s", slot.claim.name, reason)
                slot.is_published = True
                self._give_back(slot.claim)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it; a panic of Rust is one, too
            slot.crash = error
        slot.is_over = True
        self._wake.set()

    def _publish(self, slot: _Slot[M, R], result: R) -> bool:
        """Publish the result, then remove the message: dying in between duplicates it but never loses it.

        Return False if the file system refuses; then the claim is still held, and a stop gives it back.
        """
        if not slot.settle():
            return True
        try:
            self.results.put(slot.claim.name, result)
            slot.claim.finish()
        except StorageError as error:
            self._storage_error = error
            slot.unsettle()
            return False
        return True

    def _give_back(self, claim: Claim[M]) -> None:
        try:
            claim.give_back()
        except StorageError as error:  # the coordinator will recover the claim
            self._storage_error = error

    def _pause_after_refusal(self) -> None:
        """Wait longer after each successive refusal of the file system, up to five minutes."""
        if self._storage_error is None:
            self._storage_pause_s = 1.0
            return
        log.warning("storage refuses, waiting %g s: %s", self._storage_pause_s, self._storage_error)
        self._backoff.pause_s, self._storage_error = self._storage_pause_s, None
        self._storage_pause_s = min(2 * self._storage_pause_s, MAX_STORAGE_PAUSE_S)

    def _give_back_all(self) -> None:
        """Give back unfinished claims without counting a loss, and wait for their threads to clean up."""
        for slot in self._active:
            if slot.settle():
                slot.work.stop()
                self._give_back(slot.claim)
        until = time.monotonic() + self.cleanup_s
        for slot in self._active:
            slot.thread.join(max(0.0, until - time.monotonic()))
