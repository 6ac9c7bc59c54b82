"""Let images that share files by links be made and removed only while no test runs in one of them.

The kernel notes a new link of a file as it notes a change of the file, and a grader believes no result of an
image whose files changed while its tests ran.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_one_at_a_time = threading.Lock()
_ended = threading.Condition()
_runs: list[object] = []


@contextmanager
def kept() -> Iterator[None]:
    """Keep the links of all images as they are, while this thread runs tests; several threads may."""
    run = object()
    with _one_at_a_time:  # a thread that waits to change links comes before later runs
        _runs.append(run)
    try:
        yield
    finally:
        with _ended:
            _runs.remove(run)
            _ended.notify_all()


@contextmanager
def changing() -> Iterator[None]:
    """Wait until no thread runs tests, which have time-outs, and hold off further runs meanwhile."""
    with _one_at_a_time:
        with _ended:
            _ended.wait_for(lambda: not _runs)
        yield
