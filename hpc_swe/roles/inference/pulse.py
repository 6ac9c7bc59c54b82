"""Whether an engine is alive, asked again and again in a thread of its own.

A stopped or hung engine keeps its processes, its port and often its health route; only an answer of the
processes that sample tells it from one that works.
"""

import threading
import time
from collections.abc import Callable

from hpc_swe.errors import NoAnswer

ASKED = 6
"""Times within the limit."""


class Pulse:
    """Asks until the block ends."""

    def __init__(self, is_alive: Callable[[float], bool], limit_s: float) -> None:
        """`is_alive` is given the seconds after which an answer is none."""
        self._is_alive, self._limit_s = is_alive, limit_s
        self._closed = threading.Event()
        self.renew()

    def __enter__(self) -> "Pulse":
        threading.Thread(target=self._ask, name="pulse", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def renew(self) -> None:
        """It gave another sign of life, or was busy with what it was told to do."""
        self._last = time.monotonic()

    def require(self) -> None:
        """Look.

        Raises:
            NoAnswer: There was no sign of life for longer than the limit.
        """
        if (silent_s := time.monotonic() - self._last) > self._limit_s:
            raise NoAnswer(f"the engine gave no sign of life for {silent_s:.0f} s")

    def _ask(self) -> None:
        while not self._closed.wait(self._limit_s / ASKED):
            if self._is_alive(self._limit_s):
                self.renew()
