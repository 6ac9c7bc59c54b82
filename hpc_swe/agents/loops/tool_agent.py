"""Run the built-in agent: it carries out the policy's tool calls, and the answers are the next prompt.

Whatever the policy does to its sandbox ends at worst its own episode. Only errors of the engine and of the
host pass through.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec

from hpc_swe.agents.loops.base import Agent, Chat, ContextFull, Preface, Result
from hpc_swe.agents.sandboxes.base import Clock, CommandResult, ProgramSession, Sandbox, SandboxWrapper
from hpc_swe.agents.tools.base import SandboxBroken, Tool, ToolError, cut, invoke, schema
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import Plugin, load
from hpc_swe.base.records import ExitStatus, Message, Task, ToolCall

log = logging.getLogger(__name__)


class ToolAgent(Plugin, Agent, frozen=True, kw_only=True):
    """Chat with tools until the policy submits or a budget is spent."""

    tools: tuple[str | dict[str, object], ...] = ("view", "replace", "rewrite", "evaluate", "submit")
    """Names of agents/tools/, or tables with a type, its fields and a `name` that the policy is to use."""
    max_turns: int = 10
    """Replies of the policy after which an episode ends."""
    tool_budget_s: float = 300.0
    """Seconds for all tool calls of an episode together; a command that runs at their end is stopped."""
    most_chars: ClassVar[int] = 10_000  # of one tool's answer; tools of long output have smaller limits
    system_prompt: str = "Fix the bug."
    """System message; empty sends none."""
    nudge: str = "Call a tool."
    """User message after a reply without a tool call, behind the reason where a call could not be parsed."""
    show_tools: bool = False
    """Pass the tools' schemas to the chat template."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown tool."""
        _load(self)

    @property
    def budget_s(self) -> float:
        return self.tool_budget_s

    @property
    def preface(self) -> Preface:
        """Return the system prompt, and the tools if the template shows them."""
        tools = _load(self)
        shown = [
            {"type": "function", "function": msgspec.to_builtins(schema(tool)) | {"name": name}}
            for name, tool in tools.items()
        ]
        return Preface(self.system_prompt, json.dumps(shown) if self.show_tools else "", list(tools))

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise ConfigError if a tool can do nothing on any task; log if it cannot on any of a part."""
        for tool in _load(self).values():
            problems: dict[str, str] = {}
            for task in tasks:
                if problems.get(task.taskset) != "":
                    problems[task.taskset] = tool.why_not(task)
            useless = {part: problem for part, problem in problems.items() if problem}
            known = schema(tool).name
            if useless and len(useless) == len(problems):
                raise ConfigError(
                    f"agent.tools has {known!r}, by name or by default, which can do nothing on any task: "
                    f"{next(iter(useless.values()))} List the tools without it, for example "
                    'agent.tools = ["bash", "view", "edit", "submit"]'
                )
            for part, problem in useless.items():
                log.warning("agent.tools has %r: no task of %s can use it: %s", known, part, problem)

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        episode = _Episode(self, task, _Bounded(sandbox))
        with ExitStack() as life:
            tools = _load(self)
            for name, tool in tools.items():
                tools[name] = life.enter_context(tool.open(episode.sandbox, task))
            status = episode.run(chat, tools)
        return Result(status, episode.messages, episode.tools_s, episode.error)


@dataclass
class _Episode:
    agent: ToolAgent
    task: Task
    sandbox: "_Bounded"
    messages: list[Message] = field(default_factory=list)
    tools_s: float = 0.0
    error: str = ""

    def run(self, chat: Chat, tools: dict[str, Tool]) -> ExitStatus:
        preface = self.agent.preface
        if preface.system:
            self.messages.append(Message(role="system", content=preface.system))
        self.messages.append(Message(role="user", content=self.task.prompt))
        for _ in range(self.agent.max_turns):
            try:
                reply = chat(list(self.messages), preface.tools)
            except ContextFull:
                return ExitStatus.CONTEXT
            message = Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)
            self.messages.append(message)
            if not reply.tool_calls:
                nudge = f"{self._fit(reply.parse_error)}\n{self.agent.nudge}".lstrip("\n")
                self.messages.append(Message(role="user", content=nudge))
            for call in reply.tool_calls:
                status = self._carry_out(tools, call)
                if status is not None:
                    return status
        return ExitStatus.MAX_TURNS

    def _carry_out(self, tools: dict[str, Tool], call: ToolCall) -> ExitStatus | None:
        started = time.monotonic()
        status = None
        try:
            tool = tools.get(call.name)
            if tool is None:
                raise ToolError(f"No tool {call.name[:50]!r}; tools: {', '.join(tools)}")
            self.sandbox.deadline = started + self.agent.tool_budget_s - self.tools_s
            answer = invoke(tool, call.arguments, self.sandbox, self.task)
            status = ExitStatus.SUBMITTED if tool.ends_episode else None
        except SandboxBroken as error:
            answer = self.error = str(error)
            status = ExitStatus.AGENT_ERROR
        except ToolError as error:
            answer = str(error)
        self.tools_s += time.monotonic() - started
        self.messages.append(Message(role="tool", content=self._fit(answer)))
        return status or (ExitStatus.TOOL_TIME if self.tools_s >= self.agent.tool_budget_s else None)

    def _fit(self, text: str) -> str:
        """Make a text fit a record: a file name that is no valid text would break it, and end the worker."""
        return cut(text, self.agent.most_chars).encode("utf-8", "replace").decode()


@dataclass
class _Bounded(SandboxWrapper):
    """Bound commands by the budget: one that outlasts the episode would count as a failure of the host."""

    deadline: float = 0.0

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        left_s = self.left_s
        return replace(super().run(command, min(timeout_s, left_s), clock), left_s=round(left_s, 1))

    def python(
        self, program: str, timeout_s: float, longest_s: float = 0.0, prelude: str = ""
    ) -> CommandResult:
        left_s = self.left_s
        done = super().python(program, min(timeout_s, left_s), min(longest_s, left_s), prelude)
        return replace(done, left_s=round(left_s, 1))

    @contextmanager
    def session(self, program: str, python: str = "") -> Iterator[ProgramSession]:
        with super().session(program, python) as session:
            yield _BoundedSession(session, self)

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


@dataclass
class _BoundedSession(ProgramSession):
    session: ProgramSession
    sandbox: _Bounded

    def ask(self, message: bytes, timeout_s: float) -> bytes:
        return self.session.ask(message, min(timeout_s, self.sandbox.left_s))

    def wait(self, timeout_s: float) -> bytes:
        return self.session.wait(min(timeout_s, self.sandbox.left_s))

    def interrupt(self) -> None:
        self.session.interrupt()

    def printed(self) -> str:
        return self.session.printed()


def _load(agent: ToolAgent) -> dict[str, Tool]:
    loaded: dict[str, Tool] = {}
    for each in agent.tools:
        table = {"type": each} if isinstance(each, str) else dict(each)
        name = table.pop("name", "")
        tool: Tool = load("tools", table)
        loaded[str(name) or schema(tool).name] = tool
    return loaded
