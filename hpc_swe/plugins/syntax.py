"""Parse Python source in threads.

Before Python 3.11.5 all threads that build syntax trees count their depth in one number, so that two of them
at a time may fail with a SystemError. In a reward worker a right patch would count as unresolved by chance.
"""

import ast
import threading

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


def require_shallow(tree: ast.AST) -> None:
    """Raise SyntaxError if a tree is so deep that a grader, which walks through it, would fail."""
    level, depth = [tree], 0
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if depth > MOST_DEPTH:
        raise SyntaxError(f"it is nested too deeply: {depth} levels, of {MOST_DEPTH} that a grader can read")
