"""Find the ways to break the functions of a module, each a change of one piece of its text.

The syntax tree says where a piece is, and the change replaces the text there, so that comments and layout
stay as their author wrote them.
"""

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from hpc_swe.base.syntax import parse

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Change = tuple[str, int, int, str]
"""Kind of the mutation, offsets of the first byte that is replaced and the first one after, new text."""

OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
    ast.Pow: ("**", "*"),
}
BOUNDARIES: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}
OPPOSITES: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
TWINS = dict(
    chain.from_iterable(
        ((a, b), (b, a))
        for a, b in (
            ("min", "max"),
            ("any", "all"),
            ("startswith", "endswith"),
            ("lstrip", "rstrip"),
            ("find", "rfind"),
            ("index", "rindex"),
            ("split", "rsplit"),
            ("partition", "rpartition"),
            ("append", "extend"),
            ("floor", "ceil"),
            ("lower", "upper"),
            ("keys", "values"),
            ("match", "search"),
        )
    )
)
"""Functions and methods that are easily taken for each other."""
COPIES = {"list", "dict", "set", "tuple", "copy", "deepcopy"}
PREPARATIONS = {"sorted", "reversed", "int", "str", "abs", "strip", "lower", "upper", "rstrip", "lstrip"}
EXCEPTIONS = {"KeyError": "IndexError", "ValueError": "TypeError", "IndexError": "KeyError"}
EXCEPTIONS |= {"TypeError": "ValueError", "AttributeError": "KeyError", "OSError": "ValueError"}


@dataclass(frozen=True)
class SourceFunction:
    """A function at the top of a module or of a class, with all that is nested in it."""

    name: str
    """Qualified name, such as ``Parser.feed``."""
    start: int
    end: int
    """Offsets in bytes of its text, decorators included."""
    digest: str
    """Digest of its syntax tree: copies of one function share it."""
    first_line: int
    last_line: int
    """Lines of its body."""


@dataclass(frozen=True)
class Mutant:
    """A mutant is a module with one change in one function."""

    function: SourceFunction
    kind: str
    lines: tuple[int, int]
    """First and last line of the changed statement, of which a test must run one."""
    text: str
    """The whole module."""
    digest: str
    """Digest of the syntax tree of the changed function."""


class Module:
    """A module has a text, and functions that can be changed in it."""

    def __init__(self, text: str) -> None:
        """Parse the text; raise SyntaxError if it is not Python."""
        self.data = text.encode()
        self._starts = [0, *(end.end() for end in re.finditer(rb"\n|\r(?!\n)", self.data))]
        self._nodes = dict(self._find(parse(self.data).body, ""))
        self.functions = [*self._nodes]

    def _find(self, body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[SourceFunction, FunctionNode]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from self._find(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, FunctionNode):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                start, end = self._starts[first - 1], self.end(node)
                lines = node.body[0].lineno, node.end_lineno or node.lineno
                yield SourceFunction(f"{prefix}{node.name}", start, end, _digest(node), *lines), node

    def start(self, node: ast.expr | ast.stmt | ast.arg | ast.excepthandler) -> int:
        """Return the offset of a node's first byte."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.arg | ast.excepthandler) -> int:
        """Return the offset of the first byte after a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        return self.data[self.start(node) : self.end(node)].decode()

    def mutants(self, function: SourceFunction) -> Iterator[Mutant]:
        """Yield every mutant of a function that is Python and differs from it, each only once."""
        seen = {function.digest}
        for statement, (kind, start, end, new) in _changes(self, self._nodes[function]):
            data = self.data[:start] + new.encode() + self.data[end:]
            digest = self._digest_of(data[function.start : function.end + len(data) - len(self.data)])
            if digest and digest not in seen:
                seen.add(digest)
                first, last = statement.lineno, statement.end_lineno or statement.lineno
                yield Mutant(function, kind, (first, last), data.decode(), digest)

    def _digest_of(self, data: bytes) -> str:
        """Return the digest of a function's text; empty if Python cannot read it any more."""
        indented = data[:1] in (b" ", b"\t")
        try:
            body = parse(b"if 1:\n" + data if indented else data).body
            return _digest(body[0].body[0] if isinstance(body[0], ast.If) else body[0])
        except (SyntaxError, ValueError):
            return ""


def chosen(mutants: Sequence[Mutant], most: int, seed: int) -> list[Mutant]:
    """Choose some mutants of a function, of as many kinds as possible; the seed decides which."""
    kinds = defaultdict[str, list[Mutant]](list)
    for mutant in sorted(mutants, key=lambda mutant: _draw(seed, mutant.digest)):
        kinds[mutant.kind].append(mutant)
    in_turns = zip_longest(*sorted(kinds.values(), key=lambda found: _draw(seed, found[0].digest)))
    return [mutant for turn in in_turns for mutant in turn if mutant is not None][:most]


def _draw(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:24]


def _changes(module: Module, function: FunctionNode) -> Iterator[tuple[ast.stmt, Change]]:
    yield from ((function.body[0], change) for change in _of_defaults(module, function))
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names = sorted(stored | _arguments(function))
    for statement in _statements(function.body):
        yield from ((statement, change) for change in _of_statement(module, statement))
        for node in _expressions(statement):
            found = chain(_of_operator(module, node), _of_value(module, node), _of_call(module, node))
            yield from ((statement, change) for change in chain(found, _of_name(module, node, names)))


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        yield statement
        for _, value in ast.iter_fields(statement):
            for each in value if isinstance(value, list) else ():
                if isinstance(each, ast.stmt):
                    yield from _statements([each])
                elif isinstance(each, ast.ExceptHandler | ast.match_case):
                    yield from _statements(each.body)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, without those of statements in it and those in f-strings.

    Before Python 3.12 the positions of expressions in f-strings are wrong.
    """
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.expr):
            yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST) and not isinstance(
                    each, ast.stmt | ast.excepthandler | ast.match_case
                ):
                    waiting.append(each)


def _arguments(function: FunctionNode) -> set[str]:
    found = function.args
    return {one.arg for one in (*found.posonlyargs, *found.args, *found.kwonlyargs)} - {"self", "cls"}


def _of_defaults(module: Module, function: FunctionNode) -> Iterator[Change]:
    """Change a default value, or replace a default of None by the empty value that the body would make."""
    args = [*function.args.posonlyargs, *function.args.args]
    pairs = list(zip(args[len(args) - len(function.args.defaults) :], function.args.defaults, strict=True))
    pairs += [(a, d) for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d]
    fresh = {}
    for node in ast.walk(function):
        match node:
            case ast.If(
                body=[ast.Assign(targets=[ast.Name(id=name)], value=ast.List() | ast.Dict() as value)]
            ):
                fresh[name] = module.text(value)
    for argument, default in pairs:
        if isinstance(default, ast.Constant) and default.value is None and argument.arg in fresh:
            yield "stale default", module.start(default), module.end(default), fresh[argument.arg]
        for _, start, end, new in _of_value(module, default):
            yield "wrong default", start, end, new


def _of_statement(module: Module, statement: ast.stmt) -> Iterator[Change]:  # noqa: C901  (a table)
    start, end = module.start(statement), module.end(statement)
    match statement:
        case ast.Return(value=ast.expr() as value):
            if not isinstance(value, ast.Constant):
                yield "dropped return", start, end, module.text(value)
        case ast.Raise():
            yield "removed check", start, end, "pass"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield "removed statement", start, end, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Delete():
            yield "removed statement", start, end, "pass"
        case ast.Continue():
            yield "loop control", start, end, "break"
        case ast.Break():
            yield "loop control", start, end, "continue"
        case ast.If(test=test, orelse=orelse):
            yield "negated condition", module.start(test), module.end(test), _negated(module, test)
            if not orelse and module.data[start : start + 2] == b"if":
                yield "removed branch", start, end, "pass"
        case ast.Try(handlers=handlers):
            for handler in handlers:
                yield from _of_handler(module, handler)
    if isinstance(statement, ast.AugAssign):
        between = module.end(statement.target), module.start(statement.value)
        yield from _replaced(module, "operator", between, OPERATORS.get(type(statement.op)), "=")


def _of_handler(module: Module, handler: ast.ExceptHandler) -> Iterator[Change]:
    first, last = module.start(handler.body[0]), module.end(handler.body[-1])
    if not isinstance(handler.body[0], ast.Pass):
        yield "exception swallowed", first, last, "pass"
    if isinstance(handler.type, ast.Name) and handler.type.id in EXCEPTIONS:
        yield (
            "wrong exception",
            module.start(handler.type),
            module.end(handler.type),
            EXCEPTIONS[handler.type.id],
        )


def _negated(module: Module, test: ast.expr) -> str:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return f"({module.text(test.operand)})"
    return f"not ({module.text(test)})"


def _of_operator(module: Module, node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if not any(map(_is_text, (left, right))):
            yield from _replaced(module, "operator", _between(module, left, right), OPERATORS.get(type(op)))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for one, sign, other in zip([left, *comparators], ops, comparators, strict=False):
                between = _between(module, one, other)
                yield from _replaced(module, "boundary", between, BOUNDARIES.get(type(sign)))
                yield from _replaced(module, "opposite comparison", between, OPPOSITES.get(type(sign)))
        case ast.BoolOp(op=kind, values=[left, right, *_]):
            pair = ("and", "or") if isinstance(kind, ast.And) else ("or", "and")
            yield from _replaced(module, "and or", _between(module, left, right), pair)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "dropped sign", module.start(node), module.end(node), f"({module.text(operand)})"
        case ast.IfExp(test=test):
            yield "negated condition", module.start(test), module.end(test), _negated(module, test)
        case ast.Await(value=value):
            yield "missing await", module.start(node), module.end(node), module.text(value)


def _between(module: Module, left: ast.expr, right: ast.expr) -> tuple[int, int]:
    return module.end(left), module.start(right)


def _replaced(
    module: Module, kind: str, between: tuple[int, int], pair: tuple[str, str] | None, after: str = ""
) -> Iterator[Change]:
    """Replace the operator between two operands; brackets and blanks may surround it."""
    if pair is None:
        return
    text = module.data[between[0] : between[1]].decode()
    if text.strip(" \n\t()\\") == pair[0] + after:
        at = between[0] + len(text[: text.index(pair[0])].encode())
        yield kind, at, at + len(pair[0]), pair[1]


def _is_text(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.JoinedStr)
        or isinstance(node, ast.Constant)
        and isinstance(node.value, str | bytes)
    )


def _of_value(module: Module, node: ast.expr) -> Iterator[Change]:  # noqa: C901  (a table)
    """Change a constant, or make an index, a bound of a slice or an argument of range wrong by one."""
    match node:
        case ast.Constant(value=bool(value)):
            yield "wrong constant", module.start(node), module.end(node), str(not value)
        case ast.Constant(value=int(value)):
            yield "wrong constant", module.start(node), module.end(node), str(value + 1)
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
            for bound in (lower, upper):
                if bound is not None:
                    yield "off by one", module.start(bound), module.end(bound), f"{module.text(bound)} + 1"
        case ast.Subscript(slice=ast.Name() | ast.BinOp() as index):
            yield "off by one", module.start(index), module.end(index), f"{module.text(index)} - 1"
        case ast.Call(func=ast.Name(id="range"), args=[*_, last]):
            yield "off by one", module.start(last), module.end(last), f"{module.text(last)} - 1"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
            yield "off by one", module.end(left), module.end(node), ""


def _of_call(module: Module, node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=keywords):
            start, end = module.start(node), module.end(node)
            if len(args) > 1 and not any(isinstance(each, ast.Starred) for each in args[:2]):
                first, second = args[:2]
                middle = module.data[module.end(first) : module.start(second)].decode()
                new = module.text(second) + middle + module.text(first)
                yield "swapped arguments", module.start(first), module.end(second), new
            kind = "missing copy" if name in COPIES else "missing call"
            if name in COPIES | PREPARATIONS and not keywords:
                match node.func, args:
                    case ast.Attribute(value=value), []:
                        yield kind, start, end, module.text(value)
                    case _, [ast.expr() as only] if not isinstance(only, ast.Starred | ast.GeneratorExp):
                        yield kind, start, end, f"({module.text(only)})"
            if name in TWINS:
                last = module.end(node.func)
                yield "wrong function", last - len(name), last, TWINS[name]


def _of_name(module: Module, node: ast.expr, names: Sequence[str]) -> Iterator[Change]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
        other = names[(names.index(node.id) + 1) % len(names)]
        yield "wrong variable", module.start(node), module.end(node), other
