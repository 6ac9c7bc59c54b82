"""Check repeatedly, in a thread, whether an engine is alive.

A stopped or hung engine keeps its processes, its port and often its health route; only an answer of the
processes that sample tells it from one that works.
"""

import threading
import time
from collections.abc import Callable

from hpc_swe.base.errors import NoAnswer

CHECKS = 6
"""Checks within the limit."""


class LivenessMonitor:
    """Check an engine in a thread until the `with` block ends."""

    def __init__(self, is_alive: Callable[[float], bool], limit_s: float) -> None:
        """Take the check `is_alive`, which is called with its time-out in seconds."""
        self._is_alive, self._limit_s = is_alive, limit_s
        self._closed = threading.Event()
        self.reset()

    def __enter__(self) -> "LivenessMonitor":
        threading.Thread(target=self._run, name="liveness", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def reset(self) -> None:
        """Restart the clock: the engine answered, or was busy with an order of ours."""
        self._last = time.monotonic()

    def require_alive(self) -> None:
        """Raise NoAnswer if there was no sign of life for longer than the limit."""
        if (silent_s := time.monotonic() - self._last) > self._limit_s:
            raise NoAnswer(f"the engine gave no sign of life for {silent_s:.0f} s")

    def _run(self) -> None:
        while not self._closed.wait(self._limit_s / CHECKS):
            if self._is_alive(self._limit_s):
                self.reset()
