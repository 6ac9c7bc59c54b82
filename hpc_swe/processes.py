"""Processes of this machine, by what Linux says of them."""

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # loaded here, since a child between fork and exec must not


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks; None when there is none. A pid alone may come back."""
    state, *fields = _stat(pid) or ["X"]
    return None if state in "ZX" else fields[18]


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, each after its parent.

    Every process is asked for its parent: each thread lists its children, but while one ends they are in
    no list.
    """
    children: dict[int, list[int]] = {}
    for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if fields := _stat(each):
            children.setdefault(int(fields[1]), []).append(each)
    found = list(children.get(pid, []))
    for each in found:  # which grows meanwhile
        found += children.get(each, [])
    return found


def _stat(pid: int) -> list[str]:
    """From its state on; nothing once it has ended. Its name comes before, in bytes of its own choice."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def die_with_parent() -> None:
    """For `preexec_fn`: the child is killed when the thread that started it ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
