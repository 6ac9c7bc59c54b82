"""Turn the examples of docstrings into tests, and cut the examples of hidden tests out of the text.

An example shows its expected value to everybody who reads the function. So an example that becomes a hidden
test is removed from the docstrings of the program that the agent gets. The examples of visible tests stay.
All examples of a program that has test files stay, too: they are documentation, and no test is made of them.
"""

import ast
import doctest
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hpc_swe.base.syntax import parse, split_lines

DOCTESTS = "test_docstrings.py"
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Pair = tuple[str, str]
"""Source of an example, and what it prints."""


@dataclass(frozen=True)
class PlacedExample:
    """An example has a text, and its lines in a module."""

    pair: Pair
    raises: bool
    lines: range
    """Its lines, of which the first line of the module has the index 0."""


def examples(node: ast.Module | Documented) -> list[PlacedExample]:
    """Return the examples of a docstring whose lines hold nothing else.

    An example beside the quotation marks is left out. So is a docstring that doctest cannot read, and one
    with escaped line ends, whose lines are not those of the text.
    """
    first = node.body[0] if node.body else None
    match first:
        case ast.Expr(value=ast.Constant(value=str(text), lineno=start, end_lineno=int(end))):
            if text.count("\n") != end - start:
                return []
        case _:
            return []
    try:
        read = doctest.DocTestParser().get_examples(text)
    except ValueError:
        return []
    found = []
    for one in read:
        top = start - 1 + one.lineno
        lines = range(top, top + (one.source + one.want).count("\n"))
        if start - 1 < lines.start and lines.stop < end:
            found.append(PlacedExample((one.source, one.want), one.exc_msg is not None, lines))
    return found


def tests_of(text: str, name: str) -> tuple[str, dict[str, Pair]]:
    """Return a test file for the module `name`, and the example of each test: function -> example.

    A test holds a copy of its example and of those before it. An example that occurs again is tested once.
    """
    lines, pairs = [_DOCTEST.format(name=name)], dict[str, Pair]()
    for node in ast.walk(parse(text)):
        if isinstance(node, Documented):
            before: list[str] = []
            for number, one in enumerate(examples(node)):
                if one.raises:
                    continue
                source, want = one.pair
                if want and one.pair not in pairs.values():
                    test = f"test_{node.name}_{node.lineno}_{number}"
                    pairs[test] = one.pair
                    lines += [f"\n\ndef {test}():", f"    assert _run({before!r}, {source!r}) == {want!r}"]
                before.append(source)
    return "\n".join(lines) + "\n", pairs


def without(text: str, hidden: Collection[Pair]) -> str:
    """Return a module without these examples in any docstring; a text that is not Python stays as it is."""
    if not hidden:
        return text
    try:
        gone = {line for one in _all(text) if one.pair in hidden for line in one.lines}
    except (SyntaxError, ValueError):
        return text
    return "\n".join(line for number, line in enumerate(split_lines(text)) if number not in gone)


def _all(text: str) -> Iterator[PlacedExample]:
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Module | Documented):
            yield from examples(node)


_DOCTEST = """import contextlib
import io

import {name} as module


def _run(before, example):
    names = vars(module).copy()
    for source in (*before, example):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                code = compile(source.strip(), '<example>', 'eval')
            except SyntaxError:
                exec(source, names)
            else:
                value = eval(code, names)
                if value is not None:
                    print(repr(value))
    return output.getvalue()"""
