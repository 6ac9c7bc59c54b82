"""Run commands as plain subprocesses in a temporary folder, without any isolation.

This serves machines without Apptainer, and tests of everything else. The policy's code runs as your user.
"""

import fcntl
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, ClassVar

from hpc_swe.agents.sandboxes._deadline import answer, own_time
from hpc_swe.agents.sandboxes._exchange import OUTPUT_BYTES, PipedProgram, collected, passed_on, pipes
from hpc_swe.agents.sandboxes._inside.program import thread_variables
from hpc_swe.agents.sandboxes._interpreter import Command, prepare
from hpc_swe.agents.sandboxes._tree import Tree
from hpc_swe.agents.sandboxes.base import (
    INTERRUPT,
    Clock,
    CommandResult,
    ProgramSession,
    Sandbox,
    Sandboxes,
    add_files,
)
from hpc_swe.base.errors import SandboxError, boundary
from hpc_swe.base.loader import Plugin
from hpc_swe.base.records import Task

MARK = "HPC_SWE_SANDBOX"
"""Environment variable of all its processes; a process shows the environment with which it began."""
SESSION_MARK = "HPC_SWE_SESSION"
"""Environment variable of a session's processes, which go on when a command ends."""
STOP_S = 15.0
"""Seconds in which a command's reaper must end all its processes."""

log = logging.getLogger(__name__)


class Process(Plugin, Sandboxes, frozen=True, kw_only=True):
    """Provide no isolation: the work directory is a temporary folder, and the task's image is ignored."""

    scratch: ClassVar[str | None] = None  # folder for work directories; None is the system's
    threads: ClassVar[int] = 1  # of a numerical library, in each process of agents and graders

    def check(self) -> None:
        """Accept every machine, and warn once."""
        _warn()

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        """Open a fresh folder with the task's files; `Task.absent` removes nothing from this machine."""
        _warn()
        with (
            tempfile.TemporaryDirectory(
                prefix="hpc_swe.", dir=self.scratch, ignore_cleanup_errors=True
            ) as folder,
            closing(_Folder(folder, self)) as sandbox,
        ):
            add_files(sandbox, task.files, f"lay out the files of {task.task_id}")
            yield sandbox


class _Folder(Tree):
    def __init__(self, folder: str, settings: Process) -> None:
        super().__init__(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        self._home = folder
        self._threads = settings.threads

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        return self._run("shell", command, timeout_s, lambda _: clock or time.monotonic)

    def python(
        self, program: str, timeout_s: float, longest_s: float = 0.0, prelude: str = ""
    ) -> CommandResult:
        """Run a Python program in a fork of the warm interpreter."""
        prepare(prelude)
        clock = partial(own_time, timeout_s=timeout_s, longest_s=max(timeout_s, longest_s))
        return self._run("python", f"{prelude}\0{program}", timeout_s, clock)

    @contextmanager
    def session(self, program: str, python: str = "") -> Iterator[ProgramSession]:
        command = Command("python", self._home, self._environment() | {SESSION_MARK: "1"}, python)
        with ExitStack() as life:
            made, source = life.enter_context(pipes()), life.enter_context(_text(program))
            output = life.enter_context(tempfile.TemporaryFile())
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
            with passed_on(made) as ends:
                running = command.running(source.fileno(), output.fileno(), *ends)
                host, _, first = life.enter_context(running)

            def interrupt() -> None:
                with suppress(ProcessLookupError):  # the next wait for an answer says that it has ended
                    signal.pidfd_send_signal(first, INTERRUPT)

            try:
                yield PipedProgram(made, output.fileno(), OUTPUT_BYTES, interrupt)
            finally:
                if not _stop(host):
                    _kill_all(self._home)

    def listen(self, port: int) -> socket.socket:
        with boundary(SandboxError, "listen on a free port"):
            return socket.create_server(("127.0.0.1", 0))

    def _run(self, kind: str, program: str, timeout_s: float, clock: Callable[[int], Clock]) -> CommandResult:
        """Run a command; its clock is made of its reaper's pidfd."""
        command = Command(kind, self._home, self._environment())
        with _text(program) as source, tempfile.TemporaryFile() as output:
            with command.running(source.fileno(), output.fileno()) as (host, reaper, _):
                code = answer(host, timeout_s, clock(reaper))
                if timed_out := code is None:
                    code = _stop(host)
            if not code:  # a process of the sandbox has killed the reaper, or stopped it
                _kill_all(self._home, but=SESSION_MARK)
            text = collected(output.fileno(), OUTPUT_BYTES)
        return CommandResult(137 if timed_out else int(code or 137), text, timed_out=timed_out)

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        about = {"PATH": path, "HOME": self._home, MARK: self._home}
        about |= {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        return about | thread_variables(self._threads)


@contextmanager
def _text(program: str) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as file:
        os.pwrite(file.fileno(), program.encode(), 0)
        yield file


def _stop(host: socket.socket) -> bytes:
    host.settimeout(STOP_S)
    with suppress(OSError):
        host.send(b"stop")
    with suppress(OSError):  # also what it answered before
        return host.recv(16)
    return b""


def _kill_all(folder: str, but: str = "") -> None:
    """Kill all processes of a sandbox, daemons in other sessions too: their environment names the folder.

    Those that have the variable `but` go on.
    """
    mark = f"{MARK}={folder}\0".encode()
    passes = 2  # a process that is just executing a program shows an empty environment
    for _ in range(100):
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile, or is another user's
                variables = (entry / "environ").read_bytes()
                if mark in variables and not (but and but.encode() in variables):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        passes = 2 if found else passes - 1
        if not passes:
            return
        time.sleep(0.01)


@cache
def _warn() -> None:
    log.warning("unisolated: sandbox type 'process' runs the policy's code as this user, with no isolation")
