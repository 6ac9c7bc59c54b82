"""The seam: one thing that the agent can do."""

import inspect
from functools import cache
from typing import ClassVar, Protocol, get_type_hints, runtime_checkable

import msgspec

from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.records import Task


class ToolError(Exception):
    """The call cannot be carried out; the text goes to the policy as the tool's answer."""


class SandboxBroken(ToolError):
    """The call ended the sandbox itself, by the policy's own doing."""


@runtime_checkable
class Tool(Protocol):
    """A tool's name is its file's; its arguments are the keyword parameters of `__call__`."""

    ends_episode: ClassVar[bool]

    def __call__(self, sandbox: Sandbox, task: Task, **arguments: object) -> str:
        """Act and answer.

        Raises:
            ToolError: The arguments are wrong, or the sandbox refuses.
            SandboxError: The host failed.
        """


class Schema(msgspec.Struct, frozen=True):
    """What a policy is told of a tool."""

    name: str
    description: str
    parameters: dict[str, object]
    """JSON schema of the arguments."""


def schema(tool: Tool) -> Schema:
    """From the tool's file name, the first line of its docstring and the parameters of its `__call__`."""
    cls = type(tool)
    _, components = msgspec.json.schema_components([_arguments(cls)])
    parameters = {key: value for key, value in components["Arguments"].items() if key != "title"}
    return Schema(cls.__module__.rpartition(".")[2], (cls.__doc__ or "").partition("\n")[0], parameters)


def invoke(tool: Tool, arguments: str, sandbox: Sandbox, task: Task) -> str:
    """Call a tool with the JSON text that the policy wrote.

    Raises:
        ToolError: The text is no JSON object of the tool's arguments, or the tool says so.
        SandboxError: The host failed.
    """
    try:
        # Not strict: a policy that writes "3" for a line number has made itself clear.
        values = msgspec.convert(msgspec.json.decode(arguments or "{}"), _arguments(type(tool)), strict=False)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ToolError(f"Wrong arguments: {error}") from None
    return tool(sandbox, task, **msgspec.structs.asdict(values))


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
    )
