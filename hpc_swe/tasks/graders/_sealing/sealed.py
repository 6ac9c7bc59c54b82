"""Take the expected values out of tests, so that they need not be compared in an untrusted process.

Tests run in the same process as the code they judge, so any report of a pass made there can be patched or
forged. Knowledge cannot be forged. Before a test goes into the sandbox, the literals of its assertions are
taken out. The test only records the value of the other expression, and the grader compares it outside. To
earn the reward, a patch must compute the right values for inputs it has never seen, which is the task. An
object that equals everything is never compared.

The text is cut and joined, and never written anew from a syntax tree: another version of Python than the
image's could write what the image cannot read.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from hpc_swe.base.syntax import PythonText, parse
from hpc_swe.tasks.graders._sealing.answers import Check
from hpc_swe.tasks.graders._sealing.demands import (
    UNITTEST,
    Demand,
    NotLiteral,
    demands,
    literal,
    names_in,
    of_method,
)
from hpc_swe.tasks.graders._sealing.scopes import Cells, Scope, indexed, scope_of_module, scope_of_test
from hpc_swe.tasks.graders._sealing.steps import steps
from hpc_swe.tasks.visible_tests import TestFunction, functions

_RECORDS = "__import__('__main__').RECORDER.answer({}, {})"
_OWNERS = {"isclose": "math", "approx": "pytest"}
"""Functions that are sealed by name -> module; those of other modules may have other tolerances."""


@dataclass(frozen=True)
class Sealed:
    """A sealed test module keeps its answers apart from its text."""

    text: str
    checks: Mapping[int, Check] = field(default_factory=dict)
    """Number of an answer -> what it must be. A number belongs to one place of the module."""
    required: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Test (``test_a`` or ``TestB::test_c``) -> numbers that each passing run of it records."""
    shared: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Test -> numbers that its runs with all parameters record together."""
    places: Mapping[int, str] = field(default_factory=dict)
    """Number of an answer -> its line and column, which name the place whatever else is sealed."""
    assertions: int = 0
    """Assertions of the module."""
    sealed: int = 0
    """How many of these have their expected values outside."""


@lru_cache(maxsize=128)  # the tasks of two batches are graded side by side
def seal(text: str, opened: frozenset[str] = frozenset(), with_tables: bool = True, first: int = 0) -> Sealed:
    """Take the answers out of a test module, numbered from `first`; a text that is not Python stays as it is.

    Assertions at the places of `opened` stay as they are. Without `with_tables` so do those that compare with
    a parameter, since the ids of tests are made of the parameters.
    """
    try:
        source = PythonText(text)
    except (SyntaxError, ValueError):
        return Sealed(text)
    sealer = _Sealer(source, opened, with_tables)
    module = sealer.sealed(first)
    try:
        parse(module.text)
    except (SyntaxError, ValueError):  # an unknown form of assertion must not lose the whole module
        return Sealed(text, assertions=sealer.total)
    return module


@dataclass(frozen=True)
class _Choice:
    """A choice says how one condition of an assertion is sealed."""

    demand: Demand
    values: tuple[object, ...]
    """Expected values; those after the first where a cell holds the first."""
    key: ast.expr | None = None
    """Expression that tells, when it is run, which cell is expected."""
    cells: Cells | None = None

    def needed(self, numbers: range) -> Sequence[int]:
        """Return the numbers, of those of all cells, that each passing run records if it comes by."""
        if self.cells is None or self.cells.is_complete:
            return numbers
        return [] if self.cells.only is None else [numbers[self.cells.only]]

    @property
    def is_parameter(self) -> bool:
        return self.cells is not None and self.cells.is_parameter

    def checks(self) -> list[Check]:
        """Return the check of each cell, or the only one."""
        if self.cells is None:
            return [Check(self.demand.how, self.values)]
        return [Check(self.demand.how, (literal(cell, {}), *self.values)) for cell in self.cells.cells]

    def changes(self, scope: Scope) -> dict[int, tuple[ast.AST, str]]:
        """Return what takes the place of expected values that stand elsewhere: identity -> node and text."""
        found: dict[int, tuple[ast.AST, str]] = {}
        if self.cells is not None:
            found = {id(cell): (cell, str(n)) for n, cell in enumerate(self.cells.cells)}
        for name in names_in(self.demand.sides[bool(found) :]):
            if isinstance(bound := scope.get(name.id), ast.expr):
                found[id(bound)] = (bound, "None")
        return found


@dataclass(frozen=True)
class _Assertion:
    """An assertion of a test function, with the names that are known there."""

    test: str
    definition: int
    """Identity of the test function."""
    statement: ast.Assert | ast.Expr
    is_required: bool
    scope: Scope
    me: str
    """Name of the first parameter, whose methods may be unittest's assertions."""

    @property
    def place(self) -> str:
        return f"{self.statement.lineno}:{self.statement.col_offset}"

    def conditions(self) -> list[tuple[ast.expr, list[Demand]]]:
        """Return what must hold, one after another, each with what it demands."""
        match self.statement:
            case ast.Assert(test=ast.BoolOp(op=ast.And(), values=values)):
                return [(value, demands(value)) for value in values]
            case ast.Assert(test=test):
                return [(test, demands(test))]
            case ast.Expr(value=ast.Call(func=ast.Attribute(ast.Name(id=owner), name)) as call):
                return [(call, of_method(call, name))] if owner == self.me else []
        return []

    def choose(self, demand: Demand, banned: frozenset[int]) -> _Choice | None:
        """Return how a demand is met outside the sandbox, without names that are bound to `banned`."""
        known = {name: bound for name, bound in self.scope.items() if id(bound) not in banned}
        values = {name: bound for name, bound in known.items() if isinstance(bound, ast.expr)}
        if _is_literal(demand.node):
            return None
        try:
            if cells := _cells_of(demand.sides[0], known):
                rest = tuple(literal(side, values) for side in demand.sides[1:])
                for cell in cells.cells:
                    literal(cell, {})
                return _Choice(demand, rest, demand.sides[0], cells)
            return _Choice(demand, tuple(literal(side, values) for side in demand.sides))
        except NotLiteral:
            return None


_Chosen = tuple[_Assertion, list[tuple[ast.expr, _Choice | None]]]
"""An assertion with its conditions, each with its choice."""


def _is_literal(node: ast.expr) -> bool:
    try:
        literal(node, {})
    except NotLiteral:
        return False
    return True


def _cells_of(side: ast.expr, known: Scope) -> Cells | None:
    match side:
        case ast.Name(id=name) if isinstance(bound := known.get(name), Cells):
            return bound
        case ast.Subscript(value=ast.Name(id=name), slice=index) if not isinstance(index, ast.Slice):
            bound = known.get(name)
            if isinstance(bound, ast.expr) and (cells := indexed(bound)):
                return replace(cells, only=_position(bound, index))
    return None


def _position(container: ast.expr, index: ast.expr) -> int | None:
    """Return which cell of a container an index stands for, if it is a literal."""
    try:
        key: Any = literal(index, {})
        match container:
            case ast.Dict(keys=keys):
                return {literal(one, {}): n for n, one in enumerate(filter(None, keys))}[key]
            case ast.List(elts=cells) | ast.Tuple(elts=cells):
                return list(range(len(cells)))[int(key)]
    except (ValueError, LookupError, TypeError):  # no literal, or one at which the test itself fails
        return None
    return None


class _Sealer:
    """A sealer decides what of one module is sealed, and writes the module."""

    def __init__(self, source: PythonText, opened: frozenset[str], with_tables: bool) -> None:
        self.source, self.opened, self.with_tables = source, opened, with_tables
        module = source.tree
        self.outer = scope_of_module(module)
        nodes = list(ast.walk(module))
        self.has_own = "addTypeEqualityFunc" in source.text or any(
            isinstance(node, TestFunction) and node.name in UNITTEST for node in nodes
        )
        self.foreign = {name for name, module in _OWNERS.items() if not _imports(nodes, module, name)}
        self.assertions: list[_Assertion] = []
        self.loads: dict[int, set[int]] = {}
        """Identity of what a name is bound to -> identities of the nodes that read the name."""
        self.harmless: set[int] = set()
        """Nodes that only show a value."""
        inside: set[int] = set()
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        failing = {one.name for one in classes if _is_expected_to_fail(one.decorator_list)}
        if _is_expected_to_fail(node for node in nodes if isinstance(node, ast.Assign)):
            failing |= {"", *(one.name for one in classes)}  # `pytestmark`
        for owner, test in functions(module.body):
            scope = scope_of_test(test, self.outer)
            within = [node for statement in test.body for node in ast.walk(statement)]
            inside |= set(map(id, within))
            self._note_loads(within, scope)
            if not _is_expected_to_fail(test.decorator_list) and not failing.intersection(owner.split(".")):
                self._note_assertions(owner, test, scope)
        self._note_loads([node for node in nodes if id(node) not in inside], self.outer)
        self.total = sum(map(_is_assertion, nodes))

    def _note_assertions(self, owner: str, test: TestFunction, scope: Scope) -> None:
        name = "::".join([*filter(None, owner.split(".")), test.name])
        me = test.args.args[0].arg if owner and test.args.args and not self.has_own else ""
        for statement, is_required in steps(test, scope):
            one = _Assertion(name, id(test), statement, is_required, scope, me)
            if one.place not in self.opened:
                self.assertions.append(one)

    def _note_loads(self, nodes: Iterable[ast.AST], scope: Scope) -> None:
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in scope:
                self.loads.setdefault(id(scope[node.id]), set()).add(id(node))
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "subTest"
            ):
                self.harmless |= {id(name) for name in names_in([node])}

    def sealed(self, first: int) -> Sealed:
        """Choose what is sealed until no name is read elsewhere whose value would be missed."""
        banned: frozenset[int] = frozenset()
        while True:
            chosen = [(one, self._chosen(one, banned)) for one in self.assertions]
            chosen = [(one, choices) for one, choices in chosen if any(choice for _, choice in choices)]
            missed = self._missed(chosen)
            if not missed:
                return self._write(chosen, first)
            banned |= missed

    def _chosen(self, one: _Assertion, banned: frozenset[int]) -> list[tuple[ast.expr, _Choice | None]]:
        found = []
        for condition, offered in one.conditions():
            mine = (demand for demand in offered if demand.how not in self._foreign(condition))
            choices = (one.choose(demand, banned) for demand in mine)
            allowed = (
                choice for choice in choices if choice and (self.with_tables or not choice.is_parameter)
            )
            found.append((condition, next(allowed, None)))
        return found

    def _foreign(self, condition: ast.expr) -> set[str]:
        """Return the names of `_OWNERS` that a condition calls and that stand for other functions here."""
        calls = (node.func for node in ast.walk(condition) if isinstance(node, ast.Call))
        return self.foreign & {func.id for func in calls if isinstance(func, ast.Name)}

    def _missed(self, chosen: Sequence[_Chosen]) -> frozenset[int]:
        """Return the identities of what names are bound to that something else reads as well."""
        gone, whole, parts = set(self.harmless), set[int](), dict[int, Cells]()
        for one, choices in chosen:
            kept = [condition for condition, choice in choices if choice is None]
            kept += [choice.demand.node for _, choice in choices if choice]
            for choice in (choice for _, choice in choices if choice):
                if isinstance(choice.key, ast.Subscript):
                    kept.append(choice.key.slice)
                sides = choice.demand.sides[bool(choice.cells) :]
                whole |= {id(one.scope[name.id]) for name in names_in(sides) if name.id in one.scope}
                if choice.cells and choice.key is not None:
                    name = choice.key.value if isinstance(choice.key, ast.Subscript) else choice.key
                    assert isinstance(name, ast.Name)
                    parts[id(one.scope[name.id])] = choice.cells
            stay = {id(name) for name in names_in(kept)}
            gone |= {id(name) for name in names_in([one.statement])} - stay
        missed = {bound for bound in {*whole, *parts} if self.loads.get(bound, set()) - gone}
        missed |= whole & parts.keys()
        for bound, cells in parts.items():
            if not cells.is_indexed and self._is_shared(cells, chosen):
                missed.add(bound)
        return frozenset(missed)

    def _is_shared(self, cells: Cells, chosen: Sequence[_Chosen]) -> bool:
        """Return whether a table has a name that is read more than once."""
        inside = set(map(id, cells.cells))
        bounds = {id(bound): bound for one, _ in chosen for bound in one.scope.values()}
        tables = [bound for bound in bounds.values() if isinstance(bound, ast.expr)]
        holders = [one for one in tables if any(id(node) in inside for node in ast.walk(one))]
        return any(len(self.loads.get(id(one), ())) > 1 for one in holders)

    def _write(self, chosen: Sequence[_Chosen], first: int) -> Sealed:
        checks: dict[int, Check] = {}
        places: dict[int, str] = {}
        required: dict[str, set[int]] = {one.test: set() for one, _ in chosen}
        shared: dict[str, set[int]] = {one.test: set() for one, _ in chosen}
        changes: dict[int, tuple[ast.AST, str]] = {}
        replaced = self._replaced()
        for one, choices in chosen:
            lines = []
            for condition, choice in choices:
                if choice is None:
                    lines.append(f"assert ({self.source.segment(condition)})")
                    continue
                begin, given = first + len(checks), choice.checks()
                numbers = range(begin, begin + len(given))
                checks |= dict(zip(numbers, given, strict=True))
                places |= dict.fromkeys(numbers, one.place)
                if one.is_required and one.definition not in replaced:
                    (shared if choice.is_parameter else required)[one.test].update(choice.needed(numbers))
                lines.append(self._record(choice, begin))
                changes |= choice.changes(one.scope)
            changes[id(one.statement)] = (one.statement, "; ".join(lines))
        return Sealed(
            text=self.source.with_changes(changes.values()),
            checks=checks,
            required={test: frozenset(numbers) for test, numbers in required.items()},
            shared={test: frozenset(numbers) for test, numbers in shared.items() if numbers},
            places=places,
            assertions=self.total,
            sealed=sum(all(choice for _, choice in choices) for _, choices in chosen),
        )

    def _replaced(self) -> set[int]:
        branches = [node for node in ast.walk(self.source.tree) if isinstance(node, ast.If | ast.Try)]
        optional = {id(node) for branch in branches for node in ast.walk(branch)}
        found: dict[str, list[int]] = {}
        for owner, test in functions(self.source.tree.body):
            found.setdefault(f"{owner}.{test.name}", []).append(id(test))
        return {
            one
            for same in found.values()
            for one in (same if len(same) > 1 and optional.intersection(same) else same[:-1])
        }

    def _record(self, choice: _Choice, begin: int) -> str:
        """Return the statement that records the value; a key is added to the number of the first cell."""
        number = f"{begin} + ({self.source.segment(choice.key)})" if choice.key else f"{begin}"
        segment = f"({self.source.segment(choice.demand.node)})"
        return _RECORDS.format(number, choice.demand.template.replace("{}", segment, 1))


def _imports(nodes: Iterable[ast.AST], module: str, name: str) -> bool:
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == module)
    return any(alias.name in (name, "*") for node in imports for alias in node.names)


def _is_assertion(node: ast.AST) -> bool:
    match node:
        case ast.Assert(test=test):
            return not isinstance(test, ast.Constant)
        case ast.Call(func=ast.Attribute(attr=name)):
            return name.startswith("assert") or name in ("raises", "warns")
    return False


def _is_expected_to_fail(nodes: Iterable[ast.AST]) -> bool:
    """Return whether a mark says that a failure is expected, so that each assertion must be able to fail."""
    return any(word in ast.dump(node) for node in nodes for word in ("xfail", "expectedFailure"))
