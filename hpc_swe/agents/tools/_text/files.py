"""Read and write text files of the work directory, without starting a process in the sandbox.

A task's own files may name patterns: tools do not show what `.debugignore` matches, and do not change what
`.debugreadonly` matches. This spares the policy useless looks and edits; no reward depends on it, since a
grader brings its own tests.
"""

import errno

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools.base import ToolError, below, is_ignored, is_read_only
from hpc_swe.base.records import Task

_BLOCK = 4096
"""Characters whose line ends are counted at once."""


def read_text(sandbox: Sandbox, task: Task, path: str) -> str:
    """Read a text file; raise ToolError if it cannot be read, or is not text."""
    if is_ignored(task, path):
        raise ToolError(f"{name(path)} is not shown: .debugignore names it.")
    try:
        return sandbox.read(below(task, path)).decode()
    except UnicodeDecodeError:
        raise ToolError(f"{name(path)} is not text.") from None
    except OSError as error:
        raise ToolError(f"Cannot read {name(path)}: {error.strerror}") from None


def count_lines(text: str) -> int:
    """Return the number of lines; form feeds and other characters that no editor counts end none.

    A list of the lines may take eighty times the memory of the text, which the policy chooses.
    """
    return text.count("\n") + bool(text and not text.endswith("\n"))


def line_start(text: str, line: int) -> int:
    """Return where a line begins, counted from 1; a line beyond the last one begins at the end."""
    at, left = 0, line - 1
    while left > 0 and at < len(text):
        ended = text.count("\n", at, at + _BLOCK)
        if ended < left:
            at, left = at + _BLOCK, left - ended
        else:
            at, left = text.find("\n", at) + 1, left - 1
    return min(at, len(text))


def write_text(sandbox: Sandbox, task: Task, path: str, text: str) -> None:
    """Replace a text file, or make one.

    Raise ToolError if it cannot be written, is read-only, or the text cannot be encoded.
    """
    if is_read_only(task, path):
        raise ToolError(f"{name(path)} is read-only; change other files.")
    try:
        sandbox.write(below(task, path), text.encode())
    except UnicodeEncodeError:
        raise ToolError("That is not text.") from None
    except OSError as error:
        raise ToolError(f"Cannot write {name(path)}: {error.strerror}") from None


def is_missing(sandbox: Sandbox, task: Task, path: str) -> bool:
    """Return whether nothing has that name, so that a file can be made."""
    try:
        sandbox.read(below(task, path))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def is_folder(sandbox: Sandbox, task: Task, path: str) -> bool:
    """Return whether a path names a folder of the work directory."""
    try:
        sandbox.entries(below(task, path))
    except OSError as error:
        return error.errno == errno.EFBIG  # a folder with too many names to list
    return True


def with_ends(new: str, text: str, at: int) -> str:
    """Return `new` with the line ends of `text` at its place: the one after it, or where none is, before it.

    New text that has a \\r itself stays as it is.
    """
    end = max(text.find("\n", at), text.rfind("\n", 0, at)) + 1
    return new.replace("\n", "\r\n") if text.endswith("\r\n", 0, end) and "\r" not in new else new


def name(path: str) -> str:
    """Return a file's name on one line, whatever characters it has."""
    return path if path.isprintable() else ascii(path)
