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

from hpc_swe.errors import StorageError
from hpc_swe.processes import MEETING, StoppedProcesses
from hpc_swe.store import atomic

BEAT_S = 2.0
LOOK_S = 1.0
SILENT = 180
"""Looks without a change; a busy node, or a library that blocks Python's threads, may delay beats."""
BEATS = "beat-"

log = logging.getLogger(__name__)


def start() -> None:
    """Start to beat in a thread, if this process has a supervisor."""
    folder, rank = os.environ.get(MEETING), os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if folder:
        heartbeat = _Heartbeat(Path(folder) / f"{BEATS}{rank}")
        threading.Thread(target=heartbeat.run, name="heartbeat", daemon=True).start()
        atexit.register(heartbeat.stop)  # a process that ends in order must not look frozen


class _Heartbeat:
    def __init__(self, path: Path) -> None:
        self._path, self._closed, self._lock = path, threading.Event(), threading.Lock()

    def run(self) -> None:
        for number in count():
            with self._lock:
                if self._closed.is_set():
                    return
                try:
                    atomic.write(self._path, str(number).encode(), durable=False)
                except (StorageError, OSError) as error:
                    log.debug("no beat: %s", error)  # the supervisor ended, or a later beat succeeds
            self._closed.wait(BEAT_S)

    def stop(self) -> None:
        self._closed.set()
        with self._lock:
            self._path.unlink(missing_ok=True)


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
        self._seen = {name: self._count(name, data) for name, data in self._read().items()}
        stopped = [f"process {pid} is stopped" for pid in self._stopped.find(children)]
        silent = [
            f"rank {name.removeprefix(BEATS)} gave no sign of life for {n * self._look_s:.0f} s"
            for name, (_, n) in self._seen.items()
            if n >= self._silent
        ]
        return "; ".join(stopped + silent)

    def _count(self, name: str, data: bytes) -> tuple[bytes, int]:
        before, looks = self._seen.get(name, (b"", 0))
        return data, 0 if data != before else looks + 1

    def _read(self) -> dict[str, bytes]:
        found = {}
        for path in self._folder.glob(f"{BEATS}*"):
            with contextlib.suppress(OSError):  # its process ended, or the file system does not answer
                found[path.name] = path.read_bytes()
        return found
