"""Images unpacked to a node's own disk, once per node, by whoever needs one first.

    <local>/hpc_swe-<uid>/                     ours alone, or not used; locked while an image is unpacked
        <image>-<size>-<time of change>.<boot> locked, shared, by each process that runs a container of it
            tree/, bytes
        anything else                          being unpacked, or left by a dead process or node

Locks are flock's: they end with the process that holds them, whatever ended it. What fails here costs speed
only, since the .sif can be run as it is; so it is said once and nothing is raised.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_swe.processes import die_with_parent

log = logging.getLogger(__name__)

SQUASHFS = re.compile(r"\|(\d+)-\d+ *\|FS \(Squashfs/\*System")
"""Where a .sif holds its files, in what `apptainer sif list` prints."""
# What only root can make, and no image is asked for: a sandbox has a /dev of its own.
_DEVICE = re.compile(r"create_inode: could not create \w+ device .*because you're not superuser")
_NOT_ALL = 2
_GROWTH = 4  # an image unpacked takes about three times its .sif
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_told: set[str] = set()


class _Unfit(Exception):
    """Why the .sif is used as it is."""


_FAILURES = (_Unfit, OSError, ValueError, subprocess.SubprocessError)


@dataclass(frozen=True)
class LocalImages:
    """The unpacked images of this node."""

    folder: str
    most_gb: float
    timeout_s: float
    executable: str

    @contextmanager
    def unpacked(self, sif: Path) -> Iterator[Path | None]:
        """The image's tree, there until exit; None when this node cannot have it."""
        with ExitStack() as held:
            try:
                tree = self._borrowed(sif, held)
            except _FAILURES as error:
                _tell(self.folder, str(error))
                tree = None
            yield tree

    def forget(self, tree: Path) -> None:
        """Remove a tree that a cleaner of the disk has thinned, unless somebody still runs it."""
        image, root = tree.parent, tree.parent.parent
        try:
            with ExitStack() as alone:
                _await(_open(root, alone), self.timeout_s, root)
                if _evict(image):
                    log.warning("thinned: %s did not start, though its .sif does; it is forgotten", image)
        except _FAILURES as error:
            _tell(self.folder, str(error))

    def _borrowed(self, sif: Path, held: ExitStack) -> Path:
        root = _root(self.folder)
        about = sif.stat()
        boot = "." + _BOOT.read_text()[:8]
        image = root / f"{sif.stem}-{about.st_size:x}-{about.st_mtime_ns:x}{boot}"
        if not _hold(image, held):
            with ExitStack() as alone:
                lock = _open(root, alone)
                _await(lock, self.timeout_s, root)
                if not _hold(image, held):
                    for leftover in root.iterdir():
                        if not leftover.name.endswith(boot):
                            _remove(leftover)
                    _make_room(root, _GROWTH * about.st_size, int(self.most_gb * 1e9))
                    self._unpack(sif, image, lock)
                    if not _hold(image, held):
                        raise _Unfit(f"{image} has gone again")
        os.utime(image)
        return image / "tree"

    def _unpack(self, sif: Path, image: Path, lock: int) -> None:
        part = image.with_name(f"{image.name}.part")
        part.mkdir()
        try:
            command = ["unsquashfs", "-quiet", "-no-progress", "-no-xattrs"]
            place = ["-offset", str(self._offset(sif)), "-dest", str(part / "tree"), str(sif)]
            # It keeps the lock, should this process die first.
            _run([*command, *place], self.timeout_s, lock)
            (part / "bytes").write_text(
                _run(["du", "-s", "-B1", str(part / "tree")], self.timeout_s).split()[0]
            )
            part.rename(image)
        finally:
            _remove(part)

    def _offset(self, sif: Path) -> int:
        listing = _run([self.executable, "sif", "list", str(sif)], self.timeout_s)
        found = SQUASHFS.search(listing)
        if not found:
            raise _Unfit(f"{sif.name} holds no plain squashfs")
        return int(found[1])


def _root(folder: str) -> Path:
    place = os.path.expandvars(folder)
    if "$" in place:
        raise _Unfit("there is no such environment variable here")
    root = Path(place, f"hpc_swe-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    about = root.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise _Unfit(f"{root} is no folder of ours alone (mode 0700)")
    return root


def _open(folder: Path, until: ExitStack) -> int:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    until.callback(os.close, handle)
    return handle


def _await(lock: int, timeout_s: float, root: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _Unfit(f"another process has unpacked in {root} for {timeout_s:.0f} s") from None
        time.sleep(0.05)


def _hold(image: Path, held: ExitStack) -> bool:
    """Whether it is there, and from now on stays."""
    with ExitStack() as opened:
        try:
            handle = _open(image, opened)
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), image.stat()):
                return False
        except (FileNotFoundError, BlockingIOError):
            return False  # or it is just being removed
        held.push(opened.pop_all())
    return True


def _make_room(root: Path, needed: int, most: int) -> None:
    """Remove whose use is longest ago, but none that is in use."""
    images = sorted(root.iterdir(), key=lambda image: image.stat().st_mtime_ns)
    sizes = {image: size for image in images if (size := _size(image)) or not _evict(image)}
    while needed > min(shutil.disk_usage(root).free, most - sum(sizes.values())):
        victim = next((image for image in images if image in sizes and _evict(image)), None)
        if victim is None:
            raise _Unfit(f"no room for {needed / 1e9:.1f} GB in {root} beside the images in use")
        del sizes[victim]


def _size(image: Path) -> int:
    """What it takes, as noted when it was unpacked; 0 when a cleaner of the disk has been at it."""
    try:
        return int((image / "bytes").read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _evict(image: Path) -> bool:
    with ExitStack() as opened:
        try:
            fcntl.flock(_open(image, opened), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        part = image.with_name(f"{image.name}.part")
        image.rename(part)  # at once, so that no half of an image is ever taken for a whole one
    _remove(part)
    return True


def _remove(tree: Path) -> None:
    if tree.exists():
        subprocess.run(["chmod", "-R", "u+rwX", tree], stderr=subprocess.DEVNULL)
        shutil.rmtree(tree, ignore_errors=True)


def _run(command: list[str], timeout_s: float, *kept: int) -> str:
    done = subprocess.run(
        command, timeout=timeout_s, capture_output=True, text=True, pass_fds=kept, preexec_fn=die_with_parent
    )
    wrong = [line for line in done.stderr.splitlines() if line and not _DEVICE.match(line)]
    if done.returncode and (wrong or done.returncode != _NOT_ALL):
        raise _Unfit(f"{command[0]}: {' '.join(wrong)[-300:] or done.returncode}")
    return done.stdout


def _tell(folder: str, reason: str) -> None:
    if folder not in _told:
        _told.add(folder)
        log.warning("packed: local = %r: %s; sandboxes start from .sif files (said once)", folder, reason)
