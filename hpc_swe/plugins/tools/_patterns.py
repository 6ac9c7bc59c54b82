# ruff: noqa: PTH100
"""Match paths with lines of patterns in the form of a .gitignore file.

The text also runs in the sandbox, above that of `_search`: standard library only.
"""

import re
from functools import lru_cache


def matches(patterns: str, path: str) -> bool:
    """Return whether the last pattern that fits a path, or else one of its folders, takes it in.

    Args:
        patterns: One a line; ``#`` begins a comment, ``!`` takes back, a ``/`` at the end means folders only,
            and any other ``/`` binds to the work directory.
        path: Relative to the work directory.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    for end in range(1, len(parts) + 1):
        found = False
        for expression, takes_in, folders_only in _compiled(patterns):
            if (end < len(parts) or not folders_only) and expression.fullmatch("/".join(parts[:end])):
                found = takes_in
        if found:
            return True
    return False


@lru_cache(maxsize=64)
def _compiled(patterns: str) -> tuple[tuple[re.Pattern[str], bool, bool], ...]:
    lines = [line.strip() for line in patterns.splitlines()]
    return tuple(_rule(line) for line in lines if line.strip("/!") and not line.startswith("#"))


def _rule(line: str) -> tuple[re.Pattern[str], bool, bool]:
    takes_in, folders_only = not line.startswith("!"), line.endswith("/")
    words = line.removeprefix("!").rstrip("/")
    start = "" if "/" in words else "(?:.*/)?"
    try:
        return re.compile(start + _expression(words.lstrip("/")), re.DOTALL), takes_in, folders_only
    except re.error:
        return re.compile(start + re.escape(words)), takes_in, folders_only


def _expression(pattern: str) -> str:
    """Return a pattern as a regular expression, in which only ``**`` stands for several folders."""
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    found = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", pattern)
    return "".join(
        signs.get(each, each.replace("[!", "[^") if len(each) > 1 else re.escape(each)) for each in found
    )
