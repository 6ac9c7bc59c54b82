"""Ask for repaired code and no tool calls: the files stand in the first message, the reply holds the repair.

Any model that answers with fenced code can act so, also one that was never taught to call tools. Between two
tries the policy reads what the visible tests print.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hpc_swe.agents.loops._answers import BadAnswer, Form, changes
from hpc_swe.agents.loops.base import Agent, Chat, ContextFull, Preface, Reply, Result
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.agents.tools.base import (
    RunsTests,
    SandboxBroken,
    ToolError,
    cut,
    invoke,
    is_ignored,
    is_read_only,
)
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.loader import Plugin, load
from hpc_swe.base.records import ExitStatus, Message, Task

INSTRUCTIONS: dict[Form, str] = {
    "file": "You repair Python programs. Answer with one block between lines of ``` that holds the whole "
    "repaired file. If there are several files, write the file's name on the line above the block.",
    "function": "You repair Python programs. Find the fault, then answer with one block between lines of "
    "``` that holds the whole repaired function, and nothing else.",
}
"""Form of the answer -> system prompt."""

OPTIONS = ("-q", "--tb=short", "--no-header", "-rN")  # of pytest: the failures and their lines, no more


class AnswerAgent(Plugin, Agent, frozen=True, kw_only=True):
    """Take the repair out of the policy's reply; ask again while visible tests fail and tries are left."""

    form: Form = "file"
    """What a reply's block holds: a whole file, or functions that replace those of the same names."""
    max_turns: int = 1
    """Replies of the policy. After each but the last the visible tests run; the episode ends if they pass."""
    show_files: bool = True
    """Show the task's files and its visible tests in the first message."""
    system_prompt: str = ""
    """System message; empty asks for the form in words of our own."""
    timeout_s: float = 30.0
    """Seconds of one run of the visible tests."""
    most_chars: ClassVar[int] = 2000  # from the end of what the visible tests print

    @property
    def budget_s(self) -> float:
        return self.max_turns * self.timeout_s

    @property
    def preface(self) -> Preface:
        """Return the system prompt; there are no tools."""
        return Preface(self.system_prompt or INSTRUCTIONS[self.form], "", [])

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise ConfigError if a task has no file of its own to repair, as those of repositories."""
        for task in tasks:
            if not editable(task):
                raise ConfigError(
                    f"[agent] type = 'answer_agent': task {task.task_id} of {task.taskset} has no files "
                    "besides its tests, so no reply can repair one; choose type = 'tool_agent'"
                )

    def solve(self, task: Task, sandbox: Sandbox, chat: Chat) -> Result:
        episode = _Episode(self, task, sandbox, chat, dict(editable(task)))
        status = episode.run()
        return Result(status, episode.messages, episode.tests_s, episode.error)


def editable(task: Task) -> dict[str, str]:
    """Return path -> text of the files that a reply may change: neither tests, nor hidden, nor read-only."""
    return {
        path: text
        for path, text in shown(task).items()
        if path not in task.tests.files and not is_read_only(task, path)
    }


def shown(task: Task) -> dict[str, str]:
    """Return path -> text of the files that the first message may show."""
    return {
        path: text
        for path, text in task.files.items()
        if not path.startswith(".") and not is_ignored(task, path)
    }


def opening(task: Task, files: Mapping[str, str]) -> str:
    """Return the first message: the task's prompt, and files in fences that their texts cannot close."""
    parts = [task.prompt]
    for path, text in files.items():
        fence = "```"
        while fence in text:
            fence += "`"
        end = "" if text.endswith("\n") or not text else "\n"
        parts.append(f"{path}\n{fence}{'python' if path.endswith('.py') else ''}\n{text}{end}{fence}")
    return "\n\n".join(parts)


@dataclass
class _Episode:
    agent: AnswerAgent
    task: Task
    sandbox: Sandbox
    chat: Chat
    files: dict[str, str]
    """Path -> present text."""
    messages: list[Message] = field(default_factory=list)
    tests_s: float = 0.0
    error: str = ""

    def run(self) -> ExitStatus:
        files = shown(self.task) if self.agent.show_files else {}
        self.messages.append(Message(role="system", content=self.agent.preface.system))
        self.messages.append(Message(role="user", content=opening(self.task, files)))
        for left in reversed(range(self.agent.max_turns)):
            try:
                reply = self.chat(list(self.messages))
            except ContextFull:
                return ExitStatus.CONTEXT
            self.messages.append(
                Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)
            )
            if (status := self._take(reply, left)) is not None:
                return status
        raise AssertionError("the last reply ends an episode")

    def _take(self, reply: Reply, left: int) -> ExitStatus | None:
        """Apply a reply; return how the episode ends, or None after asking again."""
        try:
            self._apply(reply)
            answer = self._failures() if left else ""
        except SandboxBroken as error:
            self.error = str(error)
            return ExitStatus.AGENT_ERROR
        except (BadAnswer, ToolError) as error:
            if not left:  # the work of earlier replies is handed in
                return ExitStatus.MAX_TURNS if reply.truncated else ExitStatus.SUBMITTED
            answer = str(error)
        if not answer:
            return ExitStatus.SUBMITTED
        self.messages.append(Message(role="user", content=_fit(answer, self.agent.most_chars)))
        return None

    def _apply(self, reply: Reply) -> None:
        for path, text in changes(reply.content, self.files, self.agent.form).items():
            rewrite = load("tools", {"type": "rewrite"})
            invoke(rewrite, json.dumps({"path": path, "new_code": text}), self.sandbox, self.task)
            self.files[path] = text

    def _failures(self) -> str:
        """Return what the visible tests print, or nothing if all pass or there are none."""
        agent = self.agent
        fields = {"timeout_s": agent.timeout_s, "options": OPTIONS, "most_chars": agent.most_chars}
        tests: RunsTests = load("tools", {"type": "evaluate"} | fields)
        if tests.why_not(self.task):
            return ""
        started = time.monotonic()
        result = tests.run(self.sandbox, self.task)
        self.tests_s += time.monotonic() - started
        if result.exit_code == 0 and not result.timed_out:
            return ""
        return f"The tests fail:\n{tests.words(result)}\n\nRepair the program, in the same form as before."


def _fit(text: str, most: int) -> str:
    return cut(text, most + 200).encode("utf-8", "replace").decode()
