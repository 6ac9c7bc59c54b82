"""Control a container and the sandboxes in it from the host; `_inside/container.py` runs inside."""

import errno
import fcntl
import json
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec
from msgspec import Struct

from hpc_swe.agents.sandboxes import _inside
from hpc_swe.agents.sandboxes._deadline import answer, own_time
from hpc_swe.agents.sandboxes._exchange import (
    OUTPUT_BYTES,
    PipedProgram,
    collected,
    output_file,
    passed_on,
    pipes,
)
from hpc_swe.agents.sandboxes._inside.descriptors import send_files
from hpc_swe.agents.sandboxes._tree import Tree
from hpc_swe.agents.sandboxes.base import INTERRUPT, NICE, Clock, CommandResult, ProgramSession, SessionEnded
from hpc_swe.base.errors import SandboxError
from hpc_swe.cluster.processes import descendants, start_time

log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

PROGRAM = _inside.joined("descriptors", "kernel", "processes", "program", "container").encode()
"""What runs in a container."""
# The interpreter starts again with the image's own environment, without the variables that Apptainer adds or
# lets through from the host: a process cannot remove from /proc those with which it was started.
BOOTSTRAP = """
import os, sys
added = ("APPTAINER", "SINGULARITY", "PROMPT_COMMAND", "LD_LIBRARY_PATH", "PS1", "PWD", "OLDPWD", "USER_PATH")
kept = {n: v for n, v in os.environ.items() if not n.startswith(added) and not n.lower().endswith("_proxy")}
serve = "import socket; s = socket.socket(fileno=0); p = s.recv(1 << 17).decode(); s.detach(); exec(p)"
os.execve(sys.executable, [sys.executable, "-I", "-c", serve], kept)
"""
GRACE_S = 15.0
"""Seconds in which process 1 must answer a request, and have ended a command."""
ENDING_S = 3.0
"""Seconds to wait for a container's end after one of its sandboxes ended."""
_FUSE_ERRORS = (errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE, errno.EIO)
"""Errors of files whose FUSE daemon has ended; they come a moment before its end can be seen."""
_PASSED_INSIDE = ("APPTAINERENV_", "SINGULARITYENV_")
"""Prefixes of host variables that Apptainer would set inside."""
GONE = CommandResult(exit_code=137, output="The sandbox is gone.", broke_sandbox=True)


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bound what one sandbox may use."""

    processes: int = 128
    """Processes and threads; all of them may be busy, so allow no more than are needed."""
    threads: int = 1
    """Threads that a numerical library starts in each process (OMP_NUM_THREADS and its like), for agents and
    graders; 0 leaves what the image says, which usually is one for each core of the node."""
    file_mb: int = 64
    """Largest single file, command output included."""
    address_space_mb: int = 4096
    """Address space of one process."""
    memory_mb: int = 8192
    """Memory of all processes together, with what the kernel keeps for them, checked four times a second; a
    command that uses more is killed."""
    disk_mb: int = 512
    """All written files together; they take memory of the job."""


class Container:
    """Run a container that opens sandboxes. It ends when the host's end of its socket closes."""

    def __init__(
        self, command: Sequence[str], limits: Limits, warm_up: str, timeout_s: float, mounts: Sequence[str]
    ) -> None:
        """Start the container by a command of the image's interpreter, and wait until it opens sandboxes.

        Its sandboxes see `mounts` too, which are paths in it. It raises SandboxError after `timeout_s`.
        """
        self._limits = limits
        self._start_timeout_s = timeout_s
        self._sending = threading.Lock()
        self._outside: dict[int, str | None] = {}
        self._prepared = {""}
        self._errors = output_file()
        self._channel, container_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for opened in (self._errors, self._channel):  # needed after `close` too, by the container's sandboxes
            weakref.finalize(self, opened.close)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_PASSED_INSIDE)}
        with container_end:
            self._process = subprocess.Popen(
                [*command, "-I", "-c", BOOTSTRAP],
                env=kept,
                stdin=container_end.fileno(),
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,
            )
        settings = msgspec.structs.asdict(limits) | {"nice": NICE, "warm_up": warm_up, "mounts": list(mounts)}
        self._channel.settimeout(timeout_s)
        try:
            self._channel.send(PROGRAM)
            self._channel.send(json.dumps(settings).encode())
            up = self._channel.recv(16)
        except OSError as error:
            up = str(error).encode()
        if up != b"up":
            self.close(min(GRACE_S, timeout_s))
            raise SandboxError(f"the container did not start: {self.last_output() or up.decode()}")
        self._outside = _outside(self._process.pid)

    @property
    def is_alive(self) -> bool:
        """Return whether it can open sandboxes. Without its FUSE daemon it runs, but can read nothing."""
        return self._process.poll() is None and len(self._outside_left()) == len(self._outside)

    def require_alive(self, wait_s: float = 0.0) -> None:
        """Raise SandboxError when the container has ended, so that its sandboxes are not to blame.

        A sandbox ends a moment before the end of its container can be seen, so after that a wait is needed.
        """
        if _is_readable(self._channel, wait_s) or not self.is_alive:
            raise SandboxError(f"the container ended under its sandboxes: {self.last_output()}")

    def last_output(self) -> str:
        """Return the end of what Apptainer and the container's program printed."""
        return collected(self._errors.fileno(), 2000).strip()

    @contextmanager
    def open(self, workdir: str) -> "Iterator[Session]":
        """Open a fresh sandbox; at exit it ends with all its processes."""
        host_end, sandbox_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host_end.settimeout(self._start_timeout_s)
        with ExitStack() as stack:
            stack.enter_context(host_end)
            try:
                with sandbox_end, self._sending:
                    send_files(self._channel, workdir.encode(), [sandbox_end.fileno()])
                process = _expect(host_end, b"process")
                stack.callback(os.close, process)
                stack.callback(_kill, process)
                folder = _expect(host_end, b"ready")
            except OSError as error:
                raise SandboxError(f"no sandbox: {error}; container: {self.last_output()}") from error
            tree = Tree(folder)
            stack.callback(tree.close)
            yield Session(self, host_end, process, tree, self._limits)

    def prepare(self, prelude: str) -> None:
        """Have the container run a prelude, once; sandboxes that are opened from now on begin with that."""
        with self._sending:
            if prelude not in self._prepared:
                with _memory(prelude.encode()) as text, suppress(OSError):  # then the program itself runs it
                    send_files(self._channel, b"prelude", [text])
                    self._prepared.add(prelude)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the container and wait for it. Its sandboxes end too, and find out by `require_alive`."""
        with suppress(OSError):  # it may be closed already, when this interpreter ends
            self._channel.shutdown(socket.SHUT_RDWR)
        if not self._has_ended(grace_s):
            self._outside = self._outside | _outside(self._process.pid)  # not in place: other threads read it
            end_namespace(self._process.pid)
            self._has_ended(grace_s)
        for pid in self._outside_left():  # when Apptainer itself was killed, or hangs
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self._has_ended(grace_s):
            # Its sandboxes have ended, so their results stand, whatever the kernel cannot end.
            log.warning("stuck: a container does not end, though it was killed")

    def _has_ended(self, wait_s: float) -> bool:
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _outside_left(self) -> list[int]:
        return [pid for pid, born in self._outside.items() if start_time(pid) == born]


class Session:
    """Run commands in one sandbox of a container, and exchange files with it, as `Sandbox` describes."""

    def __init__(
        self, container: Container, host: socket.socket, process: int, tree: Tree, limits: Limits
    ) -> None:
        """Take the socket and the pidfd of process 1, which the caller closes."""
        self._container = container
        self._host = host
        self._process = process
        self._limits = limits
        self._is_broken = False
        self.read = self._attributed(tree.read)
        self.write = self._attributed(tree.write)
        self.paths = self._attributed(tree.paths)
        self.entries = self._attributed(tree.entries)
        self.target = self._attributed(tree.target)

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        return self._execute("shell", command, timeout_s, clock or time.monotonic)

    def python(
        self, program: str, timeout_s: float, longest_s: float = 0.0, prelude: str = ""
    ) -> CommandResult:
        """Run a Python program in a fork of the warm interpreter."""
        self._container.prepare(prelude)
        clock = own_time(self._process, timeout_s, max(timeout_s, longest_s))
        return self._execute("python", f"{prelude}\0{program}", timeout_s, clock)

    def listen(self, port: int) -> socket.socket:
        """Return a listening socket that process 1 makes and passes to the host."""
        try:
            self._host.settimeout(GRACE_S)
            self._host.send(json.dumps({"kind": "listen", "port": port}).encode())
            return socket.socket(fileno=_expect(self._host, b"listening"))
        except OSError as error:
            raise SandboxError(f"cannot listen on port {port} of the sandbox: {error}") from error

    @contextmanager
    def session(self, program: str, python: str = "") -> Iterator[ProgramSession]:
        """Run a program that outlives commands; process 1 stops its processes between messages."""
        if self._is_broken:
            raise SessionEnded(GONE.output, broke_sandbox=True)
        with pipes() as made, _memory(program.encode()) as source, _memory(b"") as output:
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
            request = json.dumps({"kind": "session", "python": python}).encode()
            with passed_on(made) as ends:
                self._start_session(request, [source, output, *ends])
            try:
                yield PipedProgram(made, output, OUTPUT_BYTES, self._interrupt, self._running)
            finally:
                self._end_session()

    def _start_session(self, request: bytes, files: list[int]) -> None:
        try:
            self._host.settimeout(GRACE_S)
            self._send(request, files)
            said = self._host.recv(4096)
        except OSError:
            said = b""
        if said != b"session":
            raise SessionEnded(self._broken().output, broke_sandbox=True)

    def _send(self, request: bytes, files: list[int]) -> None:
        """Send a request; raise SandboxError when Linux refuses its files because of other programs."""
        try:
            send_files(self._host, request, files)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                raise SandboxError(f"nothing can be started in a sandbox: {error.strerror}") from None
            raise

    def _interrupt(self) -> None:
        with suppress(OSError):  # the next wait for an answer says why
            self._host.send(json.dumps({"kind": "interrupt", "signal": INTERRUPT}).encode())

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Let a session's processes run; at exit they are stopped before any later request is carried out."""
        try:
            self._host.send(b'{"kind": "resume"}')
            try:
                yield
            finally:
                self._host.send(b'{"kind": "pause"}')
        except TimeoutError:
            raise
        except (OSError, SessionEnded) as error:
            self._end_session()  # which tells a program that ended from a sandbox that did
            raise SessionEnded(str(error), self._is_broken) from None

    def _end_session(self) -> None:
        """End all processes of a session, and find out whether the sandbox itself has ended."""
        if self._is_broken:
            return
        try:
            self._host.settimeout(GRACE_S)
            self._host.send(b'{"kind": "end"}')
            said = self._host.recv(4096)
        except OSError:
            said = b""
        if said != b"ended":
            self._broken()

    def _execute(self, kind: str, program: str, timeout_s: float, clock: Clock) -> CommandResult:
        if self._is_broken:
            return GONE
        with _memory(program.encode()) as source, _memory(b"") as output:
            try:
                self._host.settimeout(GRACE_S)
                self._send(json.dumps({"kind": kind}).encode(), [source, output])
                if (said := answer(self._host, timeout_s, clock)) is None:
                    self._host.settimeout(GRACE_S)
                    self._host.send(b"stop")
                    said = self._host.recv(4096)
            except OSError:
                said = b""
            if not said.startswith(b"{"):  # no answer, or the error of process 1
                return self._broken()
            text = collected(output, OUTPUT_BYTES, self._limits.file_mb)
            result = CommandResult(output=text, **json.loads(said))
            self._container.require_alive()  # a command that finds no files any more may still exit with 0
            return result

    def _attributed(self, access: Callable[_P, _T]) -> Callable[_P, _T]:
        """Attribute an OSError of `access` to the policy only while the container is alive."""

        def attributed(*arguments: _P.args, **named: _P.kwargs) -> _T:
            try:
                return access(*arguments, **named)
            except OSError as error:
                self._container.require_alive(ENDING_S if error.errno in _FUSE_ERRORS else 0.0)
                raise

        return attributed

    def _broken(self) -> CommandResult:
        """End a sandbox that does not answer any more; raise SandboxError if its container has ended."""
        self._is_broken = True
        _kill(self._process)
        self._container.require_alive(ENDING_S)
        return GONE


def end_namespace(ancestor: int) -> None:
    """Kill process 1 of each namespace below `ancestor`: Apptainer then ends its FUSE daemons, and itself."""
    for child in descendants(ancestor):
        pids = namespace_pids(child)
        if len(pids) == 2 and pids[-1] == "1":
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _outside(process: int) -> dict[int, str | None]:
    """Return the start times of a process and of its descendants outside containers, such as FUSE daemons."""
    pids = [process, *(child for child in descendants(process) if len(namespace_pids(child)) == 1)]
    return {pid: start_time(pid) for pid in pids}


def namespace_pids(process: int) -> list[str]:
    """Return a process's pid in each of its process namespaces, the host's first; empty when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_bytes().split(b"\n")  # a process's name may hold b"\r"
    except OSError:
        return []
    return next(line for line in lines if line.startswith(b"NSpid:")).decode().split()[1:]


@contextmanager
def _memory(content: bytes) -> Iterator[int]:
    """Open an anonymous file in memory: it has no name under which a link could be planted."""
    file = os.memfd_create("sandbox")
    try:
        os.pwrite(file, content, 0)
        yield file
    finally:
        os.close(file)


def _expect(sender: socket.socket, what: bytes) -> int:
    message, received, _, _ = socket.recv_fds(sender, 4096, 1)
    if message != what:
        raise OSError(f"expected {what.decode()}, got {message.decode(errors='replace') or 'the end'}")
    return received[0]


def _kill(process: int) -> None:
    """Kill process 1 by its pidfd and wait: its end shows only after that of all others in its namespace."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    _is_readable(process, GRACE_S)


def _is_readable(file: socket.socket | int, wait_s: float) -> bool:
    """Return whether data or an end is there in time. Unlike select, poll has no largest file number."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))
