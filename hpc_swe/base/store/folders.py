"""Publish folders: many large files that belong together, committed by one rename.

Files are written into a hidden folder beside the final one, the manifest last; the rename onto the final
name is the commit. A folder that exists is therefore complete, and of two writers one gets LostRace. A path
that has the name of such a folder, but no manifest of the same version, was not published by a process of
the run: readers skip it, and a writer moves it aside when it needs the name.
"""

import contextlib
import errno
import hashlib
import io
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hpc_swe.base.errors import CorruptRecord, LostRace, StorageError
from hpc_swe.base.records import FileInfo, Manifest
from hpc_swe.base.store import atomic

M = TypeVar("M", bound=Manifest)
K = TypeVar("K")
NAME, TRASH = "MANIFEST.json", ".trash-"
SMALL = 1 << 17
OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
PIECE = 1 << 22
NICE = 10
"""Verification gives way to the engines and workers of the same node."""
Identity = tuple[int, int, int]
"""Size, time of the last change in nanoseconds, inode: another file or content differs in one of them."""
_KEYS: dict[Path, Any] = {}
"""Keys of folders whose manifest was read: a published folder never changes."""
_FOREIGN: set[Path] = set()
"""Paths that a warning was logged for."""

log = logging.getLogger(__name__)


def staging(final: Path) -> Path:
    """Make the hidden folder that will become `final`."""
    folder = atomic.temporary(final, "tmp-")
    with atomic.storage(folder):
        folder.mkdir(parents=True)
    return folder


def require_room(stage: Path) -> None:
    """Raise StorageError when the file system has no room for a small file; errors of libraries say less."""
    probe = stage / "room"
    atomic.write(probe, bytes(SMALL))
    probe.unlink(missing_ok=True)  # another process may have removed it


def commit(stage: Path, final: Path, manifest: Manifest, check: Callable[[], None] = lambda: None) -> None:
    """Make the files durable, write the manifest and rename; raise LostRace if `final` was published first.

    `check` is called just before the rename, and prevents it by an error. After an error the caller removes
    the stage.
    """
    try:
        with atomic.storage(final):
            for name in manifest.files:
                with (stage / name).open("rb") as file:
                    os.fsync(file.fileno())
            atomic.put(stage / NAME, manifest)
            check()
            try:
                os.rename(stage, final)
            except OSError as error:
                if error.errno not in OCCUPIED:
                    raise
                _clear(final, type(manifest))
                os.rename(stage, final)
    except OSError as error:
        if error.errno in OCCUPIED:
            raise LostRace(f"{final} was published by another process") from None
        raise


def publish(final: Path, fill: Callable[[Path], Manifest]) -> None:
    """Fill a stage and commit it; `fill` returns the manifest of what it wrote."""
    stage = staging(final)
    try:
        commit(stage, final, fill(stage))
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def describe(path: Path) -> FileInfo:
    """Return the size and the checksum of a file just written."""
    with atomic.storage(path), path.open("rb") as file:
        return FileInfo(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def write(stage: Path, name: str, data: bytes) -> FileInfo:
    """Write one file into a stage."""
    with atomic.storage(stage / name):
        (stage / name).write_bytes(data)
    return FileInfo(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def manifest(folder: Path, kind: type[M]) -> M:
    """Read the manifest of a published folder."""
    return atomic.get(folder / NAME, kind)


def published(parent: Path, kind: type[M], key: Callable[[M], K], place: Callable[[K], Path]) -> list[K]:
    """List the keys of the published folders below `parent`, in the order of their names.

    A folder counts when it is at the `place` of its manifest's key. A process reads each manifest once.
    Anything else below `parent` is skipped with one warning.
    """
    found: list[K] = []
    for path in [parent / name for name in atomic.names(parent)]:
        if path not in _KEYS:
            with contextlib.suppress(FileNotFoundError, CorruptRecord):
                named = key(manifest(path, kind))
                if place(named) == path:
                    _KEYS[path] = named
        if path in _KEYS:
            found.append(_KEYS[path])
        elif path not in _FOREIGN:
            _FOREIGN.add(path)
            log.warning("passed over %r: no folder that a process of the run published", str(path))
    return found


def read(folder: Path, name: str, listed: Manifest) -> bytes:
    """Read one file of a published folder and check it against the folder's manifest.

    Raise CorruptRecord if it is missing, not listed, or differs from what was published; FileNotFoundError if
    retention removed the whole folder.
    """
    path, info = folder / name, listed.files.get(name)
    if info is None:
        raise CorruptRecord(
            f"{path}: not in the folder's manifest; it lists {', '.join(sorted(listed.files))}"
        )
    with _listed(path) as file:
        data = file.read()
    if len(data) != info.size or hashlib.sha256(data).hexdigest() != info.sha256:
        size = f"{len(data)} bytes, not the {info.size} that were published"
        what = size if len(data) != info.size else "its sha256 is not the manifest's"
        raise CorruptRecord(f"{path}: {what}; put it back, or remove the folder")
    return data


def verify(folder: Path, listed: Manifest, is_cancelled: Callable[[], bool]) -> dict[str, Identity]:
    """Check all files of a published folder against its manifest; return the identity of each file read.

    Raise CorruptRecord if one is missing or differs, FileNotFoundError if retention removed the whole folder,
    and CancelledError if `is_cancelled` returned True meanwhile.
    """

    def check(name: str) -> Identity:
        with _listed(folder / name) as file:
            seen = identity(file.fileno())
            digest = hashlib.sha256()
            while piece := file.read(PIECE):
                digest.update(piece)
                if is_cancelled():
                    raise CancelledError
            is_same = seen == identity(file.fileno())
        if not is_same or digest.hexdigest() != listed.files[name].sha256:
            raise CorruptRecord(f"{folder / name}: its sha256 is not the manifest's")
        return seen

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), initializer=_lower_priority) as pool:
        return dict(zip(listed.files, pool.map(check, listed.files), strict=True))


def identity(file: int) -> Identity:
    """Return the identity of an open file, given its descriptor."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns, found.st_ino


def remove(folder: Path) -> None:
    """Delete a published folder. It is renamed to a hidden name first, so that no reader finds half of it.

    What is busy or refused stays under that name, until a call with that name removes it.
    """
    trash = folder if folder.name.startswith(TRASH) else atomic.temporary(folder, TRASH[1:])
    try:
        with atomic.storage(folder):
            os.rename(folder, trash)
    except FileNotFoundError:
        return  # another coordinator was faster
    shutil.rmtree(trash, ignore_errors=True)


def discard(stage: Path) -> None:
    """Delete a stage or a temporary file, as far as that is possible.

    When its writer commits it at this moment, the commit fails, or it comes first and keeps all files.
    """
    with contextlib.suppress(OSError, StorageError):
        remove(stage) if stage.is_dir() else stage.unlink()


def _clear(final: Path, kind: type[M]) -> None:
    """Move aside whatever occupies the name `final`, for people; raise LostRace if a process published it."""
    aside = final.with_name(f"{final.name}.broken-{os.urandom(4).hex()}")
    for path in (final, aside):  # another process may publish between the check and the rename
        try:
            manifest(path, kind)
        except (FileNotFoundError, CorruptRecord) as error:
            if path == final:
                log.error("moved to %s, since it was in the way: %s", aside, error)
                os.rename(final, aside)
            continue
        if path == aside:
            os.rename(aside, final)
        raise LostRace(f"{final} was published by another process")


@contextlib.contextmanager
def _listed(path: Path) -> Iterator[io.BufferedReader]:
    try:
        with atomic.storage(path), atomic.opened(path) as file:
            yield file
    except FileNotFoundError:
        if not path.parent.exists():
            raise
        raise CorruptRecord(f"{path}: listed in the manifest, but missing; remove the folder") from None


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
