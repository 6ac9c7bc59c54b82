"""Put images into their folder, each one completely or not at all."""

import errno
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from hpc_swe.base.errors import DeadlineError, HpcSweError, StorageError, boundary
from hpc_swe.base.records import Task
from hpc_swe.makers.images import leaks, links
from hpc_swe.makers.images.commands import remove
from hpc_swe.makers.images.sources import Built, ImageSource, apptainer
from hpc_swe.tasks.swebench_rows import IMAGE_NAME

BASE = "python-pytest"
"""Image that containers/build_image.sh makes, of which images of local recipes are made."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class ImageManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Record what an image was made of; the file is written beside the image, and after it."""

    image: str
    base_commit: str
    environment: str
    """Digest of everything that it was made of, except the commit."""
    sif_sha256: str
    source: str = ""
    """Unpacked base image, or source that Apptainer built from."""
    set_up: list[str] = []
    """Tracked files that the image's maker changed, in a commit on top of the base."""
    leaks: list[str] = []
    """Files that show the solution, with --keep-leaks."""
    searched: list[str] = []
    """Digest of each solution that the image was searched for; an older file has none, and is of one task."""


@dataclass(frozen=True)
class Problem:
    """Hold a task and its solution, for which an image is built; other tasks may share the image."""

    task: Task
    reference: str
    """Patch that solves the task; its files equal those of the base commit in any image."""

    @property
    def secrets(self) -> tuple[str, str]:
        """Return the patches that the image must not show: the reference and the hidden tests."""
        return self.reference, self.task.tests.extra["test_patch"]

    @property
    def digest(self) -> str:
        known = (*self.secrets, self.task.start) if self.task.start else self.secrets
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16]

    @property
    def exact(self) -> set[str]:
        """Return the files of the tests and the reference."""
        extra = self.task.tests.extra
        return {*json.loads(extra["test_files"]), *extra["set_up"].split("\n")}


@dataclass(frozen=True)
class ImageStore:
    """Build images in one folder."""

    images: Path
    keep_leaks: bool = False
    wait_s: float = 60.0
    """Longest wait for another builder to end."""

    def build(self, source: ImageSource, *problems: Problem) -> bool:
        """Build the image that the problems share; return False when it exists already.

        Raise StorageError if the disk is full, and HpcSweError, with the reason, if a command failed or the
        image is not fit.
        """
        task = problems[0].task
        _require_name(task.image)
        digest = source.digest(task)
        if self.has(digest, *problems):
            return False
        has_links = isinstance(source, Built)
        with self._scratch(has_links) as work:
            tree, sif = work / "tree", work / "image.sif"
            set_up = source.lay_out(task, set[str]().union(*(one.exact for one in problems)), work)
            found = _search(tree, problems)
            if found and not self.keep_leaks:
                shown = problems if len(problems) == 1 else [one for one in problems if _search(tree, [one])]
                raise HpcSweError(
                    f"the image shows the solution or the hidden tests in {_first(found)}: leave the "
                    f"instance out ({_first([one.task.task_id for one in shown])}), or pass --keep-leaks"
                )
            # mksquashfs's default, gzip, takes twenty times the CPU for nearly the same size
            zstd = ("--mksquashfs-args", "-comp zstd -Xcompression-level 3")
            apptainer("build", *zstd, str(sif), str(tree), work=work)
            with sif.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            done = ImageManifest(
                image=task.image,
                base_commit=task.base_commit,
                environment=digest,
                sif_sha256=sha256,
                source=source.origin(task),
                set_up=set_up,
                leaks=found,
                searched=sorted(one.digest for one in problems),
            )
            self._put(work, done, has_links)
        return True

    def discard(self, task: Task) -> None:
        """Remove the image of a task, its manifest first."""
        _require_name(task.image)
        (self.images / f"{task.image}.json").unlink(missing_ok=True)
        (self.images / f"{task.image}.sif").unlink(missing_ok=True)
        _remove(self.images / task.image)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other builders, and remove the files that dead ones left.

        Raise DeadlineError if another builder holds the lock, StorageError if the folder cannot be written.
        """
        with boundary(StorageError, f"sandbox.images = {str(self.images)!r} must be a folder that you own"):
            self.images.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.images / ".builder", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.set_inheritable(handle, True)
        try:
            if self._lock(handle):
                for leftover in self.images.glob(".work.*"):
                    remove(leftover)
            yield
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> bool:
        """Return False where the file system has no locks."""
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"another builder, or a command that a killed one left, works in {self.images}"
                    ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return False
            time.sleep(0.2)

    def _put(self, work: Path, done: ImageManifest, has_links: bool) -> None:
        """Remove the manifest first and write it last: an image without one does not count."""
        folder, manifest = self.images / done.image, self.images / f"{done.image}.json"
        (work / "manifest").write_bytes(msgspec.json.format(msgspec.json.encode(done)))
        manifest.unlink(missing_ok=True)
        _remove(folder)
        (work / "image.sif").rename(self.images / f"{done.image}.sif")
        if has_links:  # then the unpacked files take hardly any space
            (work / "tree").rename(folder)
        (work / "manifest").rename(manifest)

    def has(self, digest: str, *problems: Problem) -> bool:
        """Return whether there is an image with this digest that was searched for all problems."""
        task = problems[0].task
        try:
            manifest = (self.images / f"{task.image}.json").read_bytes()
            made = msgspec.json.decode(manifest, type=ImageManifest)
        except (OSError, msgspec.MsgspecError):
            return False
        same = (made.base_commit, made.environment) == (task.base_commit, digest)
        known = {one.digest for one in problems} <= {*made.searched}
        is_searched = known if made.searched else len(problems) == 1
        return same and is_searched and (self.images / f"{task.image}.sif").exists()

    @contextmanager
    def _scratch(self, has_links: bool) -> Iterator[Path]:
        """Make a folder on the images' file system, where renames are atomic."""
        work = Path(tempfile.mkdtemp(prefix=".work.", dir=self.images.absolute()))
        try:
            yield work
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (StorageError if full else HpcSweError)(str(error)) from None
        finally:
            if has_links:
                _remove(work / "tree")  # it is there no more once the image is complete
            remove(work)


def _require_name(image: str) -> None:
    """Raise HpcSweError for a name by which files of other images would be removed."""
    if image == BASE:
        raise HpcSweError(f"column image: {BASE} is the base of other images, and stays; take another name")
    if not IMAGE_NAME.fullmatch(image):
        raise HpcSweError(f"{image!r} is no name of an image: correct the column image")


def _remove(folder: Path) -> None:
    """Remove a folder whose files other images may have, too."""
    if folder.exists():
        with links.changing():
            remove(folder)


def _search(tree: Path, problems: Sequence[Problem]) -> list[str]:
    task, plain = problems[0].task, [one for one in problems if not one.task.start]
    secrets = chain.from_iterable(one.secrets for one in plain)
    started = [(one.task, one.secrets) for one in problems if one.task.start]
    return leaks.search(tree, task.workdir, task.base_commit, *secrets, started=started)


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"
