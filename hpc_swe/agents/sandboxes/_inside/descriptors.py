# ruff: noqa: PTH115, PTH123, PTH208
"""Pass descriptors between the host and its sandboxes, although programs leave theirs unread.

Linux counts the descriptors that were sent over Unix sockets and not yet received, for each user over all
processes, and passes no further one while there are more of them than the sender may open. The programs of a
sandbox may open a quarter of what the host may, so they are refused first, all sandboxes together. But Linux
counts a message after it has checked the limit, so many threads at once can exceed it. Therefore process 1
of each sandbox checks whether the user has too many in flight, and kills its programs if some are theirs.

The text is sent to the container above that of `container`: standard library only.
"""

import contextlib
import errno
import os
import resource
import socket
import time

PASSING_S = 10.0
"""Seconds in which a refused descriptor is sent again; process 1 needs one to kill those who are to blame."""
MOST_LIST_BYTES = 1 << 20
TOO_MANY = "the programs of this user keep too many descriptors in flight"


def most_open_files() -> int:
    """Return the limit of open files for a sandbox's programs: a part of the limit that this process has."""
    return min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 4)


def send_files(receiver: socket.socket, message: bytes, files: list[int]) -> None:
    """Send a message with descriptors; try for a while when Linux refuses because of others in flight.

    Raise OSError if they were not sent; ETOOMANYREFS stands for that refusal.
    """
    deadline = time.monotonic() + PASSING_S
    while True:
        try:
            socket.send_fds(receiver, [message], files)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
        if time.monotonic() > deadline:
            raise OSError(errno.ETOOMANYREFS, TOO_MANY)
        time.sleep(0.02)


class InFlight:
    """Find out for process 1 of a sandbox whether its programs keep too many descriptors in flight."""

    def __init__(self) -> None:
        self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_suspect = False

    def are_too_many(self) -> bool:
        """Return whether the user has too many, and some are from here, now and at the last call."""
        was_suspect, self._is_suspect = self._is_suspect, self._exceed(2 * most_open_files()) and are_any()
        return was_suspect and self._is_suspect

    def _exceed(self, number: int) -> bool:
        """Return whether more than `number` are in flight: send one with that limit of open files."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))
        try:
            socket.send_fds(self._ends[0], [b"x"], [0])
            for file in socket.recv_fds(self._ends[1], 1, 1)[1]:
                os.close(file)
        except OSError as error:
            return error.errno == errno.ETOOMANYREFS
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return False


def are_any() -> bool:
    """Return whether a program of this sandbox has sent descriptors that wait to be received.

    They wait in a socket that is open in a process and shows their number, or in one that no process shows:
    that one is in flight itself, or its process hides it. A list of sockets that is too long hides some too.
    """
    with open("/proc/net/unix", "rb") as file:
        lines = file.read(MOST_LIST_BYTES).splitlines()[1:]
        if file.read(1):
            return True
    sockets = {fields[6] for line in lines if len(fields := line.split()) > 6}
    shown = {b"0"}  # what waits to be accepted counts for its listener
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile, or hides its files
            for number in os.listdir(f"/proc/{pid}/fd"):
                socket_id, waiting = _look(pid, number)
                shown.add(socket_id)
                if waiting and pid != "1":
                    return True
    return not sockets <= shown


def _look(pid: str, number: str) -> tuple[bytes, int]:
    """Return the inode of an open socket, and how many descriptors wait in it; b"0" for anything else."""
    with contextlib.suppress(OSError):
        kind, _, inode = os.readlink(f"/proc/{pid}/fd/{number}").rstrip("]").partition(":[")
        if kind == "socket":
            with open(f"/proc/{pid}/fdinfo/{number}") as file:
                return inode.encode(), sum(int(line[8:]) for line in file if line.startswith("scm_fds:"))
    return b"0", 0
