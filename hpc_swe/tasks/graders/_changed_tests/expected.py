"""Find the values that a Python test expects, and ways to make the test expect something else.

A test that expects something else contradicts the test that it was made from: code that passes one of them
fails the other, unless its values do not really compare. So only the expected side of an assertion is used,
and only assertions that every passing run of the test reaches: those in the test's own body, in its `with`
blocks and in loops over literal tables. Literals are best. Where there are none, `typed` finds other values
of the same type.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from hpc_swe.tasks.graders._changed_tests.typed import Twist, Vocabulary, typed
from hpc_swe.tasks.graders._sealing.scopes import columns_of, own_nodes, rows_of

_EQUAL = {"assertEqual", "assertEquals", "assertIs", "assertAlmostEqual", "assertCountEqual"}
_EQUAL |= {f"assert{kind}Equal" for kind in ("List", "Tuple", "Set", "Dict", "Sequence", "MultiLine")}
_EQUAL |= {f"assert{kind}Equal" for kind in ("HTML", "XML", "JSON", "URL", "Queryset", "QuerySet")}
"""Methods that require their first two arguments to be equal."""
_AT = {"assertNumQueries": 0, "assertRedirects": 1}
"""Methods that expect a value -> position of that argument."""
_WITHIN = {"assertIn": 0, "assertInHTML": 0, "assertContains": 1, "assertRegex": 1, "assertTemplateUsed": 1}
_WITHIN |= {f"assert{what}{how}": 1 for what in ("Raises", "Warns") for how in ("Message", "Regex")}
"""Methods that look for a value within a longer text -> position of that argument."""
_NUMBERS = {"count", "status_code"}
"""Keywords of `assertContains` and similar methods that expect a number."""
_MAKERS = {"Decimal", "timedelta", "set", "frozenset", "list", "tuple", "dict", "OrderedDict", "dedent"}
"""Calls that return different values for different arguments."""
_TEXTS = {"format", "encode", "strip", "lstrip", "rstrip"}
"""Methods of a literal text that keep its words."""
_LEAVES = (ast.Return, ast.Yield, ast.YieldFrom, ast.Break, ast.Continue)
_SWALLOWS = re.compile("raises|suppress", re.IGNORECASE)


@dataclass(frozen=True)
class _Assertion:
    sides: tuple[ast.expr, ...]
    """Compared expressions; the expected one is made of literals."""
    is_within: bool = False
    """Whether the expected value is looked for within a longer text."""


class Reader:
    """A reader determines which values one test function expects."""

    def __init__(self, test: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.test = test
        self.bound: dict[str, list[ast.expr]] = {}
        """Name -> the expressions that it is bound to."""
        self.reached: list[ast.stmt] = []
        """Statements that each run reaches, unless one before them fails."""
        nodes = [node for statement in test.body for node in ast.walk(statement)]
        stores = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not _is_load(node))
        self._walk(test.body)
        self.bound = {name: nodes for name, nodes in self.bound.items() if stores[name] == 1}
        self._loads = Counter(node.id for node in nodes if isinstance(node, ast.Name) and _is_load(node))
        self._harmless: set[ast.Name] = set()
        for node in nodes:  # also assertions that a run may not reach
            self._note_harmless(node)

    def expected(self) -> Iterator[tuple[ast.Constant, bool]]:
        """Yield the expected literals, and whether each is looked for within a longer text."""
        harmless = Counter(node.id for node in self._harmless)
        names = {name for name in self.bound if harmless[name] == self._loads[name]}
        for node in chain.from_iterable(map(_checks, self.reached)):
            for one in _of_node(node):
                found = [list(self._constants(side, names)) for side in one.sides]
                if sum(map(bool, found)) == 1:
                    yield from ((constant, one.is_within) for constants in found for constant in constants)

    def typed(self, known: Vocabulary) -> Iterator[Twist | ast.Constant]:
        """Yield the ways to expect another value of the same type, apart from expected literals."""
        for node in chain.from_iterable(map(_checks, self.reached)):
            yield from typed(node, known)

    def _walk(self, body: list[ast.stmt]) -> None:
        """Collect what names are bound to, and the statements that each run reaches if none before fails."""
        if any(isinstance(node, _LEAVES) for node in own_nodes(body)):
            return
        for statement in body:
            self.reached.append(statement)
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.bound[name] = [value]
                case ast.With(items=items) | ast.AsyncWith(items=items):
                    if not any(_SWALLOWS.search(ast.unparse(item.context_expr)) for item in items):
                        self._walk(statement.body)
                case ast.For(target=target, iter=table):
                    once = {name: values[0] for name, values in self.bound.items() if len(values) == 1}
                    if found := rows_of(table, once):
                        self.bound |= columns_of(target, found)
                        self._walk(statement.body)

    def _note_harmless(self, node: ast.AST) -> None:
        """Note the uses of names whose value may change: where it is expected, shown or iterated over."""
        match node:
            case (ast.Call(func=ast.Attribute(attr="subTest")) as shown) | ast.For(iter=shown):
                self._harmless |= {name for name in ast.walk(shown) if isinstance(name, ast.Name)}
            case ast.expr() | ast.Assert():
                leaves = [leaf for one in _of_node(node) for side in one.sides for leaf in _leaves(side)]
                self._harmless |= {leaf for leaf in leaves if isinstance(leaf, ast.Name)}

    def _constants(self, side: ast.expr, names: set[str]) -> Iterator[ast.Constant]:
        for leaf in _leaves(side):
            if isinstance(leaf, ast.Constant):
                yield leaf
            elif leaf.id in names:
                for node in self.bound[leaf.id]:
                    yield from self._constants(node, names - {leaf.id})


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _checks(statement: ast.stmt) -> list[ast.expr | ast.Assert]:
    match statement:
        case ast.Expr(value=ast.Await(value=value)) | ast.Expr(value=value):
            return [value]
        case ast.Assert():
            return [statement]
        case ast.With(items=items) | ast.AsyncWith(items=items):
            return [item.context_expr for item in items]
    return []


def _of_node(node: ast.AST) -> Iterator[_Assertion]:
    match node:
        case ast.Assert(test=ast.BoolOp(op=ast.And(), values=values)):
            for value in values:
                yield from _of_compare(value)
        case ast.Assert(test=test):
            yield from _of_compare(test)
        case ast.Call(func=ast.Attribute(attr=name), args=args, keywords=keywords):
            yield from _of_call(name, args, keywords)


def _of_compare(test: ast.expr) -> Iterator[_Assertion]:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            yield _Assertion((left, right))
        case ast.Compare(left=ast.Constant(value=str()) as left, ops=[ast.In()]):
            yield _Assertion((left,), is_within=True)


def _of_call(name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Iterator[_Assertion]:
    if any(isinstance(one, ast.Starred) for one in args):
        return
    # Otherwise it accepts a range of values, so that one value could pass for two.
    is_exact = name != "assertAlmostEqual" or (len(args) == 2 and not keywords)
    if name in _EQUAL and len(args) > 1 and is_exact:
        yield _Assertion((args[0], args[1]))
    elif name in _AT:
        yield _Assertion(tuple(args[_AT[name] : _AT[name] + 1]))
    elif name in _WITHIN:
        yield _Assertion(tuple(args[_WITHIN[name] : _WITHIN[name] + 1]), is_within=True)
        yield from (_Assertion((one.value,)) for one in keywords if one.arg in _NUMBERS)
    elif name == "raises":
        yield from (_Assertion((one.value,), is_within=True) for one in keywords if one.arg == "match")
    elif _is_helper(name) and len(args) >= (1 if name.startswith("assert_") else 2):
        yield _Assertion((args[-1],), is_within=True)  # perhaps it looks within a longer text


def _is_helper(name: str) -> bool:
    """Return whether a function is an assertion of the tests' own, or of a mock, but none of unittest's."""
    import unittest

    return bool(re.match("assert(?!.*[Nn]ot)", name)) and not hasattr(unittest.TestCase, name)


def _leaves(node: ast.expr) -> Iterator[ast.Constant | ast.Name]:  # noqa: C901  (one case for each kind of node)
    """Yield the constants and names in a value that make it another value if they change."""
    match node:
        case ast.Constant() | ast.Name():
            yield node
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            for part in parts:
                yield from _leaves(part)
        case ast.Dict(keys=keys, values=values):
            for key_or_value in filter(None, (*keys, *values)):
                yield from _leaves(key_or_value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield from _leaves(operand)
        case ast.BinOp(left=left, op=ast.Mod()):
            yield from (leaf for leaf in _leaves(left) if _is_text(leaf))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (leaf for part in (left, right) for leaf in _leaves(part) if _is_text(leaf))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[part, *_]) if name in _MAKERS:
            yield from _leaves(part)
        case ast.Call(func=ast.Attribute(value=ast.Constant() | ast.Name() as value, attr=name)):
            yield from (leaf for leaf in (value,) if name in _TEXTS)


def _is_text(leaf: ast.Constant | ast.Name) -> bool:
    return isinstance(leaf, ast.Name) or isinstance(leaf.value, str)
