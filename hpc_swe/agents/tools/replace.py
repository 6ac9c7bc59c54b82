"""Replace a piece of one line."""

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools._text.files import count_lines, line_start, read_text, with_ends, write_text
from hpc_swe.agents.tools.base import Tool, ToolError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task


class Replace(Plugin, Tool, frozen=True, kw_only=True):
    """Replace the first old by new in one line of a file."""

    def __call__(self, sandbox: Sandbox, task: Task, *, path: str, line: int, old: str, new: str) -> str:
        text = read_text(sandbox, task, path)
        count = count_lines(text)
        if not 1 <= line <= count:
            raise ToolError(f"{path} has {count} lines.")
        first, end = line_start(text, line), line_start(text, line + 1)
        at = text.find(old, first, end) if old else -1
        if at < 0:
            raise ToolError(f"{old!r} is not in line {line}.")
        new = new if "\r" in old else with_ends(new, text, first)
        write_text(sandbox, task, path, text[:at] + new + text[at + len(old) :])
        return "ok"
