"""Define an agent: it calls the policy, and acts in the sandbox as the policy says."""

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.records import ExitStatus, Message, Task, ToolCall


@dataclass(frozen=True)
class Reply:
    """Hold one assistant message, parsed."""

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    truncated: bool = False
    """The turn reached its token limit."""
    parse_error: str = ""
    """Why a tool call could not be parsed, for the policy to read; `content` is then the whole text."""


class ContextFull(Exception):
    """The next prompt would leave no room for an answer."""


class TurnsSpent(Exception):
    """The episode has used up its turns."""


@dataclass(frozen=True)
class ChatAddress:
    """Name the URL at which a program reaches the policy, and the key for it."""

    url: str
    key: str


@dataclass(frozen=True)
class Refusal:
    """Say why the last request of a program was not answered."""

    status: ExitStatus
    why: str
    is_side_request: bool = False
    """It was of no conversation, as a title's request is: a program may well have ended without it."""


class Chat(Protocol):
    """Let an agent talk to the policy; every token is recorded."""

    messages: list[Message]
    """The history that the last reply ended, side calls apart."""
    refusal: Refusal | None
    """Set when a limit refused a request or it was not understood, until a conversation goes on."""

    def __call__(self, messages: Sequence[Message], tools: str = "") -> Reply:
        """Return the policy's next message.

        `tools` is the JSON list that the chat template shows, or empty. Raise ContextFull when no room is
        left for an answer, and EngineError when no engine answered in time.
        """

    def serve(self, listener: socket.socket, most_turns: int) -> AbstractContextManager[ChatAddress]:
        """Serve the policy to a program like the APIs that it knows, with `most_turns` replies in all."""

    def clock(self) -> float:
        """Return the episode's wall seconds without those at the engines; infinite once it cannot succeed."""


@dataclass(frozen=True)
class Result:
    """Hold how an agent ended, and its conversation."""

    exit_status: ExitStatus
    messages: list[Message]
    tools_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Preface:
    """Hold what the policy is shown besides the conversation itself."""

    system: str
    """The system prompt; empty when there is none."""
    tools: str
    """The JSON list that the chat template shows, or empty."""
    names: list[str]
    """Tools that can be called."""


class Agent(ABC):
    """Solve tasks with the policy."""

    @property
    @abstractmethod
    def budget_s(self) -> float:
        """Return the seconds, without those at the engines, after which the agent ends an episode."""

    @abstractmethod
    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        """Work on the task until the agent submits or a budget ends.

        Raise SandboxError when the host failed, and EngineError when no engine answered in time.
        """

    @property
    def preface(self) -> Preface | None:
        """Return the preface, with which demonstrations are rendered; None if only an episode has one."""
        return None

    def check_tasks(self, tasks: Sequence[Task]) -> None:  # noqa: B027
        """Raise ConfigError, with the key and the remedy, if something of the agent works on none of them."""
