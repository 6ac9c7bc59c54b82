"""Demonstrate a repair of a bug task by a scripted agent, which guesses the operator.

The agent views the module, says what the docstring asks for, replaces the operator with one of the plausible
ones, and submits. So a warm start teaches the tools, and leaves the choice to learn. Each wrong operator is
twice as likely as the right one, or chance would decide for which words a model's greedy choice is right.
With its work shown, the agent chooses evenly, and says this before it views the tests, too. Then it writes
down each plausible module and the expression that each visible test would evaluate, beside the expected
value, and rewrites the line as in one of these.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_swe.base.records import Message, ToolCall
from hpc_swe.tasks.sets._bugs_grammar import Function

LISTED = ["+", "*", "&", "<", "|", ">", "-", "^", "=="]
"""Order in which plausible operators are listed: for three words each the right one is the first, second or
third of them, so that its place says nothing."""


@dataclass(frozen=True)
class WorkedTest:
    """Hold a test that the agent writes down with each plausible operator."""

    expectation: str
    """The test's call and the value that it expects: ``tepu(53, 27) == 80``."""
    left: Sequence[object]
    """Values that the left side of the expression takes."""
    right: object

    def worked(self, operator: str) -> str:
        """Return the expressions that the call evaluates with this operator, and what is expected."""
        terms = ", ".join(f"{value} {operator} {self.right}" for value in self.left)
        return f"{terms}: {self.expectation}"


@dataclass(frozen=True)
class TestFile:
    """A file of tests that the agent reads before it chooses."""

    path: str
    text: str
    tests: Sequence[WorkedTest]


def conversation(
    function: Function, wrong: str, path: str, rng: random.Random, tests: TestFile | None = None
) -> Iterator[Message]:
    """Yield the messages of the assistant and of the tools in one episode; given `tests`, also its work."""
    others = function.plausible[1:] if tests is None else []
    guess = rng.choice([*function.plausible, *others])
    source = function.source(wrong)
    yield _call("", "view", path=path)
    yield Message(role="tool", content=numbered(source))
    said = f"It should be {function.phrase}."
    if tests is None:
        yield _call(said, "replace", path=path, line=function.line, old=wrong, new=guess)
    else:
        yield _call(said, "view", path=tests.path)  # the word is copied where it is near
        yield Message(role="tool", content=numbered(tests.text))
        work = "\n".join([said, *_work(function, tests.tests), said])
        # A model learns to copy a line, as it does in its work, long before it learns to copy one operator.
        line = function.source(guess).splitlines()[function.line - 1]
        yield _call(work, "rewrite", path=path, start=function.line, new_code=line)
    yield Message(role="tool", content="ok")
    yield _call("", "submit")


def _work(function: Function, tests: Sequence[WorkedTest]) -> Iterator[str]:
    """Yield each plausible module, and below it each test's expression beside the expected value."""
    for operator in sorted(function.plausible, key=LISTED.index):
        yield f"With {operator}:"
        yield function.source(operator).removesuffix("\n")
        yield from (test.worked(operator) for test in tests)


def numbered(source: str) -> str:
    """Number the lines of a module as the view tool does."""
    return "\n".join(f"{number}:{line}" for number, line in enumerate(source.splitlines(), start=1))


def _call(content: str, tool: str, **arguments: str | int) -> Message:
    return Message(
        role="assistant", content=content, tool_calls=[ToolCall(name=tool, arguments=json.dumps(arguments))]
    )
