"""Text files of the work directory, for tools. No process is started in the sandbox."""

from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.plugins.tools.base import ToolError
from hpc_swe.records import Task


def read_lines(sandbox: Sandbox, task: Task, path: str) -> list[str]:
    """Lines of a text file, each with its end."""
    try:
        text = sandbox.read(below(task, path)).decode()
    except UnicodeDecodeError:
        raise ToolError(f"{path} is not text.") from None
    except OSError as error:
        raise ToolError(f"Cannot read {path}: {error.strerror}") from None
    # Not str.splitlines, which also splits at form feeds and other marks that no editor counts.
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def write_lines(sandbox: Sandbox, task: Task, path: str, lines: list[str]) -> None:
    """Replace a text file."""
    try:
        sandbox.write(below(task, path), "".join(lines).encode())
    except UnicodeEncodeError:
        raise ToolError("That is not text.") from None
    except OSError as error:
        raise ToolError(f"Cannot write {path}: {error.strerror}") from None


def below(task: Task, path: str) -> str:
    """The path relative to the work directory; what leads out of it the sandbox refuses."""
    return path.removeprefix(task.workdir.rstrip("/") + "/")
