"""Start commands of `process` sandboxes in forks of one warm interpreter; `_inside/forks.py` runs in it.

Starting an interpreter and loading pytest takes ten times the processor time of a fork, and a fork of this
process could not leave its threads behind. So each process keeps one interpreter, which ends with it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hpc_swe.agents.sandboxes import _inside
from hpc_swe.agents.sandboxes._exchange import collected, output_file
from hpc_swe.agents.sandboxes._inside.descriptors import send_files
from hpc_swe.agents.sandboxes._inside.program import thread_variables
from hpc_swe.agents.sandboxes.base import NICE
from hpc_swe.base.errors import SandboxError
from hpc_swe.cluster.processes import kill_and_wait

_PROGRAM = _inside.joined("descriptors", "program", "forks")
_START_S = 120.0
_TRIALS = 2
_REFUSED_S = 1.0
"""Pause after a command was refused for want of room for a process."""
_ROOM = {"HPC_SWE_ROOM": " " * 8192}
"""Room for the variables of a sandbox's commands where /proc shows those of a process."""

_interpreters: dict[int, "_Interpreter"] = {}
"""By the number of this process: a fork of it has an interpreter of its own."""
_lock = threading.Lock()


@dataclass(frozen=True)
class Command:
    """Describe a command of a sandbox."""

    kind: str
    """``shell`` or ``python``."""
    folder: str
    environment: dict[str, str]
    python: str = ""
    """Path of another interpreter for the program; it starts anew, and has loaded nothing."""

    @contextmanager
    def running(self, *files: int) -> Iterator[tuple[socket.socket, int, int]]:
        """Start the command; return its socket and pidfds of its reaper and of its first process.

        The socket gives the exit code as text, and nothing when the command's reaper was killed. Any message
        to it ends the command with all its processes, and so does its end. The files are open: the text of
        the command, its output, and what else is passed to a Python program, whose arguments are the numbers.
        Raise SandboxError if it could not be started.
        """
        host, reaper, first = self._start(files)
        try:
            yield host, reaper, first
        finally:
            host.close()
            with suppress(ProcessLookupError):  # it ends with its socket, but the command may have stopped it
                signal.pidfd_send_signal(reaper, signal.SIGCONT)
            os.close(reaper)
            os.close(first)

    def _start(self, given: Sequence[int]) -> tuple[socket.socket, int, int]:
        """Return the command's socket, and pidfds of its reaper and its first process."""
        request = json.dumps(vars(self) | {"nice": NICE})
        trials = 0
        while trials < _TRIALS:  # an interpreter that has ended is replaced
            host, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            host.settimeout(_START_S)
            interpreter = _running()
            with inner, suppress(OSError):
                interpreter.send(request.encode(), [inner.fileno(), *given])
            answer = b""
            with suppress(OSError):
                answer, files, _, _ = socket.recv_fds(host, 256, 2)
                if len(files) == 2:
                    return host, files[0], files[1]
            host.close()
            if answer:  # there is no room for a process, which other commands may leave soon
                trials += 1
                time.sleep(_REFUSED_S)
            else:
                trials += _close(interpreter)
        why = answer.decode() or interpreter.last_output()
        raise SandboxError(f"a command could not be started: {why}")


def prepare(prelude: str) -> None:
    """Have the interpreter run a prelude, once; the commands that start from now on begin with that."""
    interpreter = _running()
    with _lock:
        if prelude not in interpreter.prepared:
            with tempfile.TemporaryFile() as file, suppress(OSError):  # then the program itself runs it
                os.pwrite(file.fileno(), prelude.encode(), 0)
                interpreter.send(b"prelude", [file.fileno()])
                interpreter.prepared.add(prelude)


class _Interpreter:
    """Own a warm interpreter, which ends when this end of its socket closes."""

    def __init__(self) -> None:
        self.prepared = {""}
        self._errors = output_file()
        self._channel, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for opened in (self._errors, self._channel):
            weakref.finalize(self, opened.close)
        with inner:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM],
                cwd="/",
                env={"LANG": "C.UTF-8", "PATH": os.defpath, **thread_variables(1), **_ROOM},
                stdin=inner.fileno(),
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,
            )
        self._channel.settimeout(_START_S)

    def send(self, request: bytes, files: list[int]) -> None:
        send_files(self._channel, request, files)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def require_up(self) -> None:
        """Wait until it has loaded what it needs; raise SandboxError if it has ended."""
        try:
            up = self._channel.recv(16)
        except OSError as error:
            up = str(error).encode()
        if up != b"up":
            self.close()
            raise SandboxError(f"the interpreter did not start: {self.last_output() or up.decode()}")

    def last_output(self) -> str:
        return collected(self._errors.fileno(), 2000).strip()

    def close(self) -> None:
        """End it; commands that it has started go on."""
        kill_and_wait(self._process)


def _close(interpreter: _Interpreter) -> bool:
    """End an interpreter that could not start a command; return False if another thread had done so."""
    with _lock:
        if _interpreters.get(os.getpid()) is not interpreter:
            return False
        del _interpreters[os.getpid()]
        interpreter.close()
        return True


def _running() -> _Interpreter:
    """Return the interpreter of this process; start one if there is none that is alive."""
    with _lock:
        found = _interpreters.get(os.getpid())
        if found is None or not found.is_alive:
            found = _Interpreter()
            found.require_up()
            _interpreters[os.getpid()] = found
        return found
