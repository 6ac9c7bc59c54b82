# ruff: noqa: PTH100
"""Match paths with lines of patterns in the form of a .gitignore file.

The text also runs in the sandbox, above that of `search`: standard library only.
"""

import re
from functools import lru_cache

MOST_PATH_CHARS, MOST_NAME_CHARS = 4096, 255
"""Longer paths and names are no file's; a regular expression may take very long over them."""


def matches(patterns: str, path: str, is_folder: bool = False) -> bool:
    """Return whether the last pattern that fits a path, or else one of its folders, takes it in.

    Args:
        patterns: One a line; ``#`` begins a comment, ``!`` takes back, a ``/`` at the end means folders only,
            and any other ``/`` binds to the work directory.
        path: Relative to the work directory.
        is_folder: Whether the path is that of a folder.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not patterns or not parts or len(path) > MOST_PATH_CHARS or len(max(parts, key=len)) > MOST_NAME_CHARS:
        return False
    if is_folder:
        return _takes_in_folder(patterns, "/".join(parts))
    *folders, name = parts
    return _takes_in_folder(patterns, "/".join(folders)) or _fits(patterns, "/".join(parts), name, False)


@lru_cache(maxsize=1024)
def _takes_in_folder(patterns: str, folder: str) -> bool:
    parts = folder.split("/") if folder else []
    return any(_fits(patterns, "/".join(parts[: n + 1]), name, True) for n, name in enumerate(parts))


def _fits(patterns: str, path: str, name: str, is_folder: bool) -> bool:
    found = False
    for expression, takes_in, folders_only, is_bound in _compiled(patterns):
        if (is_folder or not folders_only) and expression.fullmatch(path if is_bound else name):
            found = takes_in
    return found


@lru_cache(maxsize=64)
def _compiled(patterns: str) -> tuple[tuple[re.Pattern[str], bool, bool, bool], ...]:
    lines = [line.strip() for line in patterns.splitlines()]
    return tuple(_rule(line) for line in lines if line.strip("/!") and not line.startswith("#"))


def _rule(line: str) -> tuple[re.Pattern[str], bool, bool, bool]:
    takes_in, folders_only = not line.startswith("!"), line.endswith("/")
    words = line.removeprefix("!").rstrip("/")
    is_bound, words = "/" in words, words.lstrip("/")
    try:
        expression = re.compile(_expression(words), re.DOTALL)
    except re.error:
        expression = re.compile(re.escape(words))
    return expression, takes_in, folders_only, is_bound


def _expression(pattern: str) -> str:
    """Return a pattern as a regular expression, in which only ``**`` stands for several folders."""
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    found = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", pattern)
    return "".join(
        signs.get(each, each.replace("[!", "[^") if len(each) > 1 else re.escape(each)) for each in found
    )
