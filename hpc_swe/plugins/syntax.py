"""Parse Python source in threads.

Before Python 3.11.5 all threads that build syntax trees count their depth in one number, so that two of them
at a time may fail with a SystemError. In a reward worker a right patch would count as unresolved by chance.
"""

import ast
import threading

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
