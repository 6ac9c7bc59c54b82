"""Read and write text files of the work directory, without starting a process in the sandbox."""

from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.plugins.tools.base import ToolError
from hpc_swe.records import Task


def read_text(sandbox: Sandbox, task: Task, path: str) -> str:
    """Read a text file.

    Raises:
        ToolError: It cannot be read, or is not text.
    """
    try:
        return sandbox.read(below(task, path)).decode()
    except UnicodeDecodeError:
        raise ToolError(f"{name(path)} is not text.") from None
    except OSError as error:
        raise ToolError(f"Cannot read {name(path)}: {error.strerror}") from None


def read_lines(sandbox: Sandbox, task: Task, path: str) -> list[str]:
    """Read the lines of a text file, each with its line end."""
    # Not str.splitlines, which also splits at form feeds and other characters that no editor counts.
    *lines, last = read_text(sandbox, task, path).split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def write_text(sandbox: Sandbox, task: Task, path: str, text: str) -> None:
    """Replace a text file, or make one.

    Raises:
        ToolError: It cannot be written, or the text cannot be encoded.
    """
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


def below(task: Task, path: str) -> str:
    """Return a path relative to the work directory; the sandbox refuses paths that lead out of it."""
    workdir = task.workdir.rstrip("/")
    return "." if path.rstrip("/") == workdir else path.removeprefix(f"{workdir}/")


def with_ends(new: str, text: str, at: int) -> str:
    """Return `new` with the line ends of `text` at its place: the one after it, or where none is, before it.

    New text that has a \\r itself stays as it is.
    """
    end = max(text.find("\n", at), text.rfind("\n", 0, at)) + 1
    return new.replace("\n", "\r\n") if text.endswith("\r\n", 0, end) and "\r" not in new else new


def name(path: str) -> str:
    """Return a file's name on one line, whatever characters it has."""
    return path if path.isprintable() else ascii(path)
