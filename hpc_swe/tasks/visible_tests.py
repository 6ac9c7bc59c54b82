"""Divide the tests in a test file's text into those that an agent sees and those that are hidden."""

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TypeGuard

from hpc_swe.base.syntax import PythonText, as_read, parse

TESTS = "test.py"
"""File of the tests where nothing names another one."""
SOLUTION = "solution.py"
"""File of the program in published sets."""
TestFunction = ast.FunctionDef | ast.AsyncFunctionDef


def ids_of_tests(text: str, path: str = TESTS) -> list[str]:
    """Return the ids, without parameters, of tests that pytest is sure to find in a file; it may find more.

    Example:
        >>> ids_of_tests("def test_a():\\n    assert True\\n")
        ['test.py::test_a']
    """
    try:
        module = parse(as_read(text))
    except (SyntaxError, ValueError):
        return []
    # A later function replaces an earlier one of its name.
    return [] if _says_no(module.body) else list(dict.fromkeys(_ids(module.body, path)))


def _ids(body: Iterable[ast.stmt], owner: str) -> Iterator[str]:
    yield from (f"{owner}::{node.name}" for node in body if _is_test(node))
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    for node in body:
        if not isinstance(node, ast.ClassDef) or _excludes(node, classes):
            continue
        if node.name.startswith("Test") or _is_unittest(node):
            inner = [one for one in node.body if not (isinstance(one, ast.ClassDef) and _is_unittest(node))]
            yield from _ids(inner, f"{owner}::{node.name}")


def _excludes(node: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> bool:
    """Return whether pytest finds no test in a class, for its own sake or that of a base among `known`."""
    methods = {one.name for one in node.body if isinstance(one, TestFunction)}
    is_made = not _is_unittest(node) and not methods.isdisjoint({"__init__", "__new__"})
    others = {name: one for name, one in known.items() if one is not node}
    bases = [others[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in others]
    return is_made or _says_no(node.body) or any(_excludes(base, others) for base in bases)


def _says_no(body: Iterable[ast.stmt]) -> bool:
    return any(isinstance(one, ast.Assign) and ast.unparse(one) == "__test__ = False" for one in body)


def name_of(test_id: str) -> str:
    """Return the name in its file of the function that a test's id names: ``TestB.test_c``."""
    return test_id.partition("::")[2].partition("[")[0].replace("::", ".")


def half(names: Iterable[str], task_id: str, share: float) -> set[str]:
    """Choose a share of the names, rounded down, by a hash: every run hides the same tests of a task."""
    order = sorted(set(names), key=lambda name: hashlib.sha256(f"{task_id} {name}".encode()).digest())
    return set(order[: int(share * len(order))])


def split_only_test(text: str) -> str:
    """Return a test file with one test per assertion, if it has a single test that only makes assertions.

    Some of them can then be hidden, and the file as a whole tests the same.
    """
    try:
        source = PythonText(text)
    except (SyntaxError, ValueError):
        return text
    tests = [test for _, test in functions(source.tree.body)]
    if len(tests) != 1 or tests[0] not in source.tree.body or not isinstance(tests[0], ast.FunctionDef):
        return text
    (test,) = tests
    takes = [one for one in ast.walk(test.args) if isinstance(one, ast.arg)]
    if len(test.body) < 2 or takes or test.decorator_list:
        return text
    if not all(isinstance(each, ast.Assert) for each in test.body):
        return text
    parts = [f"def {test.name}_{n}():\n    {source.segment(each)}\n" for n, each in enumerate(test.body)]
    return source.with_changes([(test, "\n\n".join(parts))])


def cut(text: str, hidden: set[str]) -> str:
    """Return a test file without the functions of these names, such as ``test_a`` or ``TestB.test_c``."""
    text = as_read(text)
    lines: list[str | None] = [*text.split("\n")]
    module = parse(text)
    _cut(module.body, module, "", hidden, lines)
    return "\n".join(line for line in lines if line is not None)


def _cut(
    body: list[ast.stmt], owner: ast.AST, prefix: str, hidden: set[str], lines: list[str | None]
) -> None:
    gone = [node for node in body if _is_test(node) and prefix + node.name in hidden]
    for function in gone:
        first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        last = function.end_lineno or function.lineno
        lines[first - 1 : last] = [None] * (last - first + 1)
    if gone and len(gone) == len(body) and not isinstance(owner, ast.Module):
        lines[gone[0].lineno - 1] = " " * gone[0].col_offset + "pass"  # it needs a body
    for node in body:
        if isinstance(node, ast.ClassDef):
            _cut(node.body, node, f"{prefix}{node.name}.", hidden, lines)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for inner in _bodies(node):
                _cut(inner, node, prefix, hidden, lines)


def _is_unittest(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("TestCase") for base in node.bases)


def _is_test(node: ast.stmt) -> TypeGuard[TestFunction]:
    if not isinstance(node, TestFunction) or not node.name.startswith("test"):
        return False
    return not any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)


@lru_cache(maxsize=128)  # each grading of a task asks again
def names_of_tests(text: str) -> tuple[str, ...]:
    """Return the qualified name of each function whose name begins with ``test``, in any class too.

    Raise SyntaxError or ValueError if the text is not Python.
    """
    body = parse(as_read(text)).body
    return tuple(f"{owner}.{test.name}".lstrip(".") for owner, test in functions(body))


@lru_cache(maxsize=128)
def holds_tests(text: str) -> bool:
    """Return whether pytest may find a test in a file: a function, a class or another name."""
    try:
        nodes = list(ast.walk(parse(as_read(text))))
    except (SyntaxError, ValueError):
        return False
    names = {
        one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    names |= {one.asname or one.name for one in nodes if isinstance(one, ast.alias)}
    names |= {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    is_case = any(_is_unittest(one) for one in nodes if isinstance(one, ast.ClassDef))
    return is_case or any(name.startswith(("test", "Test")) for name in names)


@lru_cache(maxsize=128)
def holds_only_tests(text: str) -> bool:
    """Return whether a file defines tests and nothing else, as one of mixins for other tests does."""
    if "test" not in text:
        return False
    try:
        body = parse(as_read(text)).body
    except (SyntaxError, ValueError):
        return False
    defined = [node for node in body if isinstance(node, TestFunction | ast.ClassDef)]
    return bool(defined) and all(any(functions([node])) for node in defined)


def functions(body: Iterable[ast.stmt], owner: str = "") -> Iterator[tuple[str, TestFunction]]:
    """Yield each function whose name begins with ``test``, after its classes' names, joined by dots.

    Functions below ``if``, ``try`` and ``with`` count as well, fixtures do not.
    """
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{owner}.{node.name}".lstrip("."))
        elif _is_test(node):
            yield owner, node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for inner in _bodies(node):
                yield from functions(inner, owner)


def _bodies(node: ast.If | ast.Try | ast.With) -> list[list[ast.stmt]]:
    if isinstance(node, ast.Try):
        return [node.body, *(one.body for one in node.handlers), node.orelse, node.finalbody]
    return [node.body, node.orelse] if isinstance(node, ast.If) else [node.body]
