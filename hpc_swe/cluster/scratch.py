"""Make node-local folders that are removed after the processes that use them die, even if killed.

A file in each folder lists its owners: processes by pid and start time, within one boot and one pid
namespace. Making a folder first sweeps all folders whose owners are dead, and empty ones whose maker was
killed before it could list itself. A folder of another user, namespace or program is never touched.
"""

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_swe.cluster.processes import start_time

PREFIX = "hpc_swe-"
OWNERS = "owners"
SHARED = "shared_memory"
MEMORY = Path("/dev/shm")
MAKING_S = 10.0  # seconds after which nobody is about to list itself in an empty folder
LONGEST = 40  # characters of TMPDIR: a socket's path has at most 107, and an engine adds about 50


def make(places: Sequence[Path] = ()) -> Path:
    """Make a folder of this process, mode 0700, in the first of `places`, after a sweep of all of them.

    `places` defaults to TMPDIR and /tmp; /tmp comes first when TMPDIR is too long for the paths of sockets.
    """
    sweep(places)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=(places or _places())[0]))
    own(folder)
    return folder


def own(folder: Path) -> None:
    """Register this process as another owner of the folder."""
    pid = os.getpid()
    with (folder / OWNERS).open("a") as file:
        file.write(f"{pid} {start_time(pid)} {_boot_and_namespace()}\n")


def note_memory(folder: Path, pids: Iterable[int]) -> None:
    """Record the shared memory that processes have mapped: nobody knows its owner once they are dead."""
    lines = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()  # some thousand lines
            words = [line.split() for line in mapped if f" {MEMORY}/" in line]
            lines |= {f"{w[4]} {w[5]}" for w in words if len(w) == 6 and Path(w[5]).parent == MEMORY}
    if new := sorted(lines.difference(_lines(folder / SHARED))):
        with (folder / SHARED).open("a") as file:
            file.writelines(f"{line}\n" for line in new)


def remove(folder: Path) -> None:
    """Remove a folder, and the shared memory that was recorded in it."""
    for line in _lines(folder / SHARED):
        inode, _, name = line.partition(" ")
        with contextlib.suppress(OSError):
            if (found := Path(name).stat()).st_ino == int(inode) and found.st_uid == os.getuid():
                Path(name).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def sweep(places: Sequence[Path] = ()) -> list[Path]:
    """Remove the folders whose owners are all dead, and return them."""
    left = [path for place in places or _places() for path in place.glob(f"{PREFIX}*") if _is_left(path)]
    for path in left:
        remove(path)
    return left


def _is_left(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, TypeError):  # it is gone, or another program made it
        found = folder.lstat()
        owners = [line.split() for line in _lines(folder / OWNERS)]
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        if not owners:
            return not os.listdir(folder) and time.time() - found.st_mtime > MAKING_S
        return all(_is_dead(*owner) for owner in owners)
    return False


def _is_dead(pid: str, started: str, boot: str, namespace: str) -> bool:
    this_boot, this_namespace = _boot_and_namespace().split()
    if boot != this_boot:
        return True  # the node has been rebooted since
    return namespace == this_namespace and start_time(int(pid)) != started


def _boot_and_namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:  # no owner, no shared memory, or another process removes the folder
        return []


def _places() -> list[Path]:
    """Return the folders in which scratch folders are made, the preferred one first."""
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")
    return [usual, short] if len(str(usual)) <= LONGEST else [short, usual]
