"""Take the expected values out of tests, so that they need not be compared in an untrusted process.

Tests run in the same process as the code they judge, so any report of a pass made there can be patched or
forged. Knowledge cannot be forged. Before a test goes into the sandbox, the literal of each
``assert <expression> == <literal>`` is taken out. The test only records the value of the expression, and the
grader compares it with the literal outside. To earn the reward, a patch must compute the right values for
inputs it has never seen, which is the task. An object that equals everything is never compared.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpc_swe.plugins.graders._runner import canonical
from hpc_swe.plugins.syntax import parse

# A test that can end before its assertion may have no answer.
_LEAVES_EARLY = (ast.Return, ast.Yield, ast.YieldFrom)


@dataclass(frozen=True)
class Sealed:
    """A sealed test module keeps its answers apart from its text."""

    text: str
    answers: dict[str, dict[int, str]] = field(default_factory=dict)
    """Test (``test_a`` or ``TestB::test_c``) -> place -> canonical text of the literal that stood there."""


def seal(text: str) -> Sealed:
    """Take the answers out of a test module; a text that is not Python stays as it is."""
    try:
        module = parse(text)
    except (SyntaxError, ValueError):
        return Sealed(text)
    answers = {}
    for name, test in _tests(module.body):
        if not any(isinstance(node, _LEAVES_EARLY) for node in ast.walk(test)):
            answers[name] = _seal(test)
    return Sealed(ast.unparse(ast.fix_missing_locations(module)), answers)


def _tests(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _tests(node.body, f"{prefix}{node.name}::")


def _seal(test: ast.FunctionDef) -> dict[int, str]:
    """Replace a test's assertions in place and return their answers: position in the body -> literal."""
    answers = {}
    # Only statements of the test's own body are replaced, since the test cannot pass without reaching each.
    for place, statement in enumerate(test.body):
        sides = _sides(statement)
        if sides is None:
            continue
        expression, answers[place] = sides
        call = f"__import__('__main__').RECORDER.answer({place}, {ast.unparse(expression)})"
        test.body[place] = parse(call).body[0]
    return answers


def _sides(statement: ast.stmt) -> tuple[ast.expr, str] | None:
    """Return the expression and the canonical literal that an assertion compares, if it does so."""
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            for expression, other in ((left, right), (right, left)):
                literal = _literal(other)
                if literal is not None and _literal(expression) is None:
                    return expression, literal
    return None


def _literal(node: ast.expr) -> str | None:
    try:
        return canonical(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, AssertionError):
        return None
