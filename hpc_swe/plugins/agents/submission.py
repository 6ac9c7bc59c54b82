"""What an agent hands in: the difference between the task's files and what lies in its sandbox at the end."""

from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.plugins.tools._difference import difference
from hpc_swe.records import Task

MOST_BYTES = 1_000_000
_IGNORED = {"__pycache__", ".git", ".pytest_cache"}
_PATCH = ".git/hpc_swe.patch"


def take(task: Task, sandbox: Sandbox) -> str:
    """The agent's changes; empty when there are none, or when they are too large to hand in.

    Raises:
        SandboxError: The host failed.
    """
    try:
        text = _from_git(task, sandbox) if task.base_commit else _from_files(task, sandbox)
    except OSError:
        return ""
    return text if len(text.encode()) <= MOST_BYTES else ""


def _from_files(task: Task, sandbox: Sandbox) -> str:
    present = {path for path in sandbox.paths() if path.isprintable() and not _IGNORED & set(path.split("/"))}
    return "".join(
        _file_difference(task, sandbox, path, path in present) for path in sorted(present | task.files.keys())
    )


def _file_difference(task: Task, sandbox: Sandbox, path: str, is_present: bool) -> str:
    try:
        new = sandbox.read(path).decode() if is_present else None
    except (OSError, UnicodeDecodeError):
        return ""  # not text, or too large: no part of the work
    return difference(path, task.files.get(path), new)


def _from_git(task: Task, sandbox: Sandbox) -> str:
    sandbox.run(f"git add -A && git diff --cached --binary {task.base_commit} > {_PATCH}", timeout_s=120)
    return sandbox.read(_PATCH).decode(errors="replace")
