"""Processes of this machine, by what Linux says of them."""

import contextlib
import ctypes
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # loaded here, since a child between fork and exec must not


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks; None when there is none. A pid alone may come back."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def descendants(pid: int) -> list[int]:
    """Children, their children and so on."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for child in map(int, listing.read_text().split()):
                found += [child, *descendants(child)]
    return found


def die_with_parent() -> None:
    """For `preexec_fn`: the child is killed when the thread that started it ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
