"""Find the assertions of a test that can be sealed, and which of them each passing run comes by."""

import ast
import re
from collections.abc import Iterator

from hpc_swe.tasks.graders._sealing.scopes import Scope, loops_over, own_nodes
from hpc_swe.tasks.visible_tests import TestFunction

_SWALLOWS = re.compile("raises|warns|suppress|fail|skip|Raises|Warns|Fails|expect", re.IGNORECASE)
_CATCHES = {"AssertionError", "Exception", "BaseException"}
Step = tuple[ast.Assert | ast.Expr, bool]
"""An assertion, and whether each passing run comes by."""


def steps(test: TestFunction, scope: Scope) -> list[Step]:
    """Return the assertions of a test's own body whose failure fails the test."""
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(test.body)):
        return []
    return list(_of_body(test.body, True, scope))  # noqa: FBT003


def _of_body(body: list[ast.stmt], is_required: bool, scope: Scope) -> Iterator[Step]:
    for statement in body:
        match statement:
            case ast.Assert() | ast.Expr():
                yield statement, is_required
            case ast.With(items=items) | ast.AsyncWith(items=items):
                if not any(_swallows(item.context_expr) for item in items):
                    yield from _of_body(statement.body, is_required, scope)
            case ast.For():
                meets_all = is_required and loops_over(statement, scope)
                yield from _of_body(statement.body, meets_all, scope)
                yield from _of_body(statement.orelse, False, scope)  # noqa: FBT003
            case ast.Try():
                yield from _of_try(statement, is_required, scope)
            case ast.If() | ast.While() | ast.AsyncFor():
                yield from _of_body([*statement.body], False, scope)  # noqa: FBT003
                yield from _of_body([*statement.orelse], False, scope)  # noqa: FBT003
        is_required = is_required and not _leaves(statement)


def _swallows(context: ast.expr) -> bool:
    """Return whether a block may end well after a failure in it, by the names of what is called."""
    calls = [one.func for one in ast.walk(context) if isinstance(one, ast.Call)]
    shown = calls if isinstance(context, ast.Call) else [context]
    return any(_SWALLOWS.search(ast.unparse(one)) for one in shown)


def _of_try(statement: ast.Try, is_required: bool, scope: Scope) -> Iterator[Step]:
    """Leave alone what a handler could catch."""
    kinds = [ast.unparse(one.type) if one.type else "Exception" for one in statement.handlers]
    if not any(kind in text for kind in _CATCHES for text in kinds):
        yield from _of_body(statement.body, is_required and not kinds, scope)
        yield from _of_body(statement.orelse, is_required and not kinds, scope)
    yield from _of_body(statement.finalbody, is_required, scope)


def _leaves(statement: ast.stmt) -> bool:
    """Return whether a run may leave the body at this statement and still pass."""
    is_loop = isinstance(statement, ast.For | ast.AsyncFor | ast.While)
    kinds = (ast.Return,) if is_loop else (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(node, kinds) for node in own_nodes([statement]))
