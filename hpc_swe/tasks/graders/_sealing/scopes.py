"""Find names of a test that stand for literals: bound once, to one value or to each row of a table."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from hpc_swe.tasks.visible_tests import TestFunction


@dataclass(frozen=True)
class Cells:
    """Cells are what a name stands for in turn: a table's column, or a container's members."""

    cells: tuple[ast.expr, ...]
    is_indexed: bool = False
    """Whether the name is that of the container, which must be indexed."""
    is_complete: bool = True
    """Whether each passing run meets every cell."""
    only: int | None = None
    """Position of the only cell that is met; None if there may be several."""
    is_parameter: bool = False
    """Whether pytest makes a test of each cell."""


Bound = ast.expr | Cells
Scope = Mapping[str, Bound]


def scope_of_module(module: ast.Module) -> Scope:
    """Return the names that a module binds once, to an expression."""
    return _assigned(module.body, _stores(ast.walk(module)))


def scope_of_test(test: TestFunction, outer: Scope) -> Scope:
    """Return the names of a test function that stand for expressions, its parameters and loops included."""
    nodes = [node for statement in test.body for node in ast.walk(statement)]
    stores = _stores(nodes)
    arguments = [one.arg for one in ast.walk(test.args) if isinstance(one, ast.arg)]
    found: dict[str, Bound] = {
        name: bound for name, bound in outer.items() if name not in {*stores, *arguments}
    }
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    found |= {name: one for name, one in _assigned(statements, stores).items() if name not in arguments}
    for decorator in test.decorator_list:
        parameters = _of_parametrize(decorator, found)
        found |= {name: one for name, one in parameters.items() if name in arguments and not stores[name]}
    for loop in statements:
        if isinstance(loop, ast.For):
            rows = rows_of(loop.iter, found)
            is_complete = not any(isinstance(one, _LEAVES) for one in own_nodes(loop.body))
            columns = columns_of(loop.target, rows) if rows else {}
            found |= {
                name: Cells(tuple(cells), is_complete=is_complete)
                for name, cells in columns.items()
                if stores[name] == 1
            }
    return found


def loops_over(statement: ast.For, scope: Scope) -> bool:
    """Return whether a loop runs over a table of the text that has a row."""
    return bool(rows_of(statement.iter, scope))


_LEAVES = (ast.Return, ast.Break, ast.Continue)
_APART = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def own_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and the nodes in them, without functions and classes that are defined there."""
    for node in nodes:
        if not isinstance(node, _APART):
            yield node
            yield from own_nodes(ast.iter_child_nodes(node))


def _stores(nodes: Iterable[ast.AST]) -> Counter[str]:
    found = Counter[str]()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                found[name] += 1
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] += 1
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                found.update({name: 2 for name in names})
            case ast.alias(name=name, asname=other):
                found[other or name.partition(".")[0]] += 1
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                found[name] += 1
            case ast.AugAssign(target=ast.Name(id=name)):
                found[name] += 1
    return found


def _assigned(statements: Iterable[ast.stmt], stores: Counter[str]) -> dict[str, Bound]:
    found: dict[str, Bound] = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    return {name: value for name, value in found.items() if stores[name] == 1}


def indexed(bound: Bound | None) -> Cells | None:
    """Return the cells of a list, tuple or dictionary that a name is bound to."""
    match bound:
        case ast.Dict(keys=keys) if not all(keys):  # it unpacks another one
            return None
        case ast.List(elts=cells) | ast.Tuple(elts=cells) | ast.Dict(values=cells) if cells:
            return Cells(tuple(cells), is_indexed=True, is_complete=False)
    return None


def rows_of(table: ast.expr, scope: Scope) -> list[ast.expr]:
    """Return the rows of a table that a loop runs over; nothing where the text does not say them all."""
    match table:
        case ast.List(elts=rows) | ast.Tuple(elts=rows):
            return [] if any(isinstance(row, ast.Starred) for row in rows) else rows
        case ast.Name(id=name) if isinstance(bound := scope.get(name), ast.List | ast.Tuple | ast.Dict):
            return list(filter(None, bound.keys)) if isinstance(bound, ast.Dict) else rows_of(bound, {})
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
            number = ast.Name("_", ast.Load())
            return [ast.Tuple([number, row], ast.Load()) for row in rows_of(inner, scope)]
        case ast.Call(func=ast.Name(id="zip"), args=inners, keywords=[]):
            columns = [rows_of(inner, scope) for inner in inners]
            return [ast.Tuple(list(row), ast.Load()) for row in zip(*columns, strict=False)]
        case ast.Call(func=ast.Attribute(value=owner, attr="items"), args=[]):
            known = scope.get(owner.id) if isinstance(owner, ast.Name) else owner
            if isinstance(known, ast.Dict) and all(known.keys):
                pairs = zip(filter(None, known.keys), known.values, strict=True)
                return [ast.Tuple([key, value], ast.Load()) for key, value in pairs]
    return []


def columns_of(target: ast.expr, rows: list[ast.expr]) -> dict[str, list[ast.expr]]:
    """Return what each name of a loop's target stands for, row by row."""
    match target:
        case ast.Name(id=name):
            return {name: rows}
        case ast.Tuple(elts=inners) | ast.List(elts=inners):
            cells = [row.elts for row in rows if isinstance(row, ast.Tuple | ast.List)]
            if len(cells) == len(rows) and all(len(row) == len(inners) for row in cells):
                columns = zip(inners, zip(*cells, strict=True), strict=True)
                found = [columns_of(inner, list(column)) for inner, column in columns]
                return dict(chain.from_iterable(each.items() for each in found))
    return {}


def _of_parametrize(decorator: ast.expr, scope: Scope) -> dict[str, Cells]:
    """Return the parameters of a test with their values; a marked row may be skipped."""
    match decorator:
        case ast.Call(func=ast.Attribute(attr="parametrize"), args=[names, table], keywords=keywords):
            if any(word.arg != "ids" for word in keywords):
                return {}
        case _:
            return {}
    titles, is_plain = _titles(names), True
    rows: list[ast.expr] = []
    for row in rows_of(table, scope):
        match row:
            case ast.Call(func=ast.Attribute(attr="param"), args=cells, keywords=more):
                is_plain = is_plain and all(word.arg == "id" for word in more)
                rows.append(cells[0] if len(titles) == 1 and cells else ast.Tuple(cells, ast.Load()))
            case _:
                rows.append(row)
    target: ast.expr = ast.Tuple([ast.Name(one, ast.Store()) for one in titles], ast.Store())
    if len(titles) == 1:
        target = ast.Name(titles[0], ast.Store())
    columns = columns_of(target, rows) if rows else {}
    return {
        name: Cells(tuple(cells), is_complete=is_plain, is_parameter=True) for name, cells in columns.items()
    }


def _titles(names: ast.expr) -> list[str]:
    match names:
        case ast.Constant(value=str(text)):
            return [one for one in re.split(r"[\s,]+", text) if one]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [str(one.value) for one in parts if isinstance(one, ast.Constant)]
    return []
