"""Replace a piece of a file."""

import itertools
import re

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools._text.files import is_missing, line_start, name, read_text, with_ends, write_text
from hpc_swe.agents.tools.base import Tool, ToolError
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task

_NAMED = 5
"""Largest number of lines that an error names."""


class Edit(Plugin, Tool, frozen=True, kw_only=True):
    """Replace old, which must occur exactly once in a file, by new; an empty old fills a new or empty one."""

    def __call__(self, sandbox: Sandbox, task: Task, *, path: str, old: str, new: str) -> str:
        text = "" if not old and is_missing(sandbox, task, path) else read_text(sandbox, task, path)
        if not old:
            if text:
                raise ToolError(f"{name(path)} is there and not empty; old must be a piece of it.")
            write_text(sandbox, task, path, new)
            return "ok"
        # The text as view shows it: a policy that cannot see that lines end in \r\n writes \n.
        seen = text if "\r" in old else text.replace("\r\n", "\n")
        first = seen.find(old)
        if first < 0:
            raise ToolError(f"old is not in {name(path)}.{_near(seen, old)}")
        if seen.find(old, first + 1) >= 0:
            # str.count counts overlapping occurrences as one.
            count, lines = max(seen.count(old), 2), _lines(seen, old)
            raise ToolError(f"old occurs {count} times in {name(path)}, first at lines {lines}; add to it.")
        start, end = (_place(text, seen, at) for at in (first, first + len(old)))
        new = new if "\r" in old else with_ends(new, text, start)
        write_text(sandbox, task, path, text[:start] + new + text[end:])
        return "ok"


def _place(text: str, seen: str, at: int) -> int:
    """Return the place in `text` of the place `at` in `seen`."""
    if seen == text:
        return at
    return at + text.count("\r\n", 0, line_start(text, seen.count("\n", 0, at) + 1))


def _lines(text: str, old: str) -> str:
    found: list[str] = []
    at = -1
    while len(found) < _NAMED and (at := text.find(old, at + 1)) >= 0:
        found.append(str(text.count("\n", 0, at) + 1))
    return ", ".join(found)


def _near(text: str, old: str) -> str:
    """Name the lines that equal the first line of `old` but for surrounding space, the usual mistake."""
    first = next(filter(None, map(str.strip, old.split("\n"))), "")
    if not first:
        return ""
    found = re.finditer(rf"(?m)^[^\S\n]*{re.escape(first)}[^\S\n]*$", text)
    near = [str(text.count("\n", 0, each.start()) + 1) for each in itertools.islice(found, _NAMED)]
    return f" Its first line is like {', '.join(near)}; compare what follows." if near else ""
