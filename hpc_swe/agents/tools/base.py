"""Define a tool: one action that an agent can take in its sandbox."""

import inspect
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, ClassVar, Protocol, get_type_hints

import msgspec

from hpc_swe.agents.sandboxes.base import CommandResult, Sandbox
from hpc_swe.agents.tools._text.patterns import matches
from hpc_swe.base.records import Task


class ToolError(Exception):
    """The call cannot be carried out; its text goes to the policy as the tool's answer."""


class SandboxBroken(ToolError):
    """The call ended the sandbox itself, which is the policy's own fault."""


class Tool(ABC):
    """Act in a sandbox; the tool has the name of its file, and takes the keyword parameters of `__call__`."""

    ends_episode: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, sandbox: Sandbox, task: Task, *args: Any, **arguments: Any) -> str:
        """Act, and return the answer for the policy.

        Raise ToolError if the arguments are wrong, or the sandbox refuses, and SandboxError if the host
        failed.
        """

    def open(self, sandbox: Sandbox, task: Task) -> AbstractContextManager[Any]:
        """Return the tool for one episode, with the same arguments; it starts nothing before a call.

        A tool that keeps something from call to call keeps it there, and it ends with the episode.
        """
        return nullcontext(self)

    def why_not(self, task: Task) -> str:
        """Return why no call can do anything on this task, as a sentence; an empty text if one can."""
        return ""


class RunsTests(Protocol):
    """A tool that runs the tests which the agent can see."""

    def why_not(self, task: Task) -> str:
        """Return why there is nothing to run, as `Tool.why_not` does."""

    def run(self, sandbox: Sandbox, task: Task) -> CommandResult:
        """Run the tests; raise ToolError if the task shows none, or they ended the sandbox."""

    def words(self, result: CommandResult) -> str:
        """Return the end of a run's output, for the policy."""


class Schema(msgspec.Struct, frozen=True):
    """Describe a tool to the policy."""

    name: str
    description: str
    parameters: dict[str, object]
    """JSON schema of the arguments."""


def schema(tool: Tool) -> Schema:
    """Describe a tool by its file name, the first line of its docstring and the parameters of `__call__`."""
    cls = type(tool)
    _, components = msgspec.json.schema_components([_arguments(cls)])
    parameters = {key: value for key, value in components["Arguments"].items() if key != "title"}
    return Schema(cls.__module__.rpartition(".")[2], (cls.__doc__ or "").partition("\n")[0], parameters)


def invoke(tool: Tool, arguments: str, sandbox: Sandbox, task: Task) -> str:
    """Call a tool with the JSON text that the policy wrote.

    Raise ToolError if the text is no JSON object of the tool's arguments, or the tool refuses, and
    SandboxError if the host failed.
    """
    try:
        given = msgspec.json.decode(arguments or "{}")
        if isinstance(given, dict):  # null stands for an argument that is left out, as many policies write it
            given = {name: value for name, value in given.items() if value is not None}
        # Not strict: the meaning of "3" for a line number is clear.
        values = msgspec.convert(given, _arguments(type(tool)), strict=False)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ToolError(f"Wrong arguments: {error}") from None
    return tool(sandbox, task, **msgspec.structs.asdict(values))


def cut(text: str, most: int) -> str:
    """Keep the beginning and end of a text, about `most` characters in all, and say how much is missing."""
    if len(text) <= most:
        return text
    tail = len(text) - most // 2
    return f"{text[: most // 2]}\n[... at least {tail - most // 2} characters cut ...]\n{text[tail:]}"


def is_ignored(task: Task, path: str, is_folder: bool = False) -> bool:
    """Return whether tools do not show a file, or any file of a folder."""
    return matches(task.files.get(".debugignore", ""), below(task, path), is_folder)


def is_read_only(task: Task, path: str) -> bool:
    """Return whether tools do not change a file."""
    return matches(task.files.get(".debugreadonly", ""), below(task, path))


def below(task: Task, path: str) -> str:
    """Return a path relative to the work directory; the sandbox refuses paths that lead out of it."""
    workdir = task.workdir.rstrip("/")
    return "." if path.rstrip("/") == workdir else path.removeprefix(f"{workdir}/")


@cache
def _arguments(tool: type) -> type[msgspec.Struct]:
    call = tool.__call__
    hints = get_type_hints(call)
    return msgspec.defstruct(
        "Arguments",
        [
            (name, hints[name]) if p.default is p.empty else (name, hints[name], p.default)
            for name, p in inspect.signature(call).parameters.items()
            if p.kind is p.KEYWORD_ONLY
        ],
        forbid_unknown_fields=True,
        kw_only=True,
    )
