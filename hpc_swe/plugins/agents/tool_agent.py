"""An agent of ours: the policy speaks, its tool calls are carried out, their answers are its next prompt.

Whatever the policy does to its sandbox ends at worst its own episode. Only the engine and the host can
fail otherwise, and those errors pass through.
"""

import json
import time
from dataclasses import dataclass, field, replace

import msgspec

from hpc_swe.plugins import Plugin, load
from hpc_swe.plugins.agents.base import Chat, ContextFull, Preface, Result
from hpc_swe.plugins.sandboxes.base import Clock, CommandResult, Sandbox, SandboxWrapper
from hpc_swe.plugins.tools.base import SandboxBroken, Tool, ToolError, cut, invoke, schema
from hpc_swe.records import ExitStatus, Message, Task, ToolCall


class ToolAgent(Plugin, frozen=True, kw_only=True):
    """Chat with tools until submitted or a budget is spent."""

    tools: tuple[str | dict[str, object], ...] = ("view", "replace", "rewrite", "evaluate", "submit")
    """Names of plugins/tools/, or tables with a type and its fields."""
    max_turns: int = 10
    """Answers of the model after which an episode ends."""
    tool_budget_s: float = 300.0
    """Seconds that all tool calls of an episode may take together; the last one's commands end with them."""
    most_chars: int = 10_000
    """Of one tool's answer."""
    system_prompt: str = "Fix the bug."
    """The system's message."""
    nudge: str = "Call a tool."
    """What answers a reply without a tool call; one that cannot be read is told why."""
    show_tools: bool = False
    """Whether the chat template gets the tools' schemas."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a tool that there is not."""
        _load(self)

    @property
    def budget_s(self) -> float:
        """Of all its tools."""
        return self.tool_budget_s

    @property
    def preface(self) -> Preface:
        """The system prompt, and the tools if the template shows them."""
        tools = _load(self)
        shown = json.dumps([_shown(tool) for tool in tools.values()]) if self.show_tools else ""
        return Preface(self.system_prompt, shown, list(tools))

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        """Work on the task until the agent submits or a budget ends."""
        episode = _Episode(self, task, sandbox)
        return Result(episode.run(chat), episode.messages, episode.tools_s, episode.error)


@dataclass
class _Episode:
    agent: ToolAgent
    task: Task
    sandbox: Sandbox
    messages: list[Message] = field(default_factory=list)
    tools_s: float = 0.0
    error: str = ""

    def run(self, chat: Chat) -> ExitStatus:
        tools, preface = _load(self.agent), self.agent.preface
        if preface.system:
            self.messages.append(Message(role="system", content=preface.system))
        self.messages.append(Message(role="user", content=self.task.prompt))
        for _ in range(self.agent.max_turns):
            try:
                reply = chat(list(self.messages), preface.tools)
            except ContextFull:
                return ExitStatus.CONTEXT
            said = Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)
            self.messages.append(said)
            if not reply.tool_calls:
                why = self._fit(reply.parse_error)
                self.messages.append(Message(role="user", content=f"{why}\n{self.agent.nudge}".lstrip("\n")))
            for call in reply.tool_calls:
                ended = self._act(tools, call)
                if ended is not None:
                    return ended
        return ExitStatus.MAX_TURNS

    def _act(self, tools: dict[str, Tool], call: ToolCall) -> ExitStatus | None:
        started = time.monotonic()
        ended = None
        try:
            tool = tools.get(call.name)
            if tool is None:
                raise ToolError(f"No tool {call.name[:50]!r}; tools: {', '.join(tools)}")
            bounded = _Bounded(self.sandbox, started + self.agent.tool_budget_s - self.tools_s)
            answer = invoke(tool, call.arguments, bounded, self.task)
            ended = ExitStatus.SUBMITTED if tool.ends_episode else None
        except SandboxBroken as error:
            answer = self.error = str(error)
            ended = ExitStatus.AGENT_ERROR
        except ToolError as error:
            answer = str(error)
        self.tools_s += time.monotonic() - started
        self.messages.append(Message(role="tool", content=self._fit(answer)))
        return ended or (ExitStatus.TOOL_TIME if self.tools_s >= self.agent.tool_budget_s else None)

    def _fit(self, text: str) -> str:
        """What a record can hold: file names that are no text would break it, and end the worker."""
        return cut(text, self.agent.most_chars).encode("utf-8", "replace").decode()


@dataclass
class _Bounded(SandboxWrapper):
    """A call that outlasts the budget could outlast the episode, which is the host's failure then."""

    until: float

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        left_s = self._left_s
        return replace(super().run(command, min(timeout_s, left_s), clock), left_s=round(left_s, 1))

    def python(self, program: str, timeout_s: float) -> CommandResult:
        left_s = self._left_s
        return replace(super().python(program, min(timeout_s, left_s)), left_s=round(left_s, 1))

    @property
    def _left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())


def _load(agent: ToolAgent) -> dict[str, Tool]:
    tables = [{"type": tool} if isinstance(tool, str) else tool for tool in agent.tools]
    loaded: list[Tool] = [load("tools", table) for table in tables]
    return {schema(tool).name: tool for tool in loaded}


def _shown(tool: Tool) -> dict[str, object]:
    return {"type": "function", "function": msgspec.to_builtins(schema(tool))}
