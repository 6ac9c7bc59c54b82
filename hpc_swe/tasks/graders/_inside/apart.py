"""Run the guard's texts where code under test finds none of their names."""

import builtins
import functools
import sys
from typing import Any


def load_apart(text: str) -> Any:
    """Return the function that makes the guard, with its memory and the caller's code.

    Functions of the text look up names in a dictionary that no module has, and built-in names in a copy.
    """
    names: Any = {"__name__": "guard", "__builtins__": dict(vars(builtins))}
    exec(compile(text, "<guard>", "exec"), names)
    return functools.partial(names["make_guard"], names["remember"](), sys._getframe(1).f_code)  # noqa: SLF001
