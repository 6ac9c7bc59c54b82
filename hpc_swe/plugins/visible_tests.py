"""Divide the tests in a test file's text into those that an agent sees and those that are hidden."""

import ast
import hashlib
from collections.abc import Iterable, Iterator

from hpc_swe.plugins.syntax import parse

TESTS = "test.py"
"""File of the tests where nothing names another one."""
TestFunction = ast.FunctionDef | ast.AsyncFunctionDef


def ids_of_tests(text: str, path: str = TESTS) -> list[str]:
    """Return the ids that pytest gives the tests of a file; none if only a run could determine them.

    Example:
        >>> ids_of_tests("def test_a():\\n    assert True\\n")
        ['test.py::test_a']
    """
    try:
        module = parse(text)
    except (SyntaxError, ValueError):
        return []
    if any(isinstance(node, ast.Attribute) and node.attr == "parametrize" for node in ast.walk(module)):
        return []
    found = [f"{path}::{test.name}" for test in _functions(module.body)]
    for node in module.body:
        if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _is_unittest(node)):
            found += [f"{path}::{node.name}::{test.name}" for test in _functions(node.body)]
    return list(dict.fromkeys(found))  # a later function of the same name replaces an earlier one


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
    names = ids_of_tests(text)
    tests = [test for test in _functions(parse(text).body) if not test.decorator_list] if names else []
    if len(names) != 1 or len(tests) != 1 or not all(isinstance(each, ast.Assert) for each in tests[0].body):
        return text
    (test,) = tests
    if len(test.body) < 2 or isinstance(test, ast.AsyncFunctionDef) or ast.unparse(test.args):
        return text
    parts = [f"def {test.name}_{n}():\n    {ast.unparse(each)}\n" for n, each in enumerate(test.body)]
    lines = text.split("\n")
    lines[test.lineno - 1 : test.end_lineno] = ["\n\n".join(parts)]
    return "\n".join(lines)


def cut(text: str, hidden: set[str]) -> str:
    """Return a test file without the functions of these names, such as ``test_a`` or ``TestB.test_c``."""
    lines: list[str | None] = [*text.split("\n")]
    _cut(parse(text).body, "", hidden, lines)
    return "\n".join(line for line in lines if line is not None)


def _cut(body: list[ast.stmt], prefix: str, hidden: set[str], lines: list[str | None]) -> None:
    gone = [node for node in body if isinstance(node, TestFunction) and prefix + node.name in hidden]
    for function in gone:
        first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        last = function.end_lineno or function.lineno
        lines[first - 1 : last] = [None] * (last - first + 1)
    if prefix and len(gone) == len(body):
        lines[gone[0].lineno - 1] = " " * gone[0].col_offset + "pass"  # a class needs a body
    for node in body:
        if isinstance(node, ast.ClassDef):
            _cut(node.body, f"{prefix}{node.name}.", hidden, lines)


def _functions(body: list[ast.stmt]) -> list[TestFunction]:
    return [node for node in body if isinstance(node, TestFunction) and node.name.startswith("test")]


def _is_unittest(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == "TestCase" for base in node.bases)


def names_of_tests(text: str) -> Iterator[str]:
    """Yield the qualified name of each function whose name begins with ``test``, in any class too."""
    for owner, test in functions(parse(text).body):
        yield f"{owner}.{test.name}".lstrip(".")


def functions(body: Iterable[ast.stmt], owner: str = "") -> Iterator[tuple[str, TestFunction]]:
    """Yield each function whose name begins with ``test``, after its classes' names, joined by dots."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{owner}.{node.name}".lstrip("."))
        elif isinstance(node, TestFunction) and node.name.startswith("test"):
            yield owner, node
