"""Demonstrate a repair of a bug task by a scripted agent, which guesses the operator.

The agent views the module, says what the docstring asks for, replaces the operator with one of the plausible
ones, and submits. So a warm start teaches the tools, and the choice stays at chance.
"""

import json
import random
from collections.abc import Iterator

from hpc_swe.plugins.tasksets._bugs_grammar import Function
from hpc_swe.records import Message, ToolCall


def conversation(function: Function, wrong: str, path: str, rng: random.Random) -> Iterator[Message]:
    """Yield the messages of the assistant and of the tools in one episode."""
    guess = rng.choice(function.plausible)
    source = function.source(wrong)
    yield _call("", "view", path=path)
    yield Message(role="tool", content=numbered(source))
    yield _call(
        f"It should be {function.phrase}.", "replace", path=path, line=function.line, old=wrong, new=guess
    )
    yield Message(role="tool", content="ok")
    yield _call("", "submit")


def numbered(source: str) -> str:
    """Number the lines of a module as the view tool does."""
    return "\n".join(f"{number}:{line}" for number, line in enumerate(source.splitlines(), start=1))


def _call(content: str, tool: str, **arguments: str | int) -> Message:
    return Message(
        role="assistant", content=content, tool_calls=[ToolCall(name=tool, arguments=json.dumps(arguments))]
    )
