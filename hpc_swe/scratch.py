"""Node-local folders that go with the processes that use them, also when these were killed.

Each holds a file that tells whose it is: processes by pid and start time, within one boot and one pid
namespace. Whoever makes the next folder sweeps those whose processes are all dead. A folder of another
user, namespace or program is never touched.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_swe.processes import start_time

PREFIX = "hpc_swe-"
OWNERS = "owners"
SHARED = "shared_memory"
MEMORY = Path("/dev/shm")
LONGEST = 40  # characters of TMPDIR: a socket's path holds 107, and an engine needs about 50 of its own


def make(places: Sequence[Path] = ()) -> Path:
    """A folder of this process, mode 0700, in the first place; those of the dead are swept in all.

    `places` are TMPDIR and /tmp, the first of them whose name is short enough for sockets.
    """
    sweep(places)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=(places or _places())[0]))
    own(folder)
    return folder


def own(folder: Path) -> None:
    """This process uses the folder, too."""
    pid = os.getpid()
    with (folder / OWNERS).open("a") as file:
        file.write(f"{pid} {start_time(pid)} {_world()}\n")


def note_memory(folder: Path, pids: Iterable[int]) -> None:
    """Keep the names of shared memory that processes have mapped: afterwards nobody can tell whose it was."""
    lines = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            lines |= {f"{w[4]} {w[5]}" for w in words if len(w) == 6 and Path(w[5]).parent == MEMORY}
    known = _lines(folder / SHARED)
    if new := sorted(lines - set(known)):
        with (folder / SHARED).open("a") as file:
            file.writelines(f"{line}\n" for line in new)


def remove(folder: Path) -> None:
    """The folder, and the shared memory that was noted in it."""
    for line in _lines(folder / SHARED):
        inode, _, name = line.partition(" ")
        with contextlib.suppress(OSError):
            if (found := Path(name).stat()).st_ino == int(inode) and found.st_uid == os.getuid():
                Path(name).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def sweep(places: Sequence[Path] = ()) -> list[Path]:
    """Remove what dead processes left; returns it."""
    left = [path for place in places or _places() for path in place.glob(f"{PREFIX}*") if _is_left(path)]
    for path in left:
        remove(path)
    return left


def _is_left(folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, TypeError):  # gone meanwhile, or not of our writing
        found = folder.lstat()
        owners = [line.split() for line in _lines(folder / OWNERS)]
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        return is_ours and bool(owners) and all(_is_dead(*owner) for owner in owners)
    return False


def _is_dead(pid: str, began: str, boot: str, namespace: str) -> bool:
    ours = _world().split()
    if boot != ours[0]:
        return True  # the node was started anew since
    return namespace == ours[1] and start_time(int(pid)) != began


def _world() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _places() -> list[Path]:
    """Where folders are made, and where earlier ones may lie."""
    usual, short = Path(tempfile.gettempdir()), Path("/tmp")
    return [usual, short] if len(str(usual)) <= LONGEST else [short, usual]
