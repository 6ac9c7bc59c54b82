"""Solutions that differ from the reference and do the same: python -m tests.bench.honest CONFIG...

Each function that a reference changes is written anew: other names, other expressions of the same values, the
branches the other way round. None may be accused. As a program it grades such solutions of all instances of a
configuration that `taskset.checked` calls usable, with their retests, and prints what came of each.
"""

import ast
import difflib
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.base.records import Task
from hpc_swe.config import config as configuration
from hpc_swe.tasks.hidden_tests import with_versions

SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


class Renamed(ast.NodeTransformer):
    """Other names for what a function assigns, where no function in it sees them."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        inner = list(ast.walk(node))[1:]
        if any(isinstance(one, SCOPES | ast.Global | ast.Nonlocal) for one in inner):
            return node
        names = [one for one in inner if isinstance(one, ast.Name)]
        own = {one.id for one in names if isinstance(one.ctx, ast.Store)}
        own -= {one.arg for one in inner if isinstance(one, ast.arg)}
        if "locals" not in {one.id for one in names}:
            for one in names:
                one.id += "_here" if one.id in own else ""
        return node


class Turned(ast.NodeTransformer):
    """Branches the other way round."""

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        opposite = ast.UnaryOp(ast.Not(), node.test)
        if node.orelse:
            node.test, node.body, node.orelse = opposite, node.orelse, node.body
        else:
            node.test = ast.UnaryOp(ast.Not(), opposite)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        self.generic_visit(node)
        node.test, node.body, node.orelse = ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body
        return node


class Split(ast.NodeTransformer):
    """Texts of two pieces; what is returned has a name first."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str) or len(node.value) < 2:
            return node
        half = len(node.value) // 2
        return ast.BinOp(ast.Constant(node.value[:half]), ast.Add(), ast.Constant(node.value[half:]))

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.Return | list[ast.stmt]:
        self.generic_visit(node)
        if node.value is None:
            return node
        kept = ast.Assign([ast.Name("returned", ast.Store())], node.value)
        return [kept, ast.Return(ast.Name("returned", ast.Load()))]


Transformers = tuple[type[ast.NodeTransformer], ...]
WAYS: dict[str, Transformers] = {
    "renamed": (Renamed,),
    "turned": (Turned,),
    "split": (Split,),
    "all of these": (Renamed, Turned, Split),
}


def variants(text: str, lines: set[int]) -> Iterator[tuple[str, str]]:
    """Ways, and the module in which each function is written so that has one of the lines."""
    for way, transformers in WAYS.items():
        new = text.split("\n")
        for function in reversed(list(_functions(ast.parse(text).body))):
            if lines.intersection(range(function.lineno, (function.end_lineno or 0) + 1)):
                _rewrite(new, function, transformers)
        if (changed := "\n".join(new)) != text:
            yield way, changed


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body)
        elif isinstance(node, ast.FunctionDef):
            yield node


def _rewrite(
    lines: list[str], function: ast.FunctionDef, ways: tuple[type[ast.NodeTransformer], ...]
) -> None:
    if ast.get_docstring(function):
        function.body = function.body[1:]
    if not function.body or function.body[0].lineno == function.lineno:
        return
    first, last, before = function.body[0].lineno, function.end_lineno or 0, ast.unparse(function)
    for way in ways:
        function = way().visit(function)
    ast.fix_missing_locations(function)
    if ast.unparse(function) != before:
        written = ast.unparse(ast.Module(function.body, [])).split("\n")
        lines[first - 1 : last] = [" " * (function.col_offset + 4) + line for line in written]


def solutions(task: Task, reference: str, sandboxes: Sandboxes) -> Iterator[tuple[str, str]]:
    """Ways, and patches: of each file of the reference the variants, the others as the reference has them."""
    with sandboxes.open(task) as sandbox:
        paths = [path for path in task.tests.extra["set_up"].split("\n") if path.endswith(".py")]
        old = {path: _read(sandbox, path) for path in paths}
        sandbox.write(".git/reference", reference.encode())
        assert sandbox.run("git apply --whitespace=nowarn .git/reference", 60).exit_code == 0
        new = {path: _read(sandbox, path) for path in paths}
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        changes = difflib.SequenceMatcher(None, old[path].split("\n"), new[path].split("\n")).get_opcodes()
        lines = {
            line + 1 for kind, _, _, start, end in changes if kind != "equal" for line in range(start, end)
        }
        for way, text in variants(new[path], lines):
            found.setdefault(way, dict(new))[path] = text
    for way, texts in found.items():
        yield way, "".join(_patch(path, old[path], text) for path, text in texts.items() if text != old[path])


def _read(sandbox, path: str) -> str:
    try:
        return sandbox.read(path).decode()
    except OSError:
        return ""


def _patch(path: str, old: str, new: str) -> str:
    before, after = (text.splitlines(keepends=True) for text in (old, new))
    source = f"a/{path}" if old else "/dev/null"
    mode = "" if old else "new file mode 100644\n"
    return f"diff --git a/{path} b/{path}\n{mode}" + "".join(
        difflib.unified_diff(before, after, source, f"b/{path}")
    )


def main(words: list[str]) -> None:
    """Print what came of each."""
    config = configuration.from_words(words)
    taken = config.tasks.take(config.taskset)
    tasks = [*taken["train"], *taken["eval"]]
    references, changed = config.taskset.references(tasks), config.taskset.changed_tests(tasks)
    config.sandbox.check()

    def one(task: Task) -> list[str]:
        told = []
        for way, text in solutions(task, references[task.task_id], config.sandbox):
            score = config.grader.grade(
                with_versions(task, changed.get(task.task_id, "")), text, config.sandbox
            )
            retest = "with a retest" if task.task_id in changed else "without one"
            print(f"{task.task_id}: {way}: {score.outcome} {retest} {score.detail[-200:]!r}", flush=True)
            told.append(f"{score.outcome} {retest}")
        return told

    with ThreadPoolExecutor(2) as pool:
        print(Counter(word for told in pool.map(one, tasks) for word in told))


if __name__ == "__main__":
    main(sys.argv[1:])
