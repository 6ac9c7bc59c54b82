"""The seam: a container that an episode acts in."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hpc_swe.records import Task


@dataclass(frozen=True)
class CommandResult:
    """What a command in the sandbox left."""

    exit_code: int
    output: str
    """Standard output and error, merged, cut in the middle when too long."""
    timed_out: bool = False
    broke_sandbox: bool = False
    """The command ended the sandbox itself; the policy's own doing once the agent has acted."""


class Sandbox(Protocol):
    """One open sandbox. After `broke_sandbox` every further call answers the same."""

    def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run a shell line in the work directory.

        Raises:
            SandboxError: The host failed, not the command.
        """
        ...

    def read(self, path: str) -> bytes:
        """Content of a regular file, relative to the work directory.

        Raises:
            FileNotFoundError: No such regular file, or larger than the sandbox gives out.
            SandboxError: The host failed.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Put a regular file, making its folders.

        Raises:
            OSError: The sandbox refuses (disk full, path is a folder).
            SandboxError: The host failed.
        """
        ...


@runtime_checkable
class Sandboxes(Protocol):
    """The plugin: opens sandboxes."""

    def check(self) -> None:
        """Raise ConfigError, with the remedy, when this machine cannot open sandboxes."""
        ...

    def open(self, task: Task) -> AbstractContextManager[Sandbox]:
        """A fresh sandbox of the task's image with the task's files in its work directory.

        Raises:
            SandboxError: It did not start.
        """
        ...
