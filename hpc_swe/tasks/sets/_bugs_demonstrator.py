"""Demonstrate a repair of a bug task by a scripted agent, which guesses the operator.

The agent views the module, says what the docstring asks for, replaces the operator with one of the plausible
ones, and submits. So a warm start teaches the tools, and leaves the choice to learn. Each wrong operator is
twice as likely as the right one, or chance would decide for which words a model's greedy choice is right.
"""

import json
import random
from collections.abc import Iterator

from hpc_swe.base.records import Message, ToolCall
from hpc_swe.tasks.sets._bugs_grammar import Function


def conversation(function: Function, wrong: str, path: str, rng: random.Random) -> Iterator[Message]:
    """Yield the messages of the assistant and of the tools in one episode."""
    guess = rng.choice([*function.plausible, *function.plausible[1:]])
    yield _call("", "view", path=path)
    yield Message(role="tool", content=numbered(function.source(wrong)))
    said = f"It should be {function.phrase}."
    yield _call(said, "replace", path=path, line=function.line, old=wrong, new=guess)
    yield Message(role="tool", content="ok")
    yield _call("", "submit")


def numbered(source: str) -> str:
    """Number the lines of a module as the view tool does."""
    return "\n".join(f"{number}:{line}" for number, line in enumerate(source.splitlines(), start=1))


def _call(content: str, tool: str, **arguments: str | int) -> Message:
    return Message(
        role="assistant", content=content, tool_calls=[ToolCall(name=tool, arguments=json.dumps(arguments))]
    )
