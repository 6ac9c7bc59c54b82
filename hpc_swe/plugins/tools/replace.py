"""Replace a piece of one line."""

from typing import ClassVar

from hpc_swe.plugins import Plugin
from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.plugins.tools._files import read_lines, with_ends, write_text
from hpc_swe.plugins.tools.base import ToolError
from hpc_swe.records import Task


class Replace(Plugin, frozen=True, kw_only=True):
    """Replace the first old by new in one line of a file."""

    ends_episode: ClassVar[bool] = False

    def __call__(self, sandbox: Sandbox, task: Task, *, path: str, line: int, old: str, new: str) -> str:
        lines = read_lines(sandbox, task, path)
        if not 1 <= line <= len(lines):
            raise ToolError(f"{path} has {len(lines)} lines.")
        if not old or old not in lines[line - 1]:
            raise ToolError(f"{old!r} is not in line {line}.")
        new = new if "\r" in old else with_ends(new, "".join(lines), len("".join(lines[: line - 1])))
        lines[line - 1] = lines[line - 1].replace(old, new, 1)
        write_text(sandbox, task, path, "".join(lines))
        return "ok"
