"""Parse Python source in threads.

Before Python 3.11.5 all threads that build syntax trees count their depth in one number, so that two of them
at a time may fail with a SystemError. In a reward worker a right patch would count as unresolved by chance.
"""

import ast
import itertools
import re
import threading
from collections.abc import Iterable

MOST_DEPTH = 150
"""Depth of the deepest tree that all parts of the project can write as text again, in half of the stack."""

_parsing = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """Parse a module as `ast.parse` does, one thread at a time; a text may begin with a byte order mark.

    Raise SyntaxError if it is not Python or nested too deeply, and ValueError if it holds a null byte.
    """
    with _parsing:
        try:
            return ast.parse(source.removeprefix("\ufeff") if isinstance(source, str) else source)
        except (RecursionError, MemoryError):
            raise SyntaxError("it is nested too deeply") from None


def split_lines(text: str) -> list[str]:
    """Return the lines of a text as a syntax tree counts them: a lone carriage return ends one, too.

    Joined by line feeds they are the same Python. One before a line feed stays at the end of its line.
    """
    return re.split(r"\n|\r(?!\n)", text)


def as_read(text: str) -> str:
    """Return a text as Python reads it, without a byte order mark, each line ended by a line feed."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


class PythonText:
    """Cut and join a text at the places of its syntax tree, and write no part of it anew."""

    def __init__(self, text: str) -> None:
        """Parse the text; raises what `parse` raises."""
        self.text = as_read(text)
        self.tree = parse(self.text)
        self._data = self.text.encode(errors="surrogatepass")
        lines = self._data.split(b"\n")
        self._starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends, in bytes, its decorators included."""
        assert isinstance(node, ast.stmt | ast.expr)
        decorators = getattr(node, "decorator_list", [])
        start = min(self._starts[one.lineno - 1] + one.col_offset for one in (node, *decorators))
        start = self._data.rfind(b"@", 0, start) if decorators else start
        last, column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return start, self._starts[last - 1] + column

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node; parentheses around it are no part of it."""
        start, end = self.span(node)
        return self._data[start:end].decode(errors="surrogatepass")

    def block(self, body: list[ast.stmt], changes: Iterable[tuple[ast.AST, str]] = ()) -> str:
        """Return the text of a function's statements, indented, with other texts in place of some nodes."""
        start, end = self.span(body[0])[0], self.span(body[-1])[1]
        line = self._data.rfind(b"\n", 0, start) + 1
        is_whole = not self._data[line:start].strip()
        return ("" if is_whole else "    ") + self._changed(line if is_whole else start, end, changes)

    def with_changes(self, changes: Iterable[tuple[ast.AST, str]]) -> str:
        """Return the text with other texts in place of some nodes, of which none holds another."""
        return self._changed(0, len(self._data), changes)

    def _changed(self, start: int, end: int, changes: Iterable[tuple[ast.AST, str]]) -> str:
        parts, done = [], start
        for (first, last), new in sorted((self.span(node), new) for node, new in changes):
            parts += [self._data[done:first], new.encode(errors="surrogatepass")]
            done = last
        return b"".join([*parts, self._data[done:end]]).decode(errors="surrogatepass")


def require_shallow(tree: ast.AST) -> None:
    """Raise SyntaxError if a tree is so deep that a grader, which walks through it, would fail."""
    level, depth = [tree], 0
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if depth > MOST_DEPTH:
        raise SyntaxError(f"it is nested too deeply: {depth} levels, of {MOST_DEPTH} that a grader can read")
