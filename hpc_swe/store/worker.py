"""The claim loop of every worker: messages of one spool become messages of the next.

Consumes `source`; produces `results`. Waits for a message to be ready, which the role before makes so. One
thread claims and looks for orders, one listing a round for the whole process; what is claimed is worked on
in a thread of its own.
"""

import contextlib
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

from hpc_swe.errors import StorageError
from hpc_swe.processes import Flag
from hpc_swe.records import Record
from hpc_swe.rundir import RunDir
from hpc_swe.store import orders
from hpc_swe.store.lease import Lease
from hpc_swe.store.spool import Claim, Spool

M = TypeVar("M", bound=Record)
R = TypeVar("R", bound=Record)
FIRST_PAUSE_S = 0.05
SLOWEST = 10.0  # times poll_s; by default orders are seen within 7.5 s, before `launch stop --now` kills
MOST_TROUBLE_S = 300.0
LONGEST_ROUND_S = 60.0  # adds a round to a claim's clock at most: a process that was frozen did no work

log = logging.getLogger(__name__)


class Undone(Exception):
    """What the work needs went away before anything was done; the message goes back."""


class Work(Generic[R]):
    """What is done about one message."""

    def run(self) -> R:
        """In its own thread; an exception ends the process, and the claim counts as lost.

        Raises:
            Undone: The message shall go back.
        """
        raise NotImplementedError

    def after(self) -> None:
        """In the same thread and slot, once the result is out; a drain neither begins nor awaits it."""

    def overdue(self) -> R | None:
        """What to publish when `run` hangs; None while it may still end."""
        return None

    def stop(self) -> None:
        """The message goes back; `run` shall trouble nobody any more."""


@dataclass
class Rests:
    """How long a worker rests between rounds; thousands of them ask one metadata server.

    Twice as long after each round that found nothing, up to `poll_s`. A lost race says that too many ask: it
    doubles all rests, and a claim without one halves them, so that workers lose hardly more races than they
    win, whatever their number. Without a free slot there is nothing to ask for but orders: what ends wakes
    the worker.
    """

    poll_s: float
    slowest: float = SLOWEST
    pause_s: float = FIRST_PAUSE_S
    _idle_s: float = FIRST_PAUSE_S
    _slowness: float = 1.0

    def after(self, free: int, found: int, lost: int) -> None:
        """A round that left `free` slots."""
        if lost:
            self._slowness = min(2 * self._slowness, self.slowest)
        elif found:
            self._slowness = max(self._slowness / 2, 1.0)
        self._idle_s = FIRST_PAUSE_S if found or not free else min(2 * self._idle_s, self.poll_s)
        self.pause_s = self._slowness * self._idle_s if free else self.slowest * self.poll_s


@dataclass
class _Held(Generic[M, R]):
    """Whoever settles it first decides what becomes of the claim."""

    claim: Claim[M]
    work: Work[R]
    thread: threading.Thread = field(init=False)
    crash: BaseException | None = None
    is_out: bool = False
    """Its result, that is; only what comes after may go on."""
    is_over: bool = False
    """Nothing more is to come of it; the thread of one that was overdue may go on."""
    worked_s: float = 0.0
    """Since the claim, without the time that what it needs was away."""
    _unsettled: threading.Lock = field(default_factory=threading.Lock)

    def settle(self) -> bool:
        """True for the first caller."""
        return self._unsettled.acquire(blocking=False)


@dataclass
class Worker(Generic[M, R]):
    """One process, `slots` messages at once."""

    run: RunDir
    lease: Lease
    source: Spool[M]
    results: Spool[R]
    begin: Callable[[Claim[M]], Work[R]]
    slots: int
    poll_s: float
    closing_s: float = 0.0
    """What threads get to clean up in when the process must end."""
    is_served: Callable[[], bool] = lambda: True
    """Whether what the work needs is there. Without it nothing is claimed, and the clocks of claims stand."""
    _active: list[_Held[M, R]] = field(default_factory=list, init=False)
    _wake: Flag = field(default_factory=Flag, init=False)
    _told: bool = field(default=False, init=False)
    _is_warned: bool = field(default=False, init=False)
    """The scheduler will end this process before long; SIGTERM follows."""
    _drains: bool = field(default=False, init=False)
    _trouble: StorageError | None = field(default=None, init=False)
    _trouble_s: float = field(default=1.0, init=False)
    _looked_at: float = field(default_factory=time.monotonic, init=False)
    _rests: Rests = field(init=False)

    def __post_init__(self) -> None:
        self._rests = Rests(self.poll_s)

    def work(self) -> None:
        """Until STOP, SIGTERM, the run's end, or after DRAIN or SIGUSR2 until what is at work has ended."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                signal.signal(number, self._tell)
        try:
            self.lease.show(state="ready", slots=self.slots)
            while self._round():
                self._wake.wait(random.uniform(0.5, 1.5) * self._rests.pause_s)
                self._wake.clear()
        finally:
            self._give_back()

    def _tell(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self._is_warned = True
        else:
            self._told = True
        self._wake.set()

    def _round(self) -> bool:
        """Look at orders and work, claim what fits; False when all is over."""
        self._reap()
        try:
            told = orders.standing(self.run)
            drains = self._drains = self._is_warned or "DRAIN" in told
            has_ended = all(held.is_out for held in self._active)
            if self._told or {"STOP", "FINISHED"} & {*told} or (drains and has_ended):
                return False
            is_served = self._run_clocks()
            if drains:
                self._rests.after(0, 0, 0)
            elif self._trouble is None:
                self._claim() if is_served else self._rests.after(self.slots, 0, 0)
            self.lease.note(
                claims=[held.claim.name for held in self._active],
                worked_s=[held.worked_s for held in self._active],
                state="draining" if drains else "ready",
            )
        except StorageError as error:
            self._trouble = error
        self._rest()
        return True

    def _reap(self) -> None:
        """Forget what has ended, raise what broke, give up what hangs."""
        for held in list(self._active):
            if not held.is_over and (result := held.work.overdue()) is not None:
                self._publish(held, result)
                held.is_over = True
            if held.is_over:
                self._active.remove(held)
            if held.crash is not None:
                raise held.crash

    def _run_clocks(self) -> bool:
        """Add the time since the last round to the claims' clocks, if what they need is there."""
        is_served, now = self.is_served(), time.monotonic()
        if is_served:
            for held in self._active:
                held.worked_s += min(now - self._looked_at, LONGEST_ROUND_S)
        self._looked_at = now
        return is_served

    def _claim(self) -> None:
        before, misses = len(self._active), self.source.misses
        for claim in islice(self.source.claims(self.lease.owner), self.slots - before):
            log.info("claimed %s", claim.name)
            held = _Held(claim, self.begin(claim))
            held.thread = threading.Thread(target=self._play, args=(held,), name=claim.name, daemon=True)
            self._active.append(held)
            held.thread.start()
        now = len(self._active)
        self._rests.after(self.slots - now, now - before, self.source.misses - misses)

    def _play(self, held: _Held[M, R]) -> None:
        try:
            self._publish(held, held.work.run())
            held.is_out = True
            if not self._drains:
                held.work.after()
        except Undone as reason:
            self._undo(held, reason)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it; a panic of Rust is one, too
            held.crash = error
        held.is_over = True
        self._wake.set()

    def _publish(self, held: _Held[M, R], result: R) -> None:
        """The result first, then the claim: dying between the two makes a duplicate, never a loss."""
        if not held.settle():
            return
        try:
            self.results.put(held.claim.name, result)
            held.claim.finish()
        except StorageError as error:
            self._trouble = error
            with contextlib.suppress(StorageError):  # its lease gives it back later
                held.claim.give_back()

    def _undo(self, held: _Held[M, R], reason: Undone) -> None:
        if held.settle():
            log.warning("given back %s: %s", held.claim.name, reason)
            held.is_out = True
            try:
                held.claim.give_back()
            except StorageError as error:  # its lease gives it back later
                self._trouble = error

    def _rest(self) -> None:
        """After a refusal of the file system, wait up to five minutes before trying again."""
        if self._trouble is None:
            self._trouble_s = 1.0
            return
        log.warning("storage refuses, waiting %g s: %s", self._trouble_s, self._trouble)
        self._rests.pause_s, self._trouble = self._trouble_s, None
        self._trouble_s = min(2 * self._trouble_s, MOST_TROUBLE_S)

    def _give_back(self) -> None:
        """Put unfinished claims back, which counts against nobody, and let their threads clean up."""
        for held in self._active:
            if held.settle():
                held.work.stop()
                with contextlib.suppress(StorageError):
                    held.claim.give_back()
        until = time.monotonic() + self.closing_s
        for held in self._active:
            held.thread.join(max(0.0, until - time.monotonic()))
