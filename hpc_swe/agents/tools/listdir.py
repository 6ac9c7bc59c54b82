"""List files as a tree.

Only the asked folder is walked, and the names that are shown come before the files that are only counted. The
policy may have made any number of files, so both have bounds; the answer says what lies beyond them.
"""

import errno
from dataclasses import dataclass

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools._text.files import name
from hpc_swe.agents.tools.base import Tool, ToolError, below, is_ignored, is_read_only
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task

_MOST_NAMES = 50_000
"""Names that one call looks at to show them, and as many to count files.

A folder counts once for itself and for each folder above it, since all of these are opened.
"""
_MOST_BELOW = 5_000
"""Names that are looked at to count the files of one folder, so that a large one leaves some for others."""
_DEEPEST = 64
"""Folders within one another that are looked into."""
_OF_ONE_FOLDER = (errno.EACCES, errno.EFBIG, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EPERM)
"""Errors that say something about one folder only; any other ends the walk."""


class Listdir(Plugin, Tool, frozen=True, kw_only=True):
    """Show the files below a folder as a tree, to a depth."""

    most_lines: int = 200

    def __call__(self, sandbox: Sandbox, task: Task, *, path: str = ".", depth: int = 2) -> str:
        """Return one name per line, folders with a slash; the deepest ones with their number of files."""
        folder = "/".join(part for part in below(task, path).split("/") if part not in ("", "."))
        try:
            lines = _Tree(_Names(sandbox, task), _Names(sandbox, task), task).lines(folder, depth)
        except OSError as error:
            raise ToolError(f"Cannot list {name(path)}: {error.strerror}") from None
        if not lines:
            raise ToolError(f"There are no files in {name(path)}.")
        rest = [f"... {len(lines) - self.most_lines} lines more"] if len(lines) > self.most_lines else []
        return "\n".join([*lines[: self.most_lines], *rest])


class _NotListed(OSError):
    """Mark a folder that cannot be listed, while others may be."""


@dataclass
class _Names:
    """List folders until too many names were looked at."""

    sandbox: Sandbox
    task: Task
    left: int = _MOST_NAMES

    def of(self, folder: str) -> list[tuple[str, bool]]:
        """Return the paths of a folder's files and folders that tools show, and which are folders.

        Leave out `.git` and its inside. Raise _NotListed if a bound is reached or only this folder cannot be
        listed, and OSError after any other error.
        """
        depth = folder.count("/")
        if depth >= _DEEPEST:
            raise _NotListed(errno.EFBIG, "too many folders within one another")
        if self.left <= 0:
            raise _NotListed(errno.EFBIG, "not looked into: too many files")
        self.left -= depth + 1
        try:
            entries = self.sandbox.entries(folder)
        except OSError as error:
            if error.errno == errno.EFBIG:  # it was read up to the bound of the sandbox
                self.left -= _MOST_NAMES // 2
            if error.errno in _OF_ONE_FOLDER:
                raise _NotListed(error.errno, error.strerror) from None
            raise
        self.left -= len(entries)
        kinds = {"folder": True, "file": False, "executable": False}
        found = [
            (f"{folder}/{each}".lstrip("/"), kinds[entry.kind])
            for each, entry in entries.items()
            if entry.kind in kinds and (each, entry.kind) != (".git", "folder")
        ]
        return [item for item in found if not is_ignored(self.task, *item)]


@dataclass
class _Tree:
    shown: _Names
    counted: _Names
    task: Task

    def lines(self, folder: str, depth: int) -> list[str]:
        """Return the lines of a folder; one without files has none. Raise OSError if it cannot be listed."""
        lines: list[str] = []
        for path, is_folder in sorted(self.shown.of(folder), key=lambda item: f"{item[0]}{'/' * item[1]}"):
            last = path.rpartition("/")[2]
            if is_folder:
                lines += self._folder(path, f"{name(last)}/", depth)
            else:
                lines.append(name(f"{last} (read-only)" if is_read_only(self.task, path) else last))
        return lines

    def _folder(self, path: str, shown: str, depth: int) -> list[str]:
        if depth <= 1:
            files, is_all = self._count(path)
            number = str(files) if is_all else f"at least {files}" if files else "not counted"
            return [f"{shown} (files: {number})"] if files or not is_all else []
        try:
            inner = self.lines(path, depth - 1)
        except _NotListed as error:
            return [f"{shown} ({error.strerror})"]
        return [shown, *(f"  {line}" for line in inner)] if inner else []

    def _count(self, top: str) -> tuple[int, bool]:
        """Return how many files were found below a folder, and whether these are all."""
        files, is_all, least_left = 0, True, self.counted.left - _MOST_BELOW
        folders = [top]
        for folder in folders:  # the loop extends the list
            if self.counted.left < least_left:
                return files, False
            try:
                found = self.counted.of(folder)
            except _NotListed:
                is_all = False
                continue
            inner = [path for path, is_folder in found if is_folder]
            folders += inner
            files += len(found) - len(inner)
        return files, is_all
