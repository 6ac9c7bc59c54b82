"""Wait for a command's answer until its time is over, which a busy host should not shorten."""

import socket
import time
from contextlib import suppress

from hpc_swe.agents.sandboxes.base import LONGEST, Clock
from hpc_swe.cluster.processes import number_of, starved_s

CHECK_S = 0.2
"""Seconds between two readings of a clock other than wall time."""


def answer(host: socket.socket, timeout_s: float, clock: Clock) -> bytes | None:
    """Return what a command's overseer sends, nothing if it has ended, or None when the time is over."""
    deadline = clock() + timeout_s
    while (left_s := deadline - clock()) > 0:
        host.settimeout(min(left_s, CHECK_S))
        with suppress(TimeoutError):
            return host.recv(4096)
    return None


def own_time(handle: int, limit_s: float) -> Clock:
    """Return a clock for a program by the pidfd of its process or of an ancestor; it begins at 0.

    Beyond the limit it leaves out how long the program waited for a processor, or else the result of tests
    would depend on the host's load. But a program can let its own processes wait for one another, so wall
    time ends it, too.
    """
    began, process = time.monotonic(), number_of(handle)

    def seconds() -> float:
        passed_s = time.monotonic() - began
        if passed_s < limit_s:  # most programs end by then, and looking at processes takes time
            return passed_s
        return max(passed_s - starved_s(process), passed_s / LONGEST)

    return seconds
