"""The rollout worker: one process, many episodes at once.

Consumes requests/; produces episodes/. Waits for a ready request (the coordinator dispatches) and, in
each episode, for an engine that serves (endpoints cell). One thread claims and looks for orders, one
listing a round for the whole process; each episode has a thread of its own.
"""

import contextlib
import logging
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from types import FrameType

from hpc_swe.errors import StorageError
from hpc_swe.records import Episode, RolloutRequest
from hpc_swe.roles.rollout import episode
from hpc_swe.roles.rollout.episode import Means, Outcome
from hpc_swe.roles.rollout.recorder import Recorder
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic
from hpc_swe.store.lease import Lease
from hpc_swe.store.spool import Claim, Spool

FIRST_PAUSE_S = 0.05
MOST_TROUBLE_S = 300.0
CLOSING_S = 15.0
"""What sandboxes get to close in when the process must end; Slurm kills 90 s after its signal."""

log = logging.getLogger(__name__)


@dataclass
class Attempt:
    """A claim and the thread that works on it. Whoever settles it first decides what becomes of the claim."""

    claim: Claim[RolloutRequest]
    recorder: Recorder
    thread: threading.Thread | None = None
    crash: Exception | None = None
    is_given_up: bool = False
    """Its thread hangs and is left behind."""
    _unsettled: threading.Lock = field(default_factory=threading.Lock)

    def settle(self) -> bool:
        """True for the first caller."""
        return self._unsettled.acquire(blocking=False)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come of it."""
        return self.is_given_up or (self.thread is not None and not self.thread.is_alive())


class Worker:
    """Claims requests and publishes their episodes."""

    def __init__(self, run: RunDir, lease: Lease, means: Means, hung_s: float = 60.0) -> None:
        """An episode that exceeds its backstop by `hung_s` without noticing is given up from outside."""
        self._run, self._lease, self._means = run, lease, means
        self._longest_s = means.config.episode_timeout_s + hung_s
        self._requests = Spool(run.requests, RolloutRequest)
        self._episodes = Spool(run.episodes, Episode)
        self._active: list[Attempt] = []
        self._wake = threading.Event()
        self._told = False
        self._trouble: StorageError | None = None
        self._trouble_s = 1.0
        self._pause_s = FIRST_PAUSE_S

    def work(self) -> None:
        """Until STOP, a signal, or after DRAIN until the episodes at work have ended."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                signal.signal(number, self._tell)
        try:
            self._lease.show(state="ready", slots=self._means.config.slots)
            while self._round():
                self._wake.wait(random.uniform(0.5, 1.5) * self._pause_s)
                self._wake.clear()
        finally:
            self._give_back()

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = True
        self._wake.set()

    def _round(self) -> bool:
        """Look at orders and episodes, claim what fits; False when the work is over."""
        self._reap()
        try:
            orders = atomic.names(self._run.control)
            if self._told or {"STOP", "FINISHED"} & {*orders} or ("DRAIN" in orders and not self._active):
                return False
            if "DRAIN" not in orders and self._trouble is None:
                self._claim()
            self._show("draining" if "DRAIN" in orders else "ready")
        except StorageError as error:
            self._trouble = error
        self._rest()
        return True

    def _claim(self) -> None:
        free = self._means.config.slots - len(self._active)
        found = 0
        if free:
            for claim in self._requests.claims(self._lease.owner):
                self._start(claim)
                found += 1
                if found == free:
                    break
        longest = self._means.config.poll_s
        self._pause_s = FIRST_PAUSE_S if found else min(2 * self._pause_s, longest)

    def _start(self, claim: Claim[RolloutRequest]) -> None:
        log.info("claimed %s", claim.name)
        attempt = Attempt(claim, self._means.recorder(claim.message))
        attempt.thread = threading.Thread(target=self._play, args=(attempt,), name=claim.name, daemon=True)
        self._active.append(attempt)
        attempt.thread.start()

    def _play(self, attempt: Attempt) -> None:
        try:
            outcome = episode.play(self._means, attempt.claim.message, attempt.recorder)
            self._publish(attempt, outcome)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            attempt.crash = error
        self._wake.set()

    def _publish(self, attempt: Attempt, outcome: Outcome) -> None:
        """The episode first, then the claim: dying between the two makes a duplicate, never a loss."""
        if not attempt.settle():
            return
        request = attempt.claim.message
        made = episode.record(request, attempt.recorder, outcome, self._lease.owner)
        try:
            self._episodes.put(request.name, made)
            attempt.claim.finish()
        except StorageError as error:
            self._trouble = error
            with contextlib.suppress(StorageError):  # its lease gives it back later
                attempt.claim.give_back()
        log.info("finished %s: %s, %d turns", request.name, made.exit_status, len(made.turns))

    def _reap(self) -> None:
        """Forget what has ended, raise what broke, give up what hangs."""
        for attempt in [attempt for attempt in self._active if attempt.is_over]:
            self._active.remove(attempt)
            if attempt.crash is not None:
                raise attempt.crash
        for attempt in self._active:
            if attempt.recorder.beside_engine_s > self._longest_s:
                attempt.is_given_up = True
                why = (
                    f"the episode hangs, {self._longest_s:g} s beside the engine; [rollout] episode_timeout_s"
                )
                self._publish(attempt, Outcome(episode.failed(why)))

    def _show(self, state: str) -> None:
        claims = [attempt.claim.name for attempt in self._active]
        if (claims, state) != (self._lease.node.claims, self._lease.node.state):
            self._lease.show(claims=claims, state=state)

    def _rest(self) -> None:
        """After a refusal of the file system, wait up to five minutes before trying again."""
        if self._trouble is None:
            self._trouble_s = 1.0
            return
        log.warning("storage refuses, waiting %g s: %s", self._trouble_s, self._trouble)
        self._pause_s, self._trouble = self._trouble_s, None
        self._trouble_s = min(2 * self._trouble_s, MOST_TROUBLE_S)

    def _give_back(self) -> None:
        """Put unfinished claims back, which counts against nobody, and let the sandboxes close."""
        for attempt in self._active:
            if attempt.settle():
                attempt.recorder.close("the worker is stopping")
                with contextlib.suppress(StorageError):
                    attempt.claim.give_back()
        until = time.monotonic() + CLOSING_S
        for attempt in self._active:
            if attempt.thread is not None:
                attempt.thread.join(max(0.0, until - time.monotonic()))
