"""Run commands as plain subprocesses in a temporary folder, without any isolation.

This serves machines without Apptainer, and tests of everything else. The policy's code runs as your user.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from hpc_swe.errors import SandboxError, boundary
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.sandboxes._output import collected
from hpc_swe.plugins.sandboxes._tree import Tree
from hpc_swe.plugins.sandboxes.base import Clock, CommandResult, Sandbox
from hpc_swe.records import Task

MARK = "HPC_SWE_SANDBOX"
"""Environment variable of all its processes; a process shows the environment with which it began."""
CLOCK_CHECK_S = 0.2
"""Seconds between two readings of a clock other than wall time."""

log = logging.getLogger(__name__)


class Process(Plugin, frozen=True, kw_only=True):
    """Provide no isolation: the work directory is a temporary folder, and the task's image is ignored."""

    scratch: str = ""
    """Folder for work directories; empty means the system's."""
    output_bytes: int = 64_000
    """Bytes of a command's output that are kept."""
    read_bytes: int = 1_000_000
    """Bytes of a file that are read."""

    def check(self) -> None:
        """Accept every machine, and warn once."""
        _warn()

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        """Open a fresh folder with the task's files; `Task.absent` removes nothing from this machine."""
        _warn()
        with tempfile.TemporaryDirectory(
            prefix="hpc_swe.", dir=self.scratch or None, ignore_cleanup_errors=True
        ) as name:
            folder = Path(name)
            tree = Tree(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), self.read_bytes)
            try:
                with boundary(SandboxError, f"lay out the files of {task.task_id}"):
                    for path, text in task.files.items():
                        tree.write(path, text.encode())
                yield _Folder(folder, tree, self.output_bytes)
            finally:
                tree.close()


class _Folder:
    def __init__(self, folder: Path, tree: Tree, output_bytes: int) -> None:
        self._folder = folder
        self._output_bytes = output_bytes
        self.read = tree.read
        self.write = tree.write
        self.paths = tree.paths
        self.entries = tree.entries
        self.target = tree.target

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        return self._run(
            ["bash", "--noprofile", "--norc", "-c", command], "", timeout_s, clock or time.monotonic
        )

    def python(self, program: str, timeout_s: float) -> CommandResult:
        return self._run([sys.executable, "-I", "-"], program, timeout_s, time.monotonic)

    def listen(self, port: int) -> socket.socket:
        with boundary(SandboxError, "listen on a free port"):
            return socket.create_server(("127.0.0.1", 0))

    def _run(
        self, command: Sequence[str], standard_input: str, timeout_s: float, clock: Clock
    ) -> CommandResult:
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        environment = {
            "PATH": path,
            "HOME": str(self._folder),
            MARK: str(self._folder),
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
            source.write(standard_input.encode())
            source.seek(0)
            with boundary(SandboxError, f"start {command[0]}"):
                process = subprocess.Popen(
                    command,
                    cwd=self._folder,
                    env=environment,
                    stdin=source.fileno(),
                    stdout=output.fileno(),
                    stderr=output.fileno(),
                    start_new_session=True,
                )
            timed_out, code = False, None
            try:
                deadline = clock() + timeout_s
                while code is None and not (timed_out := clock() >= deadline):
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(max(min(deadline - clock(), CLOCK_CHECK_S), 0.0))
            finally:
                _kill_all(self._folder)
                process.wait()
            code = 137 if code is None else code
            text = collected(output.fileno(), self._output_bytes)
        return CommandResult(exit_code=code if code >= 0 else 128 - code, output=text, timed_out=timed_out)


def _kill_all(folder: Path) -> None:
    """Kill all processes of a sandbox, daemons in other sessions too: their environment names the folder."""
    mark = f"{MARK}={folder}\0".encode()
    passes = 2  # a process that is just executing a program shows an empty environment
    for _ in range(100):
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile, or is another user's
                if mark in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        passes = 2 if found else passes - 1
        if not passes:
            return
        time.sleep(0.01)


@cache
def _warn() -> None:
    log.warning("unisolated: sandbox type 'process' runs the policy's code as this user, with no isolation")
