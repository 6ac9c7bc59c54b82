"""Find ways to make a test expect another value of the same type where it expects no literal.

Such a change looks like any other test: another member of a list, another exception that the tests know,
another attribute of the same object, the other truth value. Not every change makes the reference fail, so
each is tried with it.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonprefix

_MOST = 6
"""Replacements of one piece."""
_ERRORS = ("ValueError", "TypeError", "KeyError", "AttributeError", "RuntimeError", "LookupError")
_ERROR = re.compile(
    r"(?:Error|Exception|Warning|DoesNotExist|MultipleObjectsReturned|NotFound|Denied|Invalid)\w*$"
)
_RAISES = re.compile(r"assert(Raises|Warns)\w*|raises|warns")
_SWAPS = {
    "assertTrue": "assertFalse",
    "assertIsNone": "assertIsNotNone",
    "assert_called": "assert_not_called",
}
_SWAPS |= {"assert_called_once": "assert_not_called"}
_SWAPS |= {other: name for name, other in _SWAPS.items()}
_COUNTED = re.compile(r"assert(Greater|Less|AlmostEqual|NotAlmost)\w*")
_OPERATORS: dict[type, str] = {ast.NotEq: " == ", ast.IsNot: " is ", ast.NotIn: " in ", ast.Is: " is not "}
_EMPTY: dict[type, str] = {ast.List: "[1]", ast.Dict: "{1: 1}", ast.Tuple: "(1,)"}


@dataclass(frozen=True)
class Twist:
    """A twist replaces a piece of one line by one of several texts that contradict it."""

    line: int
    start: int
    end: int
    """Offsets `start` and `end` count bytes of the line."""
    news: tuple[str, ...]
    """Replacements, in which {} stands for the old piece."""


class Vocabulary:
    """A vocabulary knows the names that a test module uses."""

    def __init__(self, module: ast.AST) -> None:
        nodes = list(ast.walk(module))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        plain = [
            node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner
        ]
        uncalled = [_dotted(node) for node in plain if id(node) not in called]
        self._values = sorted({text.replace("cls.", "self.") for text in uncalled if text} - {*dir(builtins)})
        names = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        names |= {text for text in uncalled if text}
        self._errors = sorted(name for name in names if _ERROR.search(name)) + [*_ERRORS]
        self._classes = sorted(name for name in names if re.match(r"[A-Z]\w*[a-z]\w*$", name))

    def errors(self, old: str) -> tuple[str, ...]:
        """Return other exceptions, those that the module knows first."""
        return tuple(name for name in dict.fromkeys(self._errors) if name != old)[:_MOST]

    def classes(self, old: str) -> tuple[str, ...]:
        """Return other classes that the module knows."""
        return _nearest(old, [name for name in self._classes if name != old and not _ERROR.search(name)])

    def values(self, old: str) -> tuple[str, ...]:
        """Return other values of the module that are named like this one."""
        head, _, tail = old.rpartition(".")
        alike = []
        for text in self._values:
            other, _, end = text.rpartition(".")
            is_like = (other == head or (end == tail and other)) if head else "." not in text
            if is_like and text != old and text[:1].isupper() == old[:1].isupper():
                alike.append(text)
        return _nearest(old, alike)


def _nearest(old: str, texts: list[str]) -> tuple[str, ...]:
    return tuple(sorted(texts, key=lambda text: -len(commonprefix([text, old])))[:_MOST])


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def typed(check: ast.expr | ast.Assert, known: Vocabulary) -> Iterator[Twist | ast.Constant]:
    """Yield changes of what a call or an assertion expects, and constants that are parts of that."""
    match check:
        case ast.Assert(test=test):
            yield from _of_condition(test, known)
        case ast.Call(func=ast.Attribute(attr=name) as func, args=args, keywords=keywords):
            yield from _of_call(func, name, args, keywords, known)
        case ast.Call(func=ast.Name(id=name), args=[error, *_]) if _RAISES.fullmatch(name):
            yield from _replaced(error, known.errors(ast.unparse(error)))


def _of_condition(  # noqa: C901  (one case for each form of a condition)
    test: ast.expr, known: Vocabulary
) -> Iterator[Twist | ast.Constant]:
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            for value in values:
                yield from _of_condition(value, known)
        case ast.Compare(ops=[ast.Eq()], comparators=[right]):
            yield from _members(right, known)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            if left.end_lineno == right.lineno and left.end_col_offset is not None:
                yield Twist(right.lineno, left.end_col_offset, right.col_offset, (_OPERATORS[type(op)],))
        case ast.Compare(left=left, ops=[ast.In()]):
            yield from _members(left, known)
        case ast.UnaryOp(op=ast.Not(), operand=operand) if test.lineno == operand.lineno:
            yield Twist(test.lineno, test.col_offset, operand.col_offset, ("",))
        case ast.Call() | ast.Name() | ast.Attribute() if not is_measured(test):
            yield Twist(test.lineno, test.col_offset, test.col_offset, ("not ",))


def _of_call(  # noqa: C901  (one case for each form of a call)
    func: ast.Attribute, name: str, args: list[ast.expr], keywords: list[ast.keyword], known: Vocabulary
) -> Iterator[Twist | ast.Constant]:
    if any(isinstance(one, ast.Starred) for one in args) or _COUNTED.match(name):
        return
    if _RAISES.fullmatch(name):
        if args:
            yield from _replaced(args[0], known.errors(ast.unparse(args[0])))
            yield from (part for one in args[1:2] for part in _members(one, known))
    elif name in _SWAPS or re.match("assert.*Not", name):
        if not any(map(is_measured, args)):
            line, end = func.end_lineno or 0, func.end_col_offset or 0
            yield Twist(line, end - len(name), end, (_SWAPS.get(name) or name.replace("Not", "", 1),))
    elif name == "assertIsInstance" and len(args) > 1:
        yield from _replaced(args[1], known.classes(ast.unparse(args[1])))
    elif re.match("assert(Is)?In|assertContains|assertRegex", name) and args:
        yield from _members(args[1] if name == "assertContains" and len(args) > 1 else args[0], known)
    elif re.match("_*(assert|check)", name):
        expected = args[1:2] if re.match(r"assert\w*Equals?$|assertIs$", name) else args[-1:]
        for value in (
            *expected,
            *(one.value for one in keywords if one.arg not in ("msg", "transform", "ordered")),
        ):
            yield from _members(value, known)


def is_measured(value: ast.expr) -> bool:
    """Return whether an expression compares sizes, for example times, which two runs may not agree on."""
    return any(isinstance(node, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for node in ast.walk(value))


def _members(value: ast.expr, known: Vocabulary) -> Iterator[Twist | ast.Constant]:  # noqa: C901
    match value:
        case ast.Constant():
            yield value
        case ast.Name() | ast.Attribute():
            yield from _replaced(value, known.values(ast.unparse(value)))
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts) if parts:
            if len(parts) > 1 and parts[-2].end_lineno == parts[-1].end_lineno:
                line, start, end = (
                    parts[-1].end_lineno or 0,
                    parts[-2].end_col_offset,
                    parts[-1].end_col_offset,
                )
                yield Twist(line, start or 0, end or 0, ("",))
            for part in parts:
                yield from _members(part, known)
        case ast.List() | ast.Tuple() | ast.Dict(keys=[]):
            yield from _replaced(value, (_EMPTY[type(value)],))
        case ast.Dict(values=values):
            for part in values:
                yield from _members(part, known)
        case ast.Call(args=args, keywords=keywords):
            for part in (*args, *(one.value for one in keywords)):
                yield from _members(part, known)
        case ast.BinOp(left=left, right=right):
            for part in (left, right):
                yield from _members(part, known)
        case ast.Subscript(slice=part) | ast.UnaryOp(operand=part) | ast.Starred(value=part):
            yield from _members(part, known)


def _replaced(value: ast.expr, news: tuple[str, ...]) -> Iterator[Twist]:
    if news and value.lineno == value.end_lineno and value.end_col_offset is not None:
        yield Twist(value.lineno, value.col_offset, value.end_col_offset, news)
