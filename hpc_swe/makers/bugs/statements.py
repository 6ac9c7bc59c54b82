"""Write the problem statement of a made bug: in general words, or with the function at fault.

With the function in the statement a model repairs it without a look at the files, so that a task of a large
module costs a short prompt.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from hpc_swe.base.syntax import parse
from hpc_swe.makers.bugs.mutations import Module, Mutant
from hpc_swe.tasks.visible_tests import functions

Kind = Literal["program", "function"]
GENERAL = (
    "Some tests of this program fail. Find the fault in the program and repair it, so that all tests pass."
)
MOST_TESTS, MOST_CHARS = 2, 1500
"""Failing tests that a statement shows, the shortest ones, and characters of them together."""


def with_function(target: str, mutant: Mutant, failing: Iterable[str], files: Mapping[str, str]) -> str:
    """Return a statement with the function at fault and tests that fail.

    Args:
        target: Path of the module.
        mutant: The fault.
        failing: Names of visible tests that fail: ``test_a.py::TestB.test_c``.
        files: Path -> text of the files that the agent sees.
    """
    parts = [
        f"The function {mutant.function.name} in {target} has a fault, so that tests fail. Repair it.",
        _fenced(_function(mutant, files[target])),
    ]
    if shown := [*_shown({*failing}, files)]:
        parts += ["These tests fail:" if len(shown) > 1 else "This test fails:", *map(_fenced, shown)]
    return "\n\n".join(parts)


def _function(mutant: Mutant, text: str) -> str:
    """Return the faulty function of the module as the agent sees it, below the first lines of its classes."""
    number = [each.start for each in Module(mutant.text).functions].index(mutant.function.start)
    module = Module(text)
    place = module.functions[number]
    classes = enumerate(place.name.split(".")[:-1])
    above = "".join(f"{'    ' * depth}class {name}:\n" for depth, name in classes)
    return above + module.data[place.start : place.end].decode()


def _shown(failing: set[str], files: Mapping[str, str]) -> Iterator[str]:
    texts = [
        ast.get_source_segment(files[path], test, padded=True) or ""
        for path in sorted({name.partition("::")[0] for name in failing})
        for owner, test in functions(parse(files[path]).body)
        if f"{path}::{f'{owner}.{test.name}'.lstrip('.')}" in failing
    ]
    left = MOST_CHARS
    for text in sorted(texts, key=len)[:MOST_TESTS]:
        left -= len(text)
        if left >= 0:
            yield text


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}python\n{text.rstrip()}\n{fence}"
