"""The reward worker: one process, several gradings at once.

Consumes episodes/; produces scored/. Waits for a finished episode (rollout workers make them). One thread
claims and looks for orders; each grading has a thread of its own and fresh sandboxes.
"""

import contextlib
import logging
import random
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from hpc_swe.config import RewardConfig
from hpc_swe.errors import EpisodeError, StorageError
from hpc_swe.plugins.graders.base import Grader
from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.records import Episode, ExitStatus, Score, ScoredEpisode, Task
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic
from hpc_swe.store.lease import Lease
from hpc_swe.store.spool import Claim, Spool

FIRST_PAUSE_S = 0.05
MOST_TROUBLE_S = 300.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Means:
    """What all gradings of a process are made with."""

    tasks: Mapping[str, Task]
    sandboxes: Sandboxes
    grader: Grader
    config: RewardConfig


@dataclass
class _Grading:
    claim: Claim[Episode]
    thread: threading.Thread | None = None
    crash: Exception | None = None


def judge(means: Means, episode: Episode) -> Score:
    """The score of an episode. What the host does wrong has no reward, and none can be gained by it."""
    task = means.tasks.get(episode.request.task_id)
    if episode.exit_status == ExitStatus.INFRA_ERROR:
        return Score(outcome="infra_error", reward=None, detail=episode.error)
    if task is None:
        detail = f"task {episode.request.task_id!r} is not in the run's tasks.parquet"
        return Score(outcome="infra_error", reward=None, detail=detail)
    # An agent that broke, or that broke its sandbox, has handed nothing in.
    submission = "" if episode.exit_status == ExitStatus.AGENT_ERROR else episode.submission
    try:
        return means.grader.grade(task, submission, means.sandboxes)
    except EpisodeError as error:
        return Score(outcome="infra_error", reward=None, detail=str(error))


class Worker:
    """Claims episodes and publishes their scores."""

    def __init__(self, run: RunDir, lease: Lease, means: Means) -> None:
        self._run, self._lease, self._means = run, lease, means
        self._episodes = Spool(run.episodes, Episode)
        self._scored = Spool(run.scored, ScoredEpisode)
        self._active: list[_Grading] = []
        self._wake = threading.Event()
        self._told = False
        self._trouble: StorageError | None = None
        self._trouble_s = 1.0
        self._pause_s = FIRST_PAUSE_S

    def work(self) -> None:
        """Until STOP, a signal, or after DRAIN until the gradings at work have ended."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                signal.signal(number, self._tell)
        try:
            while self._round():
                self._wake.wait(random.uniform(0.5, 1.5) * self._pause_s)
                self._wake.clear()
        finally:
            for grading in self._active:  # a late result does no harm: it is named by its request
                with contextlib.suppress(StorageError):
                    grading.claim.give_back()

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = True
        self._wake.set()

    def _round(self) -> bool:
        """Look at orders and gradings, claim what fits; False when the work is over."""
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

    def _reap(self) -> None:
        """Forget what has ended; what broke ends the process, and its claims come back."""
        for grading in [g for g in self._active if g.thread is not None and not g.thread.is_alive()]:
            self._active.remove(grading)
            if grading.crash is not None:
                raise grading.crash

    def _claim(self) -> None:
        free = self._means.config.slots - len(self._active)
        claims = self._episodes.claims(self._lease.owner)
        taken = [claim for _, claim in zip(range(free), claims, strict=False)]
        for claim in taken:
            grading = _Grading(claim)
            grading.thread = threading.Thread(
                target=self._work_on, args=(grading,), name=claim.name, daemon=True
            )
            self._active.append(grading)
            grading.thread.start()
        if free:
            self._pause_s = FIRST_PAUSE_S if taken else min(2 * self._pause_s, self._means.config.poll_s)

    def _work_on(self, grading: _Grading) -> None:
        try:
            self._publish(grading.claim, judge(self._means, grading.claim.message))
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            grading.crash = error
        self._wake.set()

    def _publish(self, claim: Claim[Episode], score: Score) -> None:
        """The score first, then the claim: dying between the two makes a duplicate, never a loss."""
        try:
            self._scored.put(claim.name, ScoredEpisode(episode=claim.message, score=score))
            claim.finish()
        except StorageError as error:
            self._trouble = error
            with contextlib.suppress(StorageError):  # its lease gives it back later
                claim.give_back()
        log.info("graded %s: %s in %.2f s", claim.name, score.outcome, score.seconds)

    def _show(self, state: str) -> None:
        claims = [grading.claim.name for grading in self._active]
        if (claims, state) != (self._lease.node.claims, self._lease.node.state):
            self._lease.show(claims=claims, state=state, slots=self._means.config.slots)

    def _rest(self) -> None:
        """After a refusal of the file system, wait up to five minutes before trying again."""
        if self._trouble is None:
            self._trouble_s = 1.0
            return
        log.warning("storage refuses, waiting %g s: %s", self._trouble_s, self._trouble)
        self._pause_s, self._trouble = self._trouble_s, None
        self._trouble_s = min(2 * self._trouble_s, MOST_TROUBLE_S)
