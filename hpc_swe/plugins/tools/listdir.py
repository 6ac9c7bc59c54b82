"""List files as a tree."""

from collections.abc import Iterable
from typing import ClassVar

from hpc_swe.plugins import Plugin
from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.plugins.tools._files import below, is_ignored, is_read_only, name
from hpc_swe.plugins.tools.base import ToolError
from hpc_swe.records import Task


class Listdir(Plugin, frozen=True, kw_only=True):
    """Show the files below a folder as a tree, to a depth."""

    ends_episode: ClassVar[bool] = False
    most_lines: int = 200

    def __call__(self, sandbox: Sandbox, task: Task, *, path: str = ".", depth: int = 2) -> str:
        """Return one name per line, folders with a slash; the deepest ones with their number of files."""
        folder = "/".join(part for part in below(task, path).split("/") if part not in ("", "."))
        try:
            files = [file for file in sandbox.paths() if not is_ignored(task, file)]
        except OSError as error:
            raise ToolError(f"Cannot list the files: {error.strerror}") from None
        start = f"{folder}/" if folder else ""
        named = {file: f"{file} (read-only)" if is_read_only(task, file) else file for file in files}
        inside = [named[file].removeprefix(start).split("/") for file in files if file.startswith(start)]
        if not inside:
            raise ToolError(f"There are no files in {name(path)}.")
        lines = _tree([parts for parts in inside if ".git" not in parts[:-1]], depth)
        rest = [f"... {len(lines) - self.most_lines} lines more"] if len(lines) > self.most_lines else []
        return "\n".join([*lines[: self.most_lines], *rest])


def _tree(files: Iterable[list[str]], depth: int) -> list[str]:
    # A folder's key ends in an empty name; folders come in the order of their first file.
    counts: dict[tuple[str, ...], int] = {}
    for parts in files:
        for end in range(1, min(len(parts), max(depth, 1)) + 1):
            key = tuple(parts) if end == len(parts) else (*parts[:end], "")
            counts[key] = counts.get(key, 0) + 1
    return [_line(key, count, depth) for key, count in counts.items()]


def _line(key: tuple[str, ...], count: int, depth: int) -> str:
    *parts, last = key
    if last:
        return f"{'  ' * len(parts)}{name(last)}"
    is_deepest = len(parts) >= depth
    return f"{'  ' * (len(parts) - 1)}{name(parts[-1])}/{f' (files: {count})' if is_deepest else ''}"
