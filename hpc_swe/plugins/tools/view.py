"""Show a file with line numbers."""

from typing import ClassVar

from hpc_swe.plugins import Plugin
from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.plugins.tools._files import is_folder, is_read_only, read_lines
from hpc_swe.plugins.tools.base import ToolError
from hpc_swe.plugins.tools.listdir import Listdir
from hpc_swe.records import Task


class View(Plugin, frozen=True, kw_only=True):
    """Show a file, or its lines start to end."""

    ends_episode: ClassVar[bool] = False
    most_lines: int = 200

    def __call__(
        self,
        sandbox: Sandbox,
        task: Task,
        *,
        path: str,
        start: int = 1,
        end: int = 0,
        include_line_numbers_and_breakpoints: bool = True,
    ) -> str:
        """Return the lines with their numbers, at most `most_lines` of them, or what is in a folder.

        An end of 0 or less means the last line.
        """
        try:
            lines = read_lines(sandbox, task, path)
        except ToolError:
            if not is_folder(sandbox, task, path):
                raise
            return Listdir(most_lines=self.most_lines)(sandbox, task, path=path, depth=1)
        if not 1 <= start <= max(len(lines), 1):
            raise ToolError(f"{path} has {len(lines)} lines.")
        if 0 < end < start:
            raise ToolError(f"end = {end} is before start = {start}; leave end out to see the rest.")
        wanted = min(end, len(lines)) if end > 0 else len(lines)
        last = min(wanted, start + self.most_lines - 1)
        bare = [line.removesuffix("\r\n").removesuffix("\n") for line in lines[start - 1 : last]]
        is_numbered = include_line_numbers_and_breakpoints
        shown = [f"{number}:{line}" if is_numbered else line for number, line in enumerate(bare, start)]
        rest = [f"... {len(lines)} lines in all"] if last < wanted else []
        note = ["(read-only)"] if is_read_only(task, path) else []
        return "\n".join([*(shown + rest or ["(empty)"]), *note])
