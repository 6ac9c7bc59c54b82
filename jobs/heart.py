"""Signs of life of a job's processes, for the one that keeps them.

A rank that is stopped, or whose node hangs, ends nothing by itself: the others wait for it in a collective,
and its keeper for its exit code. So each process rewrites a small file in the job's meeting folder, and the
keeper counts its own looks at it without a change. Looks are counted, not seconds: a keeper that slept
wakes up to living children. One that the kernel calls stopped needs no more than a few looks.
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
"""Looks; a library that computes without letting threads run, or a busy node, may delay beats."""
BEATS = "beat-"

log = logging.getLogger(__name__)


def beat() -> None:
    """Show from now on, in a thread, that this process runs, where it has a keeper."""
    folder, rank = os.environ.get(MEETING), os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if folder:
        heart = _Heart(Path(folder) / f"{BEATS}{rank}")
        threading.Thread(target=heart.run, name="heart", daemon=True).start()
        atexit.register(heart.stop)  # who ends in order is not frozen


class _Heart:
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
                    log.debug("no beat: %s", error)  # the keeper ended, or the next one says so
            self._closed.wait(BEAT_S)

    def stop(self) -> None:
        self._closed.set()
        with self._lock:
            self._path.unlink(missing_ok=True)


class Watch:
    """The keeper's side."""

    def __init__(self, folder: Path, silent: int = SILENT, look_s: float = LOOK_S) -> None:
        self._folder, self._silent, self._look_s = folder, silent, look_s
        self._due = 0.0
        self._seen: dict[str, tuple[bytes, int]] = {}
        """By file: its last content, and looks since that changed."""
        self._stopped = StoppedProcesses()

    def frozen(self, children: Iterable[int]) -> str:
        """Look, at most once a second; who does not run any more, in words, or nothing."""
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
            with contextlib.suppress(OSError):  # it ended meanwhile, or the file system gives nothing
                found[path.name] = path.read_bytes()
        return found
