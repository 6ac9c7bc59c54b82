"""Processes of this machine, by what Linux says of them."""

import contextlib
import ctypes
import os
import select
import signal
import socket
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

PR_SET_PDEATHSIG = 1
OF_KERNEL = 0x00200000  # PF_KTHREAD of linux/sched.h: no program, so no environment
LOOKS = 100
MEETING = "HPC_SWE_MEETING"
"""The environment variable that names the folder in which the processes of a job meet."""
LIBC = ctypes.CDLL(None)  # loaded here, since a child between fork and exec must not


class Flag:
    """Tell threads and signal handlers of one process that something has happened.

    A signal handler must not set a `threading.Event`: `set` takes the lock that an interrupted `wait` of the
    same thread may hold, and the process would wait for itself for ever. This one is the kernel's and has no
    lock.
    """

    def __init__(self) -> None:
        self._file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._file).atexit = False  # daemon threads may set it until the end

    def set(self) -> None:
        """Set the flag; it stays set until `clear`."""
        os.eventfd_write(self._file, 1)

    def clear(self) -> None:
        """Take the flag back."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._file)

    def is_set(self) -> bool:
        """Tell whether the flag is set."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, for at most `seconds`; returns whether it is."""
        look = select.poll()
        look.register(self._file, select.POLLIN)
        return bool(look.poll(seconds * 1000))


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


def leader(pid: int) -> int:
    """The leader of its process group; 0 when there is no such process."""
    fields = _stat(pid)
    return int(fields[2]) if fields else 0


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped it with a signal."""
    return _stat(pid)[:1] in (["T"], ["t"])


class Stopped:
    """Finds processes that stay stopped; a debugger or a scheduler may stop one for a moment."""

    def __init__(self, looks: int = 10) -> None:
        self._looks = looks
        self._seen: dict[int, int] = {}

    def look(self, pids: Iterable[int]) -> list[int]:
        """Return those that were stopped at this look and at all of the last ones."""
        self._seen = {pid: self._seen.get(pid, 0) + 1 for pid in pids if is_stopped(pid)}
        return [pid for pid, looks in self._seen.items() if looks >= self._looks]


def variable(pid: int, name: str) -> str | None:
    """An environment variable, as it was when the process began its program; None when it cannot be read."""
    start = os.fsencode(f"{name}=")
    words = _environ(pid).split(b"\0")
    return next((os.fsdecode(word[len(start) :]) for word in words if word.startswith(start)), None)


def with_variable(name: str) -> dict[int, str]:
    """Its value for each living process that has it, as far as this user may look."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    found = {pid: value for pid in pids if (value := variable(pid, name)) is not None}
    return {pid: value for pid, value in found.items() if start_time(pid)}


def _environ(pid: int) -> bytes:
    """A process that is just beginning a program shows nothing for a moment, so it is looked at again."""
    for _ in range(LOOKS):
        try:
            if found := Path(f"/proc/{pid}/environ").read_bytes():
                return found
        except OSError:
            break
        fields = _stat(pid) or ["X"]
        if fields[0] in "ZX" or int(fields[6]) & OF_KERNEL:
            break
        time.sleep(0.001)
    return b""


def _stat(pid: int) -> list[str]:
    """From its state on; nothing once it has ended. Its name comes before, in bytes of its own choice."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def free_port(host: str = "", wanted: int = 0) -> int:
    """Return a TCP port of this machine that is free now: `wanted`, or any for 0.

    Raises:
        OSError: The host is not this machine's, or the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, wanted))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """For `preexec_fn`: the child is killed when the thread that started it ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
