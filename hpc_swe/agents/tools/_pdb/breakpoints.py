"""Move breakpoints along when the text of their file has changed."""

import difflib
from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

MOST_LINES = 100
"""Changed lines of a file above which only lines that occur once are found again.

difflib may take the cube of their number, and the policy chooses the texts.
"""


class Breakpoint(Struct, frozen=True):
    """Hold a breakpoint as the debugger describes it."""

    file: str
    """Path relative to the work directory, or absolute outside it."""
    line: int
    condition: str = ""
    temporary: bool = False
    enabled: bool = True
    ignored: int = 0
    """How many times more it is passed without a stop."""

    def __str__(self) -> str:
        """Return its place, as `b` takes it."""
        return f"{self.file}:{self.line}" + (f", {self.condition}" if self.condition else "")


def moved(breakpoint: Breakpoint, old: Sequence[str], new: Sequence[str]) -> Breakpoint | None:
    """Return a breakpoint of the text `old` as it is in `new`; None if its line was deleted."""
    line = moved_line(breakpoint.line - 1, old, new)
    return None if line is None else replace(breakpoint, line=line + 1)


def moved_line(line: int, old: Sequence[str], new: Sequence[str]) -> int | None:
    """Return where a line of `old` is in `new`, both counted from 0; None if it was deleted.

    A line that was replaced is where its replacement is.
    """
    most = min(len(old), len(new))
    before = next((n for n in range(most) if old[n] != new[n]), most)
    if line < before:
        return line
    after = next((n for n in range(most - before) if old[-1 - n] != new[-1 - n]), most - before)
    if line >= len(old) - after:
        return line + len(new) - len(old)
    inside = _found(line - before, old[before : len(old) - after], new[before : len(new) - after])
    return None if inside is None else before + inside


def _found(line: int, old: Sequence[str], new: Sequence[str]) -> int | None:
    if max(len(old), len(new)) > MOST_LINES:
        places = [n for n, text in enumerate(new) if text == old[line]]
        return places[0] if len(places) == 1 else None
    for kind, first, end, start, stop in _changes(tuple(old), tuple(new)):
        if first <= line < end and kind != "delete":
            return min(start + line - first, stop - 1)
    return None


@lru_cache(maxsize=8)
def _changes(old: tuple[str, ...], new: tuple[str, ...]) -> list[tuple[str, int, int, int, int]]:
    return list(difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes())
