"""A small task, and a policy that plays the replies which a test gives it."""

import json
from collections.abc import Sequence

from hpc_swe.agents.loops.base import Reply
from hpc_swe.base.records import Message, Task, TestPlan, ToolCall

SMALL = Task(
    task_id="t",
    taskset="tests",
    prompt="Mend it.",
    image="python-pytest",
    workdir="/testbed",
    files={},
    tests=TestPlan(command="python -m pytest", fail_to_pass=[], timeout_s=10.0),
)


def call(name: str, **arguments: object) -> Reply:
    return Reply("", [ToolCall(name=name, arguments=json.dumps(arguments))])


class Script:
    """A policy that plays replies and keeps what it was shown."""

    def __init__(self, *replies: Reply | str | Exception) -> None:
        self.replies, self.shown, self.tools = list(replies), list[Message](), ""

    def __call__(self, messages: Sequence[Message], tools: str = "") -> Reply:
        self.shown, self.tools = list(messages), tools
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return Reply(reply) if isinstance(reply, str) else reply
