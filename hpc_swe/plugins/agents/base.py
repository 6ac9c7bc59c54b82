"""The seam: the program that acts in the sandbox."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.records import ExitStatus, Message, Task, ToolCall


@dataclass(frozen=True)
class Reply:
    """One assistant message, parsed."""

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    truncated: bool = False
    """The turn ran into its token limit."""
    parse_error: str = ""
    """Why a tool call could not be read, in words for the policy; `content` is then all that it wrote."""


class ContextFull(Exception):
    """The next prompt would leave no room to answer."""


class Chat(Protocol):
    """The policy, seen by an agent of ours; every token of it is recorded."""

    def __call__(self, messages: Sequence[Message], tools: str = "") -> Reply:
        """The policy's next message; `tools` is the JSON list that the chat template shows, or empty.

        Raises:
            ContextFull: No room is left.
            EngineError: No engine answered in time.
        """


@dataclass(frozen=True)
class Result:
    """How an agent ended."""

    exit_status: ExitStatus
    messages: list[Message]
    tools_s: float = 0.0
    error: str = ""


@runtime_checkable
class Agent(Protocol):
    """The plugin."""

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        """Work on the task until the agent submits or a budget ends.

        Raises:
            SandboxError: The host failed.
            EngineError: No engine answered in time.
        """
