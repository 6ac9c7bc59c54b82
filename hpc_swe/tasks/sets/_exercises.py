"""Make rows of files of exercises, which ask for a program: a statement, tests, and perhaps a solution.

The agent gets a `solution.py` in which nothing is written yet.
"""

import ast
import builtins
import re
import symtable
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_swe.base.syntax import PythonText, parse
from hpc_swe.tasks.sets import _cases
from hpc_swe.tasks.visible_tests import SOLUTION, TESTS

_WRITE = f"Write {SOLUTION}, with all imports that it needs."
_WRITE_PROGRAM = f"Write the program {SOLUTION}. It reads standard input and prints to standard output."
_UNWRITTEN_PROGRAM = "# This program reads standard input and prints to standard output.\n"
_TYPING = "from typing import *\n\n\n"
"""Published starter codes take these names for granted."""
_FUTURE = "from __future__ import annotations\n\n\n"
"""What annotations name may lack its import."""
_HELPERS = """import collections, decimal, fractions, functools, itertools, json, math, operator, re, string
import numpy as np
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from math import isclose, isinf, isnan, sqrt
"""
"""What published assertions take for granted, where no solution shows its imports."""
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Exercise:
    """An exercise is a program that somebody has to write."""

    name: str
    statement: str
    solution: str = ""
    """A right program, where one is known."""
    starter: str = ""
    """What the author gives to begin with."""

    def of_module(self, column: str, tests: str) -> dict[str, Any]:
        """Return a row whose tests are a module for pytest; many leave out their import from `solution`."""
        source = read(column, tests)
        names = _imported(source)
        if not names:
            used = _used(ast.walk(source.tree))
            own = [name for name in used if name in _defined(self.solution)]
            if not own:
                raise ValueError(f"column {column} uses nothing of the solution")
            lines = [*_imports(self.solution, used), f"from solution import {', '.join(own)}"]
            tests, names = "\n".join([*lines, "", tests]), own
        return self._row(_WRITE, unwritten(self.solution, names), tests)

    def of_assertions(self, column: str, texts: Sequence[str], set_up: Iterable[str]) -> dict[str, Any]:
        """Return a row of assertions; each becomes a test.

        They get what is asked, and no other name of the solution: it could replace `sorted` or `Counter`.
        """
        sources = [read(f"{column}[{n}]", text) for n, text in enumerate(texts)]
        prepared = "\n".join(filter(None, set_up))
        trees = [read(f"{column}, set-up", prepared).tree, *(source.tree for source in sources)]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        known = _defined(self.solution) if self.solution else _asked(column, nodes)
        used = _used(nodes)
        names = [one for one in used if one in known]
        if not names:
            raise ValueError(f"column {column}: its assertions call no function of the solution")
        lines = _imports(self.solution or _HELPERS, used)
        lines += [f"from solution import {', '.join(names)}", prepared]
        for n, source in enumerate(sources):  # on one line, since strings of several lines cannot be indented
            lines.append(f"\ndef test_{n}(): " + "; ".join(map(source.segment, source.tree.body)))
        tests = "\n".join(lines) + "\n"
        read(column, tests)
        return self._row(_WRITE, unwritten(self.solution, names), tests)

    def of_programs(self, pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
        """Return a row of a program that gets and prints texts; a text may be a list of its lines."""
        texts = [tuple("\n".join(one) if isinstance(one, list) else one for one in pair) for pair in pairs]
        if not all(isinstance(one, str) for pair in texts for one in pair):
            raise ValueError("the input or output of a case is neither a text nor a list of lines")
        tests, visible = _cases.of_programs([(given, expected) for given, expected in texts])
        return self._row(_WRITE_PROGRAM, _UNWRITTEN_PROGRAM, tests, visible)

    def of_calls(self, called: str, calls: Sequence[tuple[Any, Sequence[Any]]]) -> dict[str, Any]:
        """Return a row of a function, or a method of `Solution`: arguments, and all values that are right."""
        if not called.isidentifier():
            raise ValueError(f"the function's name {called!r} is not one of Python")
        if not all(isinstance(given, list) for given, _ in calls):
            raise ValueError("the input of a case is not a list of arguments")
        is_method = "class Solution" in (self.starter or self.solution)
        owner, method = ("Solution", called) if is_method else (called, "")
        tests, visible = _cases.of_calls(owner, method, calls)
        first = _with_body(self.starter) if self.starter.strip() else unwritten(self.solution, [owner], "")
        return self._row(_WRITE, _TYPING + first, tests, visible, self.solution and _TYPING + self.solution)

    def _row(
        self, request: str, first: str, tests: str, visible: str = "", solution: str = ""
    ) -> dict[str, Any]:
        """Return the columns of a row; without `visible` the reader chooses what the agent sees."""
        solution = solution or self.solution
        columns = {"files": {SOLUTION: first, TESTS: visible or tests}}
        columns |= {"tests": {TESTS: tests}} if visible else {}
        columns |= {"fixed": {SOLUTION: solution}} if solution else {}
        return {
            "task_id": re.sub(r"[^\w.-]+", "-", self.name),
            "problem_statement": f"{self.statement.strip()}\n\n{request}",
        } | {name: _files(texts) for name, texts in columns.items()}


def read(column: str, text: str) -> PythonText:
    """Parse a column; raise ValueError if it is not Python."""
    try:
        return PythonText(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"column {column} is not Python: {error}") from None


def first_python(texts: Iterable[str], name: str = "") -> str:
    """Return the first text that is Python 3 and holds the name, or ""; older ones are often Python 2."""
    for text in texts:
        try:
            parse(text)
        except (SyntaxError, ValueError):
            continue
        if name in text:
            return text
    return ""


def unwritten(code: str, names: Collection[str], above: str = _FUTURE) -> str:
    """Return the heads of functions and classes, with nothing written in them; `*` stands for all.

    Raise ValueError if pytest would take one of these names for that of a test.
    """
    if tests := [name for name in names if name.startswith(("test", "Test"))]:
        raise ValueError(f"it asks for {tests[0]}, which pytest would run as a test")
    found = {node.name: node for node in parse(code).body if isinstance(node, _Definition)}
    wanted = found if "*" in names else {name: found.get(name) for name in names}
    parts = [
        ast.unparse(_emptied(node)) if node else f"def {name}(*arguments):\n    raise NotImplementedError"
        for name, node in wanted.items()
    ]
    return above + "\n\n\n".join(parts) + "\n"


def _emptied(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.ClassDef):
        methods = [_emptied(one) for one in node.body if isinstance(one, ast.FunctionDef)]
        node.body = methods or [ast.Pass()]
    elif isinstance(node, _Definition):
        node.body = parse("raise NotImplementedError").body
    return node


def _with_body(starter: str) -> str:
    """Return a starter code that can be imported: published ones often end in a head without a body."""
    text = f"{starter.rstrip()} raise NotImplementedError\n"
    return text if first_python([text]) else f"{starter.rstrip()}\n"


def _files(texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"path": path, "content": text} for path, text in texts.items()]


def _defined(code: str) -> set[str]:
    return {node.name for node in parse(code).body if isinstance(node, _Definition)}


def _used(nodes: Iterable[ast.AST]) -> dict[str, None]:
    return dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))


def _asked(column: str, nodes: Iterable[ast.AST]) -> list[str]:
    """Return the functions that assertions call and neither Python nor they themselves give."""
    called = _used(node.func for node in nodes if isinstance(node, ast.Call))
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    names = [one for one in called if one not in bound and not hasattr(builtins, one)]
    asked = [one for one in names if not _imports(_HELPERS, [one])]
    if not asked and len(names) > 1:
        raise ValueError(f"column {column}: which of {', '.join(names)} is asked?")
    return asked or names  # a library has a function of the asked name, too


def _imports(code: str, used: Collection[str]) -> list[str]:
    """Return the imports of a module that give used names, as far as they do; a star may give any."""
    nodes = [node for node in parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in nodes:
        names = {one: one.asname or one.name.partition(".")[0] for one in node.names}
        node.names = [one for one, name in names.items() if name in used or name == "*"]
    return [ast.unparse(node) for node in nodes if node.names]


def _stars(tree: ast.AST) -> list[ast.ImportFrom]:
    nodes = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.names[0].name == "*"]
    return [one for one in nodes if one.module and not one.level]


def _imported(source: PythonText) -> list[str]:
    """Return the names that tests import from the solution, or `*` for the module."""
    found: list[str] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Import) and any(alias.name == "solution" for alias in node.names):
            found.append("*")
    return found


def with_names(text: str, *programs: Mapping[str, str]) -> str:
    """Return tests that keep names of Python, of libraries and their own where they import all of a program.

    `programs` are its files as given and as repaired: path -> text. A patch gives the tests all that it
    defines, but no `sorted` or `isclose` of its own, unless one of these programs defines that name.
    """
    try:
        source = PythonText(text)
        table = symtable.symtable(source.text, TESTS, "exec")
    except (SyntaxError, ValueError, RecursionError):
        return text
    used = {name for name in _globals(table) if not name.startswith("_")}
    stars = [(star, star.module or "") for star in _stars(source.tree)]
    known = [(star, module) for star, module in stars if any(_path(module) in files for files in programs)]
    return source.with_changes((star, _all_but_own(module, used, programs)) for star, module in known)


def _path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a module looks up in itself, or among Python's own."""
    is_module = table.get_type() == "module"
    for one in table.get_symbols():
        if one.is_referenced() and (is_module or one.is_global()):
            yield one.get_name()
    for inner in table.get_children():
        yield from _globals(inner)


def _all_but_own(module: str, used: set[str], programs: Iterable[Mapping[str, str]]) -> str:
    """Return an import of all of a module but used names that exist before it, and that it does not define.

    Imports that its programs make of libraries stand above. What is imported is chosen before the first name
    is bound, since a patch could have a `globals` of its own.
    """
    lines: dict[str, None] = {}
    defined: set[str] = set()
    for files in programs:
        try:
            names, imports = _defined_in(module, used, files)
        except (KeyError, SyntaxError, ValueError, RecursionError):  # not a program yet
            continue
        defined, lines = defined | names, lines | dict.fromkeys(imports)
    if not (own := sorted(used - defined)):
        return f"from {module} import *"
    # join makes plain text, since a name in __all__ may be of a class whose hash and equality lie
    exported = "[''.join([_n]) for _n in _has.get('__all__', [_n for _n in _has if _n[:1] != '_'])]"
    return "; ".join(
        [
            *lines,
            f"import builtins as _python, {module} as _program",
            "_own, _has = {*_python.vars(_python), *_python.globals()}, _python.vars(_program)",
            f"_own.intersection_update({own})",
            f"_python.globals().update({{_n: _has[_n] for _n in {exported} if _n not in _own}})",
        ]
    )


def _defined_in(module: str, used: set[str], files: Mapping[str, str]) -> tuple[set[str], list[str]]:
    """Return the names that a module has from these files, and its imports of other used names."""
    code = files[path := _path(module)]
    others = {other: text for other, text in files.items() if other != path}
    imports = [
        line
        for line in _imports(code, used)
        if not line.startswith(("from .", "from __future__ "))
        and files.keys().isdisjoint(_path(word.strip(",")) for word in line.split())
    ]
    names = _bound(code, by_import=True) - _bound("\n".join(imports), by_import=True) | _bound(code)
    for inner in [one.module or "" for one in _stars(parse(code))]:
        names |= _defined_in(inner, used, others)[0] if _path(inner) in others else set()
    return names, imports


def _bound(code: str, by_import: bool = False) -> set[str]:
    symbols = symtable.symtable(code, SOLUTION, "exec").get_symbols()
    return {one.get_name() for one in symbols if one.is_assigned() or (by_import and one.is_imported())}
