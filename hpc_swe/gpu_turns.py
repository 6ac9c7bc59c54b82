"""Let the engines and the learner of one node take turns on its GPUs, by locks of the kernel.

Each process of the learner has two files in a node-local folder:

    request-<rank>   it is locked by the learner while it wants the GPUs or uses them
    memory-<rank>    it is locked by each engine while the engine's state is on the GPUs, and exclusively by
                     the learner while the learner's is

The kernel frees the locks of a process that dies, so no turn outlives its holder. An engine that sees a
request gives its turn back; it takes no turn while there is one.
"""

import fcntl
import os
import time
from pathlib import Path

from hpc_swe.errors import DeadlineError

LOOK_S = 0.1


class EngineTurn:
    """Hold the turn of one engine."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._requests = [_open(folder / f"request-{rank}") for rank in range(ranks)]
        self._memory = [_open(folder / f"memory-{rank}") for rank in range(ranks)]

    def is_requested(self) -> bool:
        """Tell whether a process of the learner wants the GPUs or uses them."""
        free = [_lock(file, fcntl.LOCK_SH) for file in self._requests]
        for file in self._requests:
            fcntl.flock(file, fcntl.LOCK_UN)
        return not all(free)

    def take(self) -> bool:
        """Take the turn unless the learner wants it; return whether it was taken."""
        if not self.is_requested() and all(_lock(file, fcntl.LOCK_SH) for file in self._memory):
            return True
        self.give()
        return False

    def give(self) -> None:
        """Give the turn back, once nothing of the engine's is on the GPUs."""
        for file in self._memory:
            fcntl.flock(file, fcntl.LOCK_UN)


class LearnerTurn:
    """Hold the turn of one process of the learner."""

    def __init__(self, folder: Path, rank: int, wait_s: float) -> None:
        self._request, self._memory = _open(folder / f"request-{rank}"), _open(folder / f"memory-{rank}")
        self._wait_s = wait_s

    def take(self) -> None:
        """Ask for the turn, and wait until the engines have given theirs.

        Raise DeadlineError after `wait_s`.
        """
        until = time.monotonic() + self._wait_s
        for file in (self._request, self._memory):
            while not _lock(file, fcntl.LOCK_EX):
                if time.monotonic() > until:
                    raise DeadlineError(
                        f"an engine of this node has kept the GPUs for {self._wait_s:.0f} s; see its log, or "
                        "raise inference.start_timeout_s"
                    )
                time.sleep(LOOK_S)

    def give(self) -> None:
        """Give the turn back, once nothing of this process's is on the GPUs."""
        for file in (self._memory, self._request):
            fcntl.flock(file, fcntl.LOCK_UN)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
