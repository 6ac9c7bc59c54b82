"""Let the processes of a job show signs of life to `jobs.run`, which supervises them.

A rank that is stopped, or whose node hangs, ends nothing by itself: the other ranks wait for it in a
collective, and the supervisor waits for its exit code. So each process rewrites a small file in the job's
meeting folder, and the supervisor counts its own looks at the file without a change. It counts looks, not
seconds, so that it does not find its children dead after it was suspended itself. For a process that the
kernel reports as stopped a few looks suffice.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from hpc_swe.cluster.processes import MEETING, StoppedProcesses

BEAT_S = 2.0
LOOK_S = 1.0
SILENT = 180
"""Looks without a change; a busy node, or a library that blocks Python's threads, may delay beats."""
BEATS = "beat-"

log = logging.getLogger(__name__)


def start() -> None:
    """Start to beat in a thread, if this process has a supervisor."""
    folder, rank = os.environ.get(MEETING), os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if not folder:
        return
    path, closed = Path(folder) / f"{BEATS}{rank}", threading.Event()
    thread = threading.Thread(target=_run, args=(path, closed), name="heartbeat", daemon=True)
    thread.start()

    def stop() -> None:
        closed.set()
        thread.join()
        path.unlink(missing_ok=True)

    atexit.register(stop)  # a process that ends in order must not look frozen


def _run(path: Path, closed: threading.Event) -> None:
    for number in count():
        try:
            # In place: on a file system that has become full, a new file would be refused.
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(f"{number:20d}".encode())
        except OSError as error:
            log.debug("no beat: %s", error)  # the supervisor ended, or a later beat succeeds
        if closed.wait(BEAT_S):
            return


class HeartbeatMonitor:
    """Find the processes of a job that no longer run, for their supervisor."""

    def __init__(self, folder: Path, silent: int = SILENT, look_s: float = LOOK_S) -> None:
        self._folder, self._silent, self._look_s = folder, silent, look_s
        self._due = 0.0
        self._seen: dict[str, tuple[bytes, int]] = {}
        """File name -> its last content, and the looks since it changed."""
        self._stopped = StoppedProcesses()

    def frozen(self, children: Iterable[int]) -> str:
        """Look at most once per `look_s`; return a message about processes that no longer run, or ""."""
        if time.monotonic() < self._due:
            return ""
        self._due = time.monotonic() + self._look_s
        seen = {}
        for path in self._folder.glob(f"{BEATS}*"):
            with contextlib.suppress(OSError):  # its process ended, or the file system does not answer
                before, looks = self._seen.get(path.name, (b"", 0))
                data = path.read_bytes()
                seen[path.name] = data, 0 if data != before else looks + 1
        self._seen = seen
        stopped = [f"process {pid} is stopped" for pid in self._stopped.find(children)]
        silent = [
            f"rank {name.removeprefix(BEATS)} gave no sign of life for {n * self._look_s:.0f} s"
            for name, (data, n) in self._seen.items()
            if data and n >= self._silent  # a full file system makes the file, and takes no content
        ]
        return "; ".join(stopped + silent)
