"""The seam: one thing that the agent can do."""

from typing import Protocol, runtime_checkable

from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.records import Task


class ToolError(Exception):
    """The call cannot be carried out; the text goes to the policy as the tool's answer."""


@runtime_checkable
class Tool(Protocol):
    """A tool's name is its file's; its arguments are the keyword parameters of `__call__`."""

    ends_episode: bool

    def __call__(self, sandbox: Sandbox, task: Task, **arguments: object) -> str:
        """Act and answer.

        Raises:
            ToolError: The arguments are wrong, or the sandbox refuses.
        """
        ...
