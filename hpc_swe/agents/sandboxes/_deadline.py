"""Wait for a command's answer until its time is over, which a busy host should not shorten."""

import socket
import time
from contextlib import suppress

from hpc_swe.agents.sandboxes.base import Clock
from hpc_swe.cluster.processes import pid_of, starved_s

CHECK_S = 0.2
"""Seconds between two readings of a clock other than wall time."""


def answer(host: socket.socket, timeout_s: float, clock: Clock) -> bytes | None:
    """Return what a command's overseer sends, nothing if it has ended, or None when the time is over."""
    deadline = clock() + timeout_s
    while (left_s := deadline - clock()) > 0:
        host.settimeout(left_s if clock is time.monotonic else min(left_s, CHECK_S))
        with suppress(TimeoutError):
            return host.recv(4096)
    return None


def own_time(handle: int, timeout_s: float, longest_s: float) -> Clock:
    """Return a clock for a command by the pidfd of its reaper or of process 1; it begins at 0.

    Beyond its time-out it leaves out how long the command was ready to run and had no processor, or else the
    result of tests would depend on the host's load. But processes can let one another wait: after `longest_s`
    of wall time the time is over.
    """
    began, process = time.monotonic(), pid_of(handle)
    waited_s = 0.0

    def seconds() -> float:
        nonlocal waited_s
        passed_s = time.monotonic() - began
        if passed_s >= longest_s:
            return float("inf")
        if passed_s - waited_s >= timeout_s:  # most commands have ended by then
            waited_s = max(waited_s, starved_s(process))  # the thread that waited most may have ended since
        return passed_s - waited_s

    return seconds
