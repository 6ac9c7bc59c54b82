"""Read what an assertion demands of a value, where the rest of the assertion is made of literals."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

from hpc_swe.tasks.graders._sealing.answers import is_plain

_MOST_MEMBERS = 100_000
_MAKERS: dict[str, Callable[..., object]] = {
    **{
        kind.__name__: kind
        for kind in (list, tuple, set, frozenset, dict, float, int, str, Decimal, Fraction)
    },
    "sorted": sorted,
    "range": lambda *bounds: _short(range(*bounds)),
}
"""Calls of literals that are evaluated outside the sandbox."""
_OPERATORS: dict[type, Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: lambda one, other: _product(one, other),
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: lambda one, other: _power(one, other),
}
_COMPARES: dict[type, str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.NotEq: "!="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!=", "==": "==", "counts": "counts"}
_ISCLOSE = {"isclose", "math.isclose"}
"""Those of other modules have other tolerances."""
_COMPARING = re.compile("equal|close|compare|same|match|diff", re.IGNORECASE)
"""Names of functions that compare values in the sandbox."""
_KINDS = ("", "List", "Tuple", "Dict", "Set", "MultiLine")
_HOWS = {f"assert{kind}Equal": "==" for kind in _KINDS} | {"assertEquals": "==", "assertNotEqual": "!="}
_HOWS |= {"assertLess": "<", "assertLessEqual": "<=", "assertGreater": ">", "assertGreaterEqual": ">="}
_HOWS |= {"assertCountEqual": "counts"}
_OPS: dict[str, ast.cmpop] = {"assertIn": ast.In(), "assertNotIn": ast.NotIn()}
_OPS |= {"assertIs": ast.Is(), "assertIsNot": ast.IsNot()}
_TRUTHS = {"assertTrue": "not not ({})", "assertFalse": "not ({})", "assertIsNone": "({}) is None"}
_TRUTHS |= {"assertIsNotNone": "({}) is not None"}
UNITTEST = {*_HOWS, *_TRUTHS, *_OPS, "assertAlmostEqual", "assertIsInstance"}
"""Methods of `unittest.TestCase` that can be read."""


class NotLiteral(ValueError):
    """The value of an expression is known only when it is run."""


@dataclass(frozen=True)
class Demand:
    """A demand compares the value of one expression with expected values."""

    node: ast.expr
    """Expression whose value is recorded; the other parts of the assertion do not reach the sandbox."""
    how: str
    """A key of `_answers.Check.how`."""
    sides: tuple[ast.expr, ...] = ()
    """Expected values."""
    template: str = "{}"
    """Text of what is recorded, in which {} stands for that of the node."""


def literal(node: ast.expr, names: Mapping[str, ast.expr]) -> object:
    """Evaluate an expression of literals and of names that are bound to such; raise NotLiteral for others."""
    try:
        value = _evaluated(node, names)
        if is_plain(value):
            return value
    except (TypeError, ValueError, ArithmeticError, RecursionError, MemoryError):
        pass  # noqa: S110  (the next line says what is wrong, for all of them)
    raise NotLiteral


def _evaluated(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:  # noqa: C901, PLR0911
    inner = partial(_evaluated, names=names)
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in names:
            return _evaluated(names[name], {})
        case ast.List(elts=parts):
            return list(map(inner, parts))
        case ast.Tuple(elts=parts):
            return tuple(map(inner, parts))
        case ast.Set(elts=parts):
            return set(map(inner, parts))
        case ast.Dict(keys=keys, values=values):
            pairs = zip(filter(None, keys), values, strict=True)  # ValueError: it unpacks another one
            return {inner(key): inner(value) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return operator.neg(inner(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](inner(left), inner(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _MAKERS:
            return _MAKERS[name](*map(inner, arguments))
    raise NotLiteral


def _short(values: range) -> range:
    if len(values) > _MOST_MEMBERS:
        raise NotLiteral
    return values


def _product(one: object, other: object) -> object:
    for many, often in ((one, other), (other, one)):
        if isinstance(many, str | list | tuple) and isinstance(often, int):
            _short(range(len(many) * max(often, 0)))
    return operator.mul(one, other)


def _power(one: object, other: object) -> object:
    if not isinstance(one, int | float) or not isinstance(other, int) or abs(one) > 1e6 or other > 100:
        raise NotLiteral
    return one**other


def names_in(nodes: Iterable[ast.AST]) -> list[ast.Name]:
    """Return the names that are read in some expressions."""
    return [one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)]


def demands(test: ast.expr) -> list[Demand]:
    """Return what an assertion's condition demands; nothing where only the process itself could compare.

    Each demand says the same as the whole condition, provided that its sides are literals.

    Example:
        >>> [one.how for one in demands(ast.parse("f(1) == 3", mode="eval").body)]
        ['==']
    """
    match test:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _of_compare(left, op, right)
        case ast.Compare(left=low, ops=[first, second], comparators=[middle, high]):
            if type(first) in _COMPARES and type(second) in _COMPARES:
                hows = _MIRRORED[_COMPARES[type(first)]], _COMPARES[type(second)]
                return [Demand(middle, "both", (ast.Constant(hows[0]), low, ast.Constant(hows[1]), high))]
        case ast.BoolOp(op=ast.Or(), values=values):
            return _of_choice(values)
        case ast.UnaryOp(op=ast.Not(), operand=operand) if _has_truth(operand):
            return [Demand(operand, "==", (ast.Constant(True),), "not ({})")]  # noqa: FBT003
        case ast.Call(func=func, args=[one, other]) if ast.unparse(func) in _ISCLOSE:
            return _of_isclose(one, other, test.keywords)
    if _has_truth(test):
        return [Demand(test, "==", (ast.Constant(True),), "not not ({})")]  # noqa: FBT003
    return []


def _has_truth(node: ast.expr) -> bool:
    """Return whether only the truth of a value is asserted, and no other value is compared with it there."""
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    names = [one.attr if isinstance(one, ast.Attribute) else ast.dump(one) for one in calls]
    compares = any(isinstance(one, ast.Compare) for one in ast.walk(node)) or any(
        map(_COMPARING.search, names)
    )
    is_value = isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Await)
    return is_value and not compares


def _of_compare(left: ast.expr, op: ast.cmpop, right: ast.expr) -> list[Demand]:
    match op:
        case ast.Eq():
            return _of_equality(left, right)
        case ast.Is() | ast.IsNot() if isinstance(right, ast.Constant):
            word = "is" if isinstance(op, ast.Is) else "is not"
            template = f"({{}}) {word} {right.value!r}"
            return [Demand(left, "==", (ast.Constant(True),), template)]  # noqa: FBT003
        case ast.In() | ast.NotIn():
            no = "" if isinstance(op, ast.In) else "not"
            return [Demand(left, f"{no} in".strip(), (right,)), Demand(right, f"has {no}".strip(), (left,))]
    if type(op) not in _COMPARES:
        return []
    how = _COMPARES[type(op)]
    match left:
        case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=one, op=ast.Sub(), right=other)]):
            if how in ("<", "<="):
                bounds = (right, ast.Constant(how))
                return [Demand(one, "within", (other, *bounds)), Demand(other, "within", (one, *bounds))]
    return [Demand(left, how, (right,)), Demand(right, _MIRRORED[how], (left,))]


def _of_equality(left: ast.expr, right: ast.expr) -> list[Demand]:
    found = []
    for node, side in ((left, right), (right, left)):
        match side:
            case ast.Call(func=ast.Name(id="approx") | ast.Attribute(attr="approx"), args=[one, *more]):
                if len(more) <= 2:
                    given = dict(zip(("rel", "abs"), more, strict=False))
                    given |= {word.arg or "**": word.value for word in side.keywords}
                    none = ast.Constant(None)
                    sides = (one, given.pop("rel", none), given.pop("abs", none))
                    found += [] if given else [Demand(node, "approx", sides)]
            case _:
                found.append(Demand(node, "==", (side,)))
    return found


def _of_choice(values: list[ast.expr]) -> list[Demand]:
    """Read ``f() == 1 or f() == 2``, whose left sides are the same."""
    lefts, rights = [], []
    for value in values:
        match value:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                lefts.append(left)
                rights.append(right)
    if len(lefts) == len(values) and len({ast.dump(left) for left in lefts}) == 1:
        return [Demand(lefts[0], "in", (ast.List(rights, ast.Load()),))]
    return []


def _of_isclose(one: ast.expr, other: ast.expr, keywords: list[ast.keyword]) -> list[Demand]:
    given = {"rel_tol": ast.Constant(1e-9), "abs_tol": ast.Constant(0.0)}
    if any(word.arg not in given for word in keywords):
        return []
    given |= {word.arg: word.value for word in keywords if word.arg}  # type: ignore[misc]
    tolerances = (given["rel_tol"], given["abs_tol"])
    return [Demand(one, "isclose", (other, *tolerances)), Demand(other, "isclose", (one, *tolerances))]


def of_method(call: ast.Call, name: str) -> list[Demand]:
    """Return what a method of `unittest.TestCase` demands; of two demands, either may be made of literals."""
    unpacks = any(isinstance(one, ast.Starred) for one in call.args)
    if unpacks or any(word.arg is None for word in call.keywords):
        return []
    match call.args:
        case [one, *_] if name in _TRUTHS and (_has_truth(one) or "None" in name):
            return [Demand(one, "==", (ast.Constant(True),), _TRUTHS[name])]  # noqa: FBT003
        case [one, ast.Name(id=kind), *_] if name == "assertIsInstance":
            return [Demand(one, "==", (ast.Constant(True),), f"isinstance({{}}, {kind})")]  # noqa: FBT003
        case [one, other, *more] if name == "assertAlmostEqual":
            given = dict(zip(("places", "msg", "delta"), more, strict=False))
            given |= {word.arg: word.value for word in call.keywords if word.arg}
            bounds = (given.get("places", ast.Constant(7)), given.get("delta", ast.Constant(None)))
            return [Demand(one, "almost", (other, *bounds)), Demand(other, "almost", (one, *bounds))]
        case [one, other, *_] if name in _HOWS:
            how = _HOWS[name]
            return [Demand(one, how, (other,)), Demand(other, _MIRRORED[how], (one,))]
        case [one, other, *_] if name in _OPS:
            return _of_compare(one, _OPS[name], other)
    return []
