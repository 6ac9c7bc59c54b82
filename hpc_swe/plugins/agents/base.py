"""The seam: the program that acts in the sandbox."""

import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
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


class TurnsSpent(Exception):
    """The episode has had its turns."""


@dataclass(frozen=True)
class ChatAddress:
    """Where a program finds the policy, and with which key."""

    url: str
    key: str


@dataclass(frozen=True)
class Refusal:
    """Why the last request of a program was not answered."""

    status: ExitStatus
    why: str
    is_side_request: bool = False
    """It was of no conversation, as a title's request is: a program may well have ended without it."""


class Chat(Protocol):
    """The policy, seen by an agent; every token of it is recorded."""

    messages: list[Message]
    """The history that the last reply ended, side calls apart."""
    refusal: Refusal | None
    """Set when a request was refused by a limit or not understood, until a conversation goes on."""

    def __call__(self, messages: Sequence[Message], tools: str = "") -> Reply:
        """The policy's next message; `tools` is the JSON list that the chat template shows, or empty.

        Raises:
            ContextFull: No room is left.
            EngineError: No engine answered in time.
        """

    def serve(self, listener: socket.socket, most_turns: int) -> AbstractContextManager[ChatAddress]:
        """As an OpenAI-style server for a program, which gets `most_turns` replies in all."""

    def clock(self) -> float:
        """Wall seconds of the episode without those at the engines; infinite once nothing can come of it."""


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

    @property
    def budget_s(self) -> float:
        """Seconds beside the engines that an episode may take before the agent ends it."""

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        """Work on the task until the agent submits or a budget ends.

        Raises:
            SandboxError: The host failed.
            EngineError: No engine answered in time.
        """


@dataclass(frozen=True)
class Preface:
    """What the policy is shown beside the conversation itself."""

    system: str
    """The system prompt; empty when there is none."""
    tools: str
    """The JSON list that the chat template shows, or empty."""
    names: list[str]
    """Tools that can be called."""


@runtime_checkable
class Prefaced(Protocol):
    """An agent that can say so before any episode; demonstrations are rendered as its episodes will be."""

    @property
    def preface(self) -> Preface:
        """The same in every episode."""
