"""Show a file with line numbers."""

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools._text.files import count_lines, is_folder, line_start, read_text
from hpc_swe.agents.tools.base import Tool, ToolError, is_read_only
from hpc_swe.agents.tools.listdir import Listdir
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task


class View(Plugin, Tool, frozen=True, kw_only=True):
    """Show a file, or its lines start to end."""

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
            text = read_text(sandbox, task, path)
        except ToolError:
            if not is_folder(sandbox, task, path):
                raise
            return Listdir(most_lines=self.most_lines)(sandbox, task, path=path, depth=1)
        count = count_lines(text)
        if not 1 <= start <= max(count, 1):
            raise ToolError(f"{path} has {count} lines.")
        if 0 < end < start:
            raise ToolError(f"end = {end} is before start = {start}; leave end out to see the rest.")
        wanted = min(end, count) if end > 0 else count
        last = min(wanted, start + self.most_lines - 1)
        piece = text[line_start(text, start) : line_start(text, last + 1)]
        bare = piece.replace("\r\n", "\n").removesuffix("\n").split("\n") if piece else []
        is_numbered = include_line_numbers_and_breakpoints
        shown = [f"{number}:{line}" if is_numbered else line for number, line in enumerate(bare, start)]
        rest = [f"... {count} lines in all"] if last < wanted else []
        note = ["(read-only)"] if is_read_only(task, path) else []
        return "\n".join([*(shown + rest or ["(empty)"]), *note])
