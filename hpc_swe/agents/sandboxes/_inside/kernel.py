# ruff: noqa: PTH123, PTH208
"""Count what the kernel keeps for the programs of a sandbox, and shows as the memory of no process.

Page tables, mappings and the buffers of pipes count in the sum of memory that process 1 bounds. Locks have a
bound of their own. A lock of a file that the sandbox shares with others, such as /dev/null, would hold up
programs outside of it, so whoever takes one is killed.

The text is sent to the container above that of `processes`: standard library only.
"""

import contextlib
import os
from collections.abc import Iterator

MOST_LOCKS = 4096
LOCK_LINE = 128
"""Bytes of a line of /proc/locks, at most."""
OWN_MOUNTS = ("/", "/dev", "/dev/pts", "/proc", "/sys")
MAP_BYTES, MOST_MAPS = 256, 65_530
"""Bytes that the kernel takes for one mapping, and how many of them it allows a process."""
FEW_FILES = 256
"""Open files of a process that count for nothing; a shell's table has room for so many."""
PIPE_BYTES = 4096
"""Bytes for each further open file: Linux gives a pipe two pages where its user has very many."""
MAPS_EVERY = 4
"""Looks from one count of the mappings to the next, which takes the longest."""


class KernelMemory:
    """Sum what the kernel keeps for all processes of this namespace but this one."""

    def __init__(self) -> None:
        self._looks = 0
        self._maps = 0

    def mb(self) -> float:
        """Return the megabytes; mappings are as at one of the last looks."""
        if self._looks % MAPS_EVERY == 0:
            self._maps = sum(map(_maps, others()))
        self._looks += 1
        return (MAP_BYTES * self._maps + sum(map(_tables_and_pipes, others()))) / (1 << 20)


def others() -> Iterator[str]:
    """Yield the numbers of all processes of this namespace but process 1."""
    yield from set(filter(str.isdigit, os.listdir("/proc"))) - {"1"}


def _maps(pid: str) -> int:
    """Count a process's mappings; one that hides them is taken to have as many as it may."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 16), b""))
    except PermissionError:
        return MOST_MAPS
    except OSError:  # it ended meanwhile
        return 0


def _tables_and_pipes(pid: str) -> int:
    fields = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # a name has any bytes
        fields = dict(line.split(b":", 1) for line in file)
    files = int(fields.get(b"FDSize", b"0"))
    tables = int(fields.get(b"VmPTE", b"0 kB").split()[0]) * 1024
    return tables + PIPE_BYTES * max(0, files - FEW_FILES)


def locks_too_much() -> bool:
    """Return whether programs of this sandbox hold too many locks, or one of a file that others use too."""
    with open("/proc/locks") as file:
        text = file.read(MOST_LOCKS * LOCK_LINE)
        is_all = not file.read(1)
    if not text:
        return False
    lines = [line.split() for line in text.splitlines()[: None if is_all else -1]]
    places = [words[6 if words[1] == "->" else 5] for words in lines if "-1" not in words[4:6]]
    shared = _shared_devices()
    return len(places) > MOST_LOCKS or any(place.rpartition(":")[0] in shared for place in places)


def _shared_devices() -> set[str]:
    """Return the devices of what is mounted into this sandbox, as /proc/locks writes them."""
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split() for line in file]
    numbers = [fields[2].split(":") for fields in mounts if fields[4] not in OWN_MOUNTS]
    return {f"{int(major):02x}:{int(minor):02x}" for major, minor in numbers}
