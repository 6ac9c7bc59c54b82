"""Replace a range of lines."""

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools._text.files import (
    count_lines,
    is_missing,
    line_start,
    read_text,
    with_ends,
    write_text,
)
from hpc_swe.agents.tools.base import Tool, ToolError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task


class Rewrite(Plugin, Tool, frozen=True, kw_only=True):
    """Replace lines start to end of a file by new_code; end = start - 1 inserts."""

    def __call__(
        self, sandbox: Sandbox, task: Task, *, path: str, start: int = 0, end: int = -1, new_code: str
    ) -> str:
        """Edit the file and answer ``ok``; start = 1 and end = 0 make a file that does not exist.

        Without an end, or with -1, only line start is replaced; without both, all lines are.
        """
        is_new = (start, end) == (1, 0) and is_missing(sandbox, task, path)
        text = "" if is_new else read_text(sandbox, task, path)
        count = count_lines(text)
        if end == -1:
            start, end = (start, start) if start else (1, count)
        if not 1 <= start <= count + 1 or end > count:
            raise ToolError(f"{path} has {count} lines.")
        if end < start - 1:
            raise ToolError(f"end = {end} is before start = {start}; end = {start - 1} inserts there.")
        first, stop = line_start(text, start), line_start(text, end + 1)
        before, old, after = text[:first], text[first:stop], text[stop:]
        new, line_end = (with_ends(code, text, len(before)) for code in (new_code, "\n"))
        if new and before and not before.endswith("\n"):
            before += line_end
        # A last line without a line end gets one only if the policy writes it.
        if new and not new.endswith("\n") and (not old or old.endswith("\n")):
            new += line_end
        write_text(sandbox, task, path, before + new + after)
        return "ok"
