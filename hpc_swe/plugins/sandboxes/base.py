"""The seam: a container that an episode acts in."""

import math
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from hpc_swe.records import Task

Clock = Callable[[], float]
"""Seconds that count; they may stand still, and infinity ends what is timed."""


class TreeEntry(NamedTuple):
    """One name in a folder of a sandbox."""

    kind: Literal["file", "executable", "link", "folder", "other"]
    size: int
    changed_ns: int

    @property
    def is_folder(self) -> bool:
        """A folder, and no link to one."""
        return self.kind == "folder"

    @property
    def is_file_or_link(self) -> bool:
        """What a difference can hold."""
        return self.kind in ("file", "executable", "link")


@dataclass(frozen=True)
class CommandResult:
    """What a command in the sandbox left."""

    exit_code: int
    output: str
    """Standard output and error, merged, cut in the middle when too long."""
    timed_out: bool = False
    broke_sandbox: bool = False
    """The command ended the sandbox itself; the policy's own doing once the agent has acted."""
    left_s: float = math.inf
    """Of a budget when it began: no more than that was it given, whatever was asked for."""


class Sandbox(Protocol):
    """One open sandbox. After `broke_sandbox` every further command answers the same.

    Processes end with the command that started them. Files stay readable after the sandbox broke.
    """

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        """Run a shell line in the work directory. Its time is the wall's, or that of `clock`.

        Raises:
            SandboxError: The host failed, not the command.
        """

    def python(self, program: str, timeout_s: float) -> CommandResult:
        """Run a Python program in the work directory, isolated as by ``python3 -I``.

        Raises:
            SandboxError: The host failed, not the program.
        """

    def read(self, path: str) -> bytes:
        """Content of a regular file, relative to the work directory. Starts nothing in the sandbox.

        Raises:
            OSError: No such regular file, too large, or reached through a link or ``..``.
        """

    def write(self, path: str, data: bytes) -> None:
        """Put a regular file, making its folders. Starts nothing in the sandbox.

        Raises:
            OSError: Disk full, or the path is a folder, or leads through a link or ``..``.
        """

    def listen(self, port: int) -> socket.socket:
        """A socket that listens on 127.0.0.1 of the sandbox's own network; only this host can accept there.

        Where that network is the host's own, any free port is taken.

        Raises:
            SandboxError: It could not be made. Ask before the agent acts, or the policy holds the port.
        """

    def entries(self, folder: str) -> dict[str, TreeEntry]:
        """What a folder below the work directory holds; the empty name is the work directory's.

        Raises:
            OSError: No such folder, closed, behind a link or ``..``, or more than a sandbox gives out.
        """

    def target(self, path: str) -> str:
        """What a link points to, as it is written in it.

        Raises:
            OSError: No such link, or reached through another one or ``..``.
        """

    def paths(self) -> list[str]:
        """Every regular file below the work directory, sorted; links are not followed.

        Raises:
            OSError: More files than a sandbox gives out.
        """


@runtime_checkable
class Sandboxes(Protocol):
    """The plugin: opens sandboxes."""

    def check(self) -> None:
        """Raise ConfigError, with the remedy, when this machine cannot open sandboxes."""

    def open(self, task: Task) -> AbstractContextManager[Sandbox]:
        """A fresh sandbox of the task's image with the task's files in its work directory.

        Raises:
            SandboxError: It did not start.
        """
