"""Sealed answers: how a grader believes a process that it does not trust.

Tests run in the same process as the code they judge, so whatever says there that a test passed can be
patched or forged. What cannot be forged is knowledge. From each ``assert <expression> == <literal>`` the
literal is taken out before the test goes into the sandbox; the test only writes down what the expression
gave, and the grader compares it outside. To be paid one must compute the right values for inputs never
seen before, and that is the task. Objects that equal everything have nobody to tell it to.
"""

import ast
from dataclasses import dataclass, field

from hpc_swe.plugins.graders._runner import canonical

# A test that can leave before its assertion has no answer to give.
_LEAVES_EARLY = (ast.Return, ast.Yield, ast.YieldFrom)


@dataclass(frozen=True)
class Sealed:
    """A test module without its answers."""

    text: str
    answers: dict[str, dict[int, str]] = field(default_factory=dict)
    """Test (``test_a`` or ``TestB::test_c``) -> place -> canonical text of the literal that stood there."""


def seal(text: str) -> Sealed:
    """Take the answers out; a text that is no Python stays as it is."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return Sealed(text)
    answers = {}
    for name, test in _tests(module.body):
        if not any(isinstance(node, _LEAVES_EARLY) for node in ast.walk(test)):
            answers[name] = _seal(test)
    return Sealed(ast.unparse(ast.fix_missing_locations(module)), answers)


def _tests(body: list[ast.stmt], prefix: str = "") -> list[tuple[str, ast.FunctionDef]]:
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            found.append((prefix + node.name, node))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found += _tests(node.body, f"{prefix}{node.name}::")
    return found


def _seal(test: ast.FunctionDef) -> dict[int, str]:
    """Only statements of the test's own body: it cannot pass without reaching each of them."""
    answers = {}
    for place, statement in enumerate(test.body):
        sides = _sides(statement)
        if sides is None:
            continue
        expression, answers[place] = sides
        recorder = ast.parse("__import__('__main__').RECORDER.answer", mode="eval").body
        test.body[place] = ast.Expr(ast.Call(recorder, [ast.Constant(place), expression], []))
    return answers


def _sides(statement: ast.stmt) -> tuple[ast.expr, str] | None:
    """The expression and the literal that an assertion compares."""
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
