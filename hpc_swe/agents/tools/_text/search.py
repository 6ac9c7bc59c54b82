# ruff: noqa: PTH112, PTH114, PTH118, PTH123, PTH207
"""Search files inside the sandbox for `grep`. The program is sent there as text: standard library only.

A pattern may take for ever, and a folder holds whatever the policy put there. So both are handled where a
time limit holds, and never on the host.
"""

import glob
import itertools
import os
import re
import stat
import sys
from collections.abc import Iterator

from hpc_swe.agents.tools._text.patterns import matches  # in a sandbox, text above this one

MOST_BYTES = 2_000_000
"""Bytes of one file that are searched."""


def search(pattern: str, path: str, most_matches: int, most_chars: int, ignored: str) -> str:
    """Return the matching lines by file, except of files that the patterns `ignored` match.

    Exit with status 1 and a message when nothing can be searched.
    """
    try:
        found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        sys.exit(f"{pattern[:100]!r} is no regular expression: {error}")
    places = [path] if os.path.lexists(path) else sorted(glob.iglob(path, recursive=True))
    if not places:
        sys.exit(f"There is no {path[:500]!r}.")
    answer: list[str] = []
    count = 0
    for file in itertools.chain.from_iterable(map(files, places)):
        if matches(ignored, file):
            continue
        lines = [(number, line) for number, line in enumerate(lines_of(file), 1) if found.search(line)]
        if lines and count < most_matches:
            answer.append(file if file.isprintable() else ascii(file))
        for number, line in lines[: most_matches - count]:
            answer.append(f"{number}:{line if len(line) <= most_chars else f'{line[:most_chars]} ...'}")
        count += len(lines)
        if count > most_matches:
            return "\n".join([*answer, f"... more than {most_matches} matches; narrow pattern or path"])
    return "\n".join(answer) or "no match"


def files(path: str) -> Iterator[str]:
    """Yield regular files in order, without git's own; links are not followed below `path`."""
    if not os.path.isdir(path):
        yield path
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name != ".git")
        paths = [os.path.normpath(os.path.join(folder, name)) for name in sorted(names)]
        yield from (each for each in paths if not os.path.islink(each))


def lines_of(path: str) -> list[str]:
    """Return the lines as view shows them; none of a file that is no text, no regular file or unreadable."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return []
    with open(file, "rb") as handle:
        data = handle.read(MOST_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    *lines, last = data.decode(errors="replace").replace("\r\n", "\n").split("\n")
    return [] if b"\0" in data else lines + ([last] if last else [])
