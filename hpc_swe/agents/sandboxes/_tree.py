"""Read and write a folder that hostile code owns.

Every path is walked component by component from one open directory, and no link is ever followed. Whatever
the code plants there, the host reads and writes inside that folder's own file system, or fails.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from hpc_swe.agents.sandboxes.base import TreeEntry

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe must not wait for its other end, and no terminal may become this process's own.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_FILES = 20_000
_MOST_ENTRIES = 50_000
"""Names of any kind that one call lists."""
_DEEPEST = 64
READ_BYTES = 4_000_000  # largest file that is read: a report of tests may have a million bytes


class Tree:
    """Read, write and list files below one open directory, as `Sandbox` describes it."""

    def __init__(self, root: int) -> None:
        self._root = root

    def read(self, path: str) -> bytes:
        with self._parent(path) as (folder, name):
            file = os.open(name, _READ, dir_fd=folder)
            with os.fdopen(file, "rb") as handle:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", path)
                if os.fstat(file).st_size > READ_BYTES:
                    raise OSError(errno.EFBIG, f"larger than {READ_BYTES} bytes", path)
                data = handle.read(READ_BYTES + 1)
        if len(data) > READ_BYTES:  # it grew meanwhile
            raise OSError(errno.EFBIG, f"larger than {READ_BYTES} bytes", path)
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write a file atomically, with the permissions of the file that it replaces."""
        with self._parent(path, make=True) as (folder, name):
            temporary = f".{secrets.token_hex(8)}"
            file = os.open(temporary, _WRITE, 0o644, dir_fd=folder)
            try:
                with os.fdopen(file, "wb") as handle:
                    os.fchmod(file, _mode(folder, name))
                    handle.write(data)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.unlink(temporary, dir_fd=folder)
                raise

    def entries(self, folder: str) -> dict[str, TreeEntry]:
        found: dict[str, TreeEntry] = {}
        with self._folder(folder, folder.split("/")) as here, os.scandir(here) as names:
            for name in names:
                found[name.name] = _entry(name.stat(follow_symlinks=False))
                if len(found) > _MOST_ENTRIES:
                    raise OSError(errno.EFBIG, f"more than {_MOST_ENTRIES} names", folder)
        return found

    def target(self, path: str) -> str:
        with self._parent(path) as (folder, name):
            return os.readlink(name, dir_fd=folder)

    def paths(self) -> list[str]:
        found: list[str] = []
        folders, count = [""], 0
        for folder in folders:  # the loop extends the list
            for name, entry in self.entries(folder).items():
                path, count = f"{folder}/{name}".lstrip("/"), count + 1
                if entry.kind in ("file", "executable"):
                    found.append(path)
                elif entry.kind == "folder" and path.count("/") < _DEEPEST:
                    folders.append(path)
            if len(found) > _MOST_FILES or count > _MOST_ENTRIES:
                raise OSError(errno.EFBIG, f"more than {_MOST_FILES} files or {_MOST_ENTRIES} names", ".")
        return sorted(found)

    def close(self) -> None:
        os.close(self._root)

    @contextmanager
    def _parent(self, path: str, make: bool = False) -> Iterator[tuple[int, str]]:
        *folders, name = [part for part in path.split("/") if part != "."] or [""]
        if path.startswith("/") or not name or name == "..":
            raise OSError(errno.EINVAL, "not a path below the work directory", path)
        with self._folder(path, folders, make) as here:
            yield here, name

    @contextmanager
    def _folder(self, path: str, folders: list[str], make: bool = False) -> Iterator[int]:
        if "\0" in path or ".." in folders:
            raise OSError(errno.EINVAL, "not a path below the work directory", path)
        here = os.dup(self._root)
        try:
            for part in filter(None, folders):
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=here)
                here, above = os.open(part, _FOLDER, dir_fd=here), here
                os.close(above)
            yield here
        finally:
            os.close(here)


def _entry(state: os.stat_result) -> TreeEntry:
    if stat.S_ISDIR(state.st_mode):
        return TreeEntry("folder", 0, 0)
    if stat.S_ISREG(state.st_mode):
        kind: Literal["file", "executable"] = "executable" if state.st_mode & 0o100 else "file"
        return TreeEntry(kind, state.st_size, state.st_mtime_ns)
    return TreeEntry("link" if stat.S_ISLNK(state.st_mode) else "other", state.st_size, state.st_mtime_ns)


def _mode(folder: int, name: str) -> int:
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0o644
    return mode & 0o777 if stat.S_ISREG(mode) else 0o644
