"""Let the engines and the learner of one node take turns on its GPUs, by locks of the kernel.

The processes of a job lock files in a node-local folder, which lasts as long as the job:

    request-<rank>    it is locked by a process of the learner that wants its GPU or uses it
    memory-<rank>     it is locked by each engine while the engine's state is on the GPUs, and exclusively by
                      the process of the learner while the process's state is
    engine-<number>   it is locked by an engine until its last process has ended

The kernel frees the locks of a process that dies, so no turn outlives its holder. An engine's guard holds the
engine's locks, too, because it outlives a supervisor that was killed until the engine has ended. An engine
that sees a request gives its turn back; it takes no turn while there is one.
"""

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_swe.base.errors import DeadlineError

FOLDER = "HPC_SWE_GPU_TURNS"
"""Environment variable with the folder of the locks."""
LOOK_S = 0.1


class EngineTurn:
    """Hold the turn of one engine."""

    def __init__(self, folder: Path, ranks: int, number: int = 0) -> None:
        """Open the files of engine `number` and of the learner's processes."""
        self._requests = [_open(folder / f"request-{rank}") for rank in range(ranks)]
        self._memory = [_open(folder / f"memory-{rank}") for rank in range(ranks)]
        self._engine = _open(folder / f"engine-{number}")

    @property
    def files(self) -> Sequence[int]:
        """Return the descriptors whose locks must be held until the engine has ended."""
        return [*self._memory, self._engine]

    def is_requested(self) -> bool:
        """Return whether a process of the learner wants the GPUs or uses them."""
        free = [_lock(file, fcntl.LOCK_SH) for file in self._requests]
        for file in self._requests:
            fcntl.flock(file, fcntl.LOCK_UN)
        return not all(free)

    def take(self) -> bool:
        """Take the turn unless the learner wants it, or a former engine ends; return whether it was taken."""
        is_alone = _lock(self._engine, fcntl.LOCK_EX)
        if is_alone and not self.is_requested() and all(_lock(file, fcntl.LOCK_SH) for file in self._memory):
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

    def take(self, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Ask for the turn, and wait until the engines have given theirs; return False if interrupted.

        Raise DeadlineError after `wait_s`.
        """
        until = time.monotonic() + self._wait_s
        for file in (self._request, self._memory):
            while not _lock(file, fcntl.LOCK_EX):
                if time.monotonic() > until:
                    raise DeadlineError(
                        f"an engine of this node has kept the GPUs for {self._wait_s:.0f} s; see its log, or "
                        "raise engine.load_timeout_s"
                    )
                if is_interrupted():
                    self.give()
                    return False
                time.sleep(LOOK_S)
        return True

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
