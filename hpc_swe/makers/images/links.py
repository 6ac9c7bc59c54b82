"""Let images that share files by links be made and removed only while no test runs in one of them.

The kernel notes a new link of a file as it notes a change of the file, and a grader believes no result of an
image whose files changed while its tests ran.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hpc_swe.base.errors import DeadlineError

WAIT_S = 4 * 3600.0
"""Longest wait for runs of tests, which have time-outs of their own, or for those who change links."""
_one_at_a_time = threading.Lock()
_ended = threading.Condition()
_runs: list[object] = []


@contextmanager
def kept() -> Iterator[None]:
    """Keep the links of all images as they are, while this thread runs tests; several threads may.

    Raise DeadlineError if others make or remove images for more than WAIT_S.
    """
    run = object()
    with _turn(WAIT_S):  # a thread that waits to change links comes before later runs
        _runs.append(run)
    try:
        yield
    finally:
        with _ended:
            _runs.remove(run)
            _ended.notify_all()


@contextmanager
def changing(wait_s: float = WAIT_S) -> Iterator[None]:
    """Wait until no thread runs tests, and hold off further runs meanwhile.

    Raise DeadlineError if a thread runs tests for more than `wait_s`.
    """
    with _turn(wait_s):
        with _ended:
            if not _ended.wait_for(lambda: not _runs, wait_s):
                raise DeadlineError(
                    f"{len(_runs)} runs of tests have not ended within {wait_s:g} s, for which an image waits"
                )
        yield


@contextmanager
def _turn(wait_s: float) -> Iterator[None]:
    if not _one_at_a_time.acquire(timeout=wait_s):
        raise DeadlineError(f"another thread has made or removed an image for {wait_s:g} s")
    try:
        yield
    finally:
        _one_at_a_time.release()
