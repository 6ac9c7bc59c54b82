"""Sandboxes that are no sandboxes: a temporary folder and plain subprocesses.

For machines without Apptainer and for tests of everything else. What runs here runs as you.
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
"""What the environment of all its processes holds, whatever else they change in it."""
LOOK_S = 0.2
"""How often another clock than the wall's is looked at."""

log = logging.getLogger(__name__)


class Process(Plugin, frozen=True, kw_only=True):
    """No isolation at all; the task's work directory is a temporary folder, its image is ignored."""

    scratch: str = ""
    """Folder for work directories; empty means the system's."""
    output_bytes: int = 64_000
    """Bytes of a command's output that are kept."""
    read_bytes: int = 1_000_000
    """Bytes of a file that are read."""

    def check(self) -> None:
        """Every machine can do this."""
        _warn()

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        """A fresh folder with the task's files."""
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
                until = clock() + timeout_s
                while code is None and not (timed_out := clock() >= until):
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(max(min(until - clock(), LOOK_S), 0.0))
            finally:
                _end_all(self._folder)
                process.wait()
            code = 137 if code is None else code
            text = collected(output.fileno(), self._output_bytes)
        return CommandResult(exit_code=code if code >= 0 else 128 - code, output=text, timed_out=timed_out)


def _end_all(folder: Path) -> None:
    """End what a sandbox started, daemons of their own session too: the environment names the folder."""
    mark = f"{MARK}={folder}\0".encode()
    looks = 2  # one that is just executing a program shows an empty environment
    for _ in range(100):
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile, or is another user's
                if mark in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        looks = 2 if found else looks - 1
        if not looks:
            return
        time.sleep(0.01)


@cache
def _warn() -> None:
    log.warning("unisolated: sandbox type 'process' runs the policy's code as this user, with no isolation")
