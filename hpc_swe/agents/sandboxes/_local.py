"""Unpack images to a node's own disk, once per node; the first process that needs one does it.

    <local>/hpc_swe-<uid>/                     private to this user, or unused; locked while one unpacks
        <image>-<size>-<time of change>.<boot> locked, shared, by each process that runs a container of it
            tree/, bytes
        anything else                          an unfinished image, or what a dead process or node left

Locks are those of flock: they end with the process that holds them, whatever ended it. A failure here costs
speed only, since the .sif itself can be run. So it is logged once, and nothing is raised.
"""

import fcntl
import logging
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc_swe.agents.sif import squashfs_offset
from hpc_swe.cluster.processes import completed, die_with_parent

log = logging.getLogger(__name__)

# Only root can make devices, and no sandbox needs those of its image: it has a /dev of its own.
_DEVICE = re.compile(r"create_inode: could not create \w+ device .*because you're not superuser")
_INCOMPLETE = 2  # exit code of unsquashfs when it could not make every file
_GROWTH = 4  # an unpacked image takes about three times the space of its .sif
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_warned: set[str] = set()


_FAILURES = (OSError, ValueError, subprocess.SubprocessError)


@dataclass(frozen=True)
class LocalImages:
    """Provide the unpacked images of this node."""

    folder: str
    most_gb: float
    timeout_s: float
    executable: str

    @contextmanager
    def unpacked(self, sif: Path) -> Iterator[Path | None]:
        """Return the image's tree, which stays until exit; None when this node cannot unpack it."""
        with ExitStack() as held:
            try:
                tree = self._hold_tree(sif, held)
            except _FAILURES as error:
                _warn_once(self.folder, str(error))
                tree = None
            yield tree

    def forget(self, tree: Path) -> None:
        """Remove a tree of which a cleaner of the disk deleted files, unless a process still runs it."""
        image, root = tree.parent, tree.parent.parent
        try:
            with ExitStack() as alone:
                lock = _lock(root, self.timeout_s, alone)
                if _evict(image, self.timeout_s, lock):
                    log.warning("thinned: %s did not start, though its .sif does; it is removed", image)
        except _FAILURES as error:
            _warn_once(self.folder, str(error))

    def _hold_tree(self, sif: Path, held: ExitStack) -> Path:
        root = _root(self.folder)
        state = sif.stat()
        boot = "." + _BOOT.read_text()[:8]
        image = root / f"{sif.stem}-{state.st_size:x}-{state.st_mtime_ns:x}{boot}"
        if not _hold(image, held):
            with ExitStack() as alone:
                lock = _lock(root, self.timeout_s, alone)
                if not _hold(image, held):
                    for leftover in root.iterdir():
                        if not leftover.name.endswith(boot):
                            _remove(leftover, self.timeout_s, lock)
                    self._make_room(root, _GROWTH * state.st_size, lock)
                    self._unpack(sif, image, lock)
                    if not _hold(image, held):
                        raise OSError(f"{image} was removed at once")
        os.utime(image)
        return image / "tree"

    def _unpack(self, sif: Path, image: Path, lock: int) -> None:
        offset = squashfs_offset(_run([self.executable, "sif", "list", str(sif)], self.timeout_s))
        if offset is None:
            raise OSError(f"{sif.name} holds no plain squashfs")
        part = image.with_name(f"{image.name}.part")
        part.mkdir()
        try:
            command = ["unsquashfs", "-quiet", "-no-progress", "-no-xattrs"]
            place = ["-offset", str(offset), "-dest", str(part / "tree"), str(sif)]
            # unsquashfs inherits the lock, and holds it should this process die first.
            _run([*command, *place], self.timeout_s, lock)
            listing = _run(["du", "-s", "-B1", str(part / "tree")], self.timeout_s)
            (part / "bytes").write_text(listing.split()[0])
            part.rename(image)
        finally:
            _remove(part, self.timeout_s, lock)

    def _make_room(self, root: Path, needed: int, lock: int) -> None:
        """Remove the least recently used images, but none in use, until `needed` bytes are free."""
        evict, most = partial(_evict, timeout_s=self.timeout_s, lock=lock), int(self.most_gb * 1e9)
        images = sorted(root.iterdir(), key=lambda image: image.stat().st_mtime_ns)
        sizes = {image: size for image in images if (size := _size(image)) or not evict(image)}
        while needed > min(shutil.disk_usage(root).free, most - sum(sizes.values())):
            victim = next((image for image in images if image in sizes and evict(image)), None)
            if victim is None:
                raise OSError(f"no room for {needed / 1e9:.1f} GB in {root} beside the images in use")
            del sizes[victim]


def _root(folder: str) -> Path:
    expanded = os.path.expandvars(folder)
    if "$" in expanded:
        raise OSError("there is no such environment variable here")
    root = Path(expanded, f"hpc_swe-{os.geteuid()}")
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    state = root.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise OSError(f"{root} is no private folder of this user (mode 0700)")
    return root


def _open(folder: Path, until: ExitStack) -> int:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    until.callback(os.close, handle)
    return handle


def _lock(root: Path, timeout_s: float, until: ExitStack) -> int:
    handle, deadline = _open(root, until), time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(f"another process has been unpacking in {root} for {timeout_s:.0f} s") from None
        time.sleep(0.05)


def _hold(image: Path, held: ExitStack) -> bool:
    """Keep an unpacked image until `held` closes; return False when there is none."""
    with ExitStack() as opened:
        try:
            handle = _open(image, opened)
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), image.stat()):
                return False
        except (FileNotFoundError, BlockingIOError):
            return False  # missing, or just being removed
        held.push(opened.pop_all())
    return True


def _size(image: Path) -> int:
    """Return the size that was recorded when it was unpacked; 0 when a cleaner deleted the record."""
    try:
        return int((image / "bytes").read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _evict(image: Path, timeout_s: float, lock: int) -> bool:
    with ExitStack() as opened:
        try:
            fcntl.flock(_open(image, opened), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        part = image.with_name(f"{image.name}.part")
        image.rename(part)  # atomic, so that no half of an image is ever taken for a whole one
    _remove(part, timeout_s, lock)
    return True


def _remove(tree: Path, timeout_s: float, lock: int) -> None:
    """Remove a tree as far as possible; raise TimeoutExpired if that takes too long.

    A command that the disk does not let end keeps the lock, so that nobody unpacks there meanwhile.
    """
    if tree.exists():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            with suppress(OSError):
                _run([*command, str(tree)], timeout_s, lock)


def _run(command: list[str], timeout_s: float, *kept: int) -> str:
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=kept,
        preexec_fn=die_with_parent,
    )
    done = completed(job, timeout_s)
    errors = [line for line in done.stderr.splitlines() if line and not _DEVICE.match(line)]
    if done.returncode and (errors or done.returncode != _INCOMPLETE):
        raise OSError(f"{command[0]}: {' '.join(errors)[-300:] or done.returncode}")
    return done.stdout


def _warn_once(folder: str, reason: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        log.warning("packed: local = %r: %s; sandboxes start from .sif files (logged once)", folder, reason)
