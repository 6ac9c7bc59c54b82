"""Solutions that differ from the reference and do the same, of which none may be accused.

Each function that a reference changes is written anew: other names, other expressions of the same values, the
branches the other way round.
"""

import ast
from collections.abc import Iterator

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
