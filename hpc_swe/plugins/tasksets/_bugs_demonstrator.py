"""A scripted agent for the bug tasks: right about the place and the kind of repair, guessing which.

It looks, says what the docstring asks for, puts one of the plausible operators there and submits.
So a warm start teaches the tools and leaves the choice at chance.
"""

import json
import random
from collections.abc import Iterator

from hpc_swe.plugins.tasksets._bugs_grammar import Function
from hpc_swe.records import Message, ToolCall


def conversation(function: Function, wrong: str, path: str, rng: random.Random) -> Iterator[Message]:
    """The assistant's and the tools' messages of one episode."""
    guess = rng.choice(function.plausible)
    source = function.source(wrong)
    yield _call("", "view", path=path)
    yield Message(role="tool", content=numbered(source))
    said = f"It should be {function.phrase}."
    yield _call(said, "replace", path=path, line=function.line, old=wrong, new=guess)
    yield Message(role="tool", content="ok")
    yield _call("", "submit")


def numbered(source: str) -> str:
    """The module as the view tool shows it."""
    return "\n".join(f"{number}:{line}" for number, line in enumerate(source.splitlines(), start=1))


def _call(content: str, tool: str, **arguments: str | int) -> Message:
    return Message(
        role="assistant", content=content, tool_calls=[ToolCall(name=tool, arguments=json.dumps(arguments))]
    )
