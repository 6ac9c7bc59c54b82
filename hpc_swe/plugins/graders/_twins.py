"""Tests in disguise: how a grader believes a process that it does not trust.

Tests run in the same process as the code they judge, so whatever tells the grader how they ended can be
patched or forged from there. What cannot be forged is knowledge. Every test with an
``assert ... == literal`` gets twins that demand another literal, and all of them get random names: who
wants to report passes for the tests and failures for the twins has to know the right answers, and that
is the task. Swallowed exceptions, patched reports and objects that equal everything give themselves
away: two of a family pass. One twin that passes alone is only a wrong answer.
"""

import ast
import copy
import random
import secrets
from dataclasses import dataclass, field

_RANDOM = random.SystemRandom()
_LEAVES_EARLY = (ast.Return, ast.Yield, ast.YieldFrom)

# An object that equals all likely answers would pass its test and fail the twins.
_NO_OWN_EQUALITY = """
def {name}(value):
    for cls in type.mro(type(value)):
        equal = type.__dict__["__dict__"].__get__(cls).get("__eq__")
        if equal is not None and type(equal) is not type(object.__eq__):
            raise AssertionError("a value that says itself what it equals")
        if equal is not None:
            break
    if isinstance(value, dict):
        list(map({name}, value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        list(map({name}, value))
    return value
"""


@dataclass(frozen=True)
class Disguise:
    """A test module that the code it judges may read."""

    text: str
    names: dict[str, str] = field(default_factory=dict)
    """Random function name -> the test's own."""
    families: list[list[str]] = field(default_factory=list)
    """Random names of each test and its twins. Two of a family can never both pass by right."""


def disguise(text: str, twins: int, own_equality: bool) -> Disguise:
    """Give each suitable test so many twins; a text that is no Python stays as it is."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return Disguise(text)
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    guard = "" if own_equality else f"check_{secrets.token_hex(4)}"
    result = Disguise("")
    body: list[ast.stmt] = []
    for statement in module.body:
        if not isinstance(statement, ast.FunctionDef) or statement.name in used or not _decisive(statement):
            body.append(statement)
            continue
        family = _family(statement, twins, guard)
        result.names[family[0].name] = statement.name
        result.families.append([member.name for member in family])
        body += _RANDOM.sample(family, len(family))
    if guard and result.names:
        body += ast.parse(_NO_OWN_EQUALITY.format(name=guard)).body
    return Disguise(ast.unparse(ast.Module(body, [])), result.names, result.families)


def canaries() -> Disguise:
    """A module with one test that must pass and one that must fail, for tests without twins."""
    number = _RANDOM.randrange(100)
    text = f"def test_canary():\n    assert {number} + 1 == {number + 1}\n"
    return disguise(text, twins=1, own_equality=True)


def _decisive(test: ast.FunctionDef) -> list[ast.Compare]:
    """Comparisons with a literal that a test cannot pass without making."""
    if not test.name.startswith("test") or any(isinstance(node, _LEAVES_EARLY) for node in ast.walk(test)):
        return []
    found = [s.test for s in test.body if isinstance(s, ast.Assert) and isinstance(s.test, ast.Compare)]
    return [
        compare
        for compare in found
        if len(compare.ops) == 1
        and isinstance(compare.ops[0], ast.Eq)
        and _is_literal(compare.comparators[0])
        and not _is_literal(compare.left)
    ]


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _family(test: ast.FunctionDef, twins: int, guard: str) -> list[ast.FunctionDef]:
    """The test and its twins; no two of them ask for the same."""
    family = [_renamed(test, guard)]
    asked: list[tuple[int, object]] = []
    for _ in range(4 * twins):  # a truth value has only one other
        twin = _renamed(test, guard)
        place, compare = _RANDOM.choice(list(enumerate(_decisive(twin))))
        other = _other(ast.literal_eval(compare.comparators[0]))
        if len(asked) < twins and (place, other) not in asked:
            asked.append((place, other))
            compare.comparators = [ast.parse(repr(other), mode="eval").body]
            family.append(twin)
    return family


def _renamed(test: ast.FunctionDef, guard: str) -> ast.FunctionDef:
    relative = copy.deepcopy(test)
    relative.name = f"test_{secrets.token_hex(4)}"
    for compare in _decisive(relative) if guard else []:
        compare.left = ast.Call(ast.Name(guard), [compare.left], [])
    return relative


def _other(value: object) -> object:
    """A value of the same kind that is not equal."""
    match value:
        case bool():
            return not value
        case int() | float() | complex():
            near = value + _RANDOM.choice([-1, 1]) * _RANDOM.randint(1, 9)
            return near if near != value else 0  # 1e300 + 1 is 1e300
        case str():
            return value + _RANDOM.choice("abcdefgh")
        case bytes():
            return value + b"a"
        case list() | tuple() if value:
            place = _RANDOM.randrange(len(value))
            return type(value)(_other(item) if i == place else item for i, item in enumerate(value))
        case dict() if value:
            key = _RANDOM.choice(list(value))
            return value | {key: _other(value[key])}
        case set():
            return value | {secrets.token_hex(2)}
        case _:
            return [value]
