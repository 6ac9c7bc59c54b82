"""Grade equal patches of a group once: siblings often hand in the same repair.

Siblings share a score that the grader calls final. This spares gradings, and gives equal answers equal
rewards. In a later group of the task the patch is graded again: one that passed by luck must pass again.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from msgspec.structs import replace

from hpc_swe.base.records import RolloutRequest, Score

MOST_TESTS = 1000
"""Most tests of a score that is remembered: their names take memory."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedScores:
    """Hold the scores of a process by group and patch, and the gradings that will give them."""

    most: int = 1024
    """Scores that are remembered; the oldest is forgotten first."""
    _known: dict[bytes, "Future[Score | None]"] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def score(self, request: RolloutRequest, patch: str, wait_s: float, grade: Callable[[], Score]) -> Score:
        """Return the score of a sibling's equal patch, which names its episode, or that of `grade`.

        Where such a patch is being graded, wait for its score for up to `wait_s` seconds. What `grade`
        raises, and a score that is not final, is shared with nobody.
        """
        name, began = request.name, time.monotonic()
        key = hashlib.sha256(f"{request.group_id}\0{patch}".encode(errors="surrogatepass")).digest()
        with self._lock:
            known, own = self._known.get(key), Future[Score | None]()
            if known is None:
                self._known[key] = own
                if len(self._known) > self.most:
                    del self._known[next(iter(self._known))]
        if known is None:
            return self._grade(name, key, own, grade)
        try:
            found = known.result(wait_s)
        except TimeoutError:
            log.warning("not shared: no score of an equal patch in %g s; %s is graded, too", wait_s, name)
            found = None
        return grade() if found is None else replace(found, seconds=time.monotonic() - began)

    def _grade(self, name: str, key: bytes, own: "Future[Score | None]", grade: Callable[[], Score]) -> Score:
        shared = None
        try:
            score = grade()
            if score.is_final and len(score.passed) + len(score.failed) <= MOST_TESTS:
                shared = replace(score, graded_as=name)
            return score
        finally:
            if shared is None:
                with self._lock:
                    if self._known.get(key) is own:
                        del self._known[key]
            own.set_result(shared)
