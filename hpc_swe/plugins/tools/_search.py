# ruff: noqa: PTH112, PTH114, PTH118, PTH123
"""The half of grep that runs in the sandbox. It is sent there as text: standard library only.

A pattern can take as long as it likes, a folder can hold whatever the policy put there; so both are
met where a time limit holds, and never on the host.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator

MOST_BYTES = 2_000_000
"""What is searched of one file."""


def search(pattern: str, path: str, most_matches: int, most_chars: int) -> str:
    """Matching lines by file; ends the program with status 2 and one line when nothing can be searched."""
    try:
        found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        sys.exit(f"{pattern[:100]!r} is no regular expression: {error}")
    if not os.path.lexists(path):
        sys.exit(f"There is no {path[:500]!r}.")
    answer: list[str] = []
    matches = 0
    for file in files(path):
        lines = [(number, line) for number, line in enumerate(lines_of(file), 1) if found.search(line)]
        if lines and matches < most_matches:
            answer.append(file if file.isprintable() else ascii(file))
        for number, line in lines[: most_matches - matches]:
            answer.append(f"{number}:{shortened(line, most_chars)}")
        matches += len(lines)
        if matches > most_matches:
            return "\n".join([*answer, f"... more than {most_matches} matches; narrow pattern or path"])
    return "\n".join(answer) or "no match"


def files(path: str) -> Iterator[str]:
    """Regular files in order, git's own left out; links are not followed below `path`."""
    if not os.path.isdir(path):
        yield path
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name != ".git")
        paths = [os.path.normpath(os.path.join(folder, name)) for name in sorted(names)]
        yield from (path for path in paths if not os.path.islink(path))


def lines_of(path: str) -> list[str]:
    """As view shows them; none of a file that is not text, cannot be read, or would never end."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return []
    with open(file, "rb") as handle:
        data = handle.read(MOST_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    *lines, last = data.decode(errors="replace").replace("\r\n", "\n").split("\n")
    return [] if b"\0" in data else lines + ([last] if last else [])


def shortened(line: str, most_chars: int) -> str:
    """The line, or its beginning."""
    return line if len(line) <= most_chars else f"{line[:most_chars]} ..."
