"""The host's end of a container and of the sandboxes in it; `_container.py` is the other end."""

import contextlib
import errno
import json
import logging
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from msgspec import Struct

from hpc_swe.errors import SandboxError
from hpc_swe.plugins.sandboxes._output import collected
from hpc_swe.plugins.sandboxes._tree import Tree
from hpc_swe.plugins.sandboxes.base import Clock, CommandResult, TreeEntry
from hpc_swe.processes import descendants, start_time

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("_container.py")
# The interpreter begins anew with the image's own environment, without what Apptainer adds or lets through
# from the host: what a process began with stays to be read below /proc, whatever it deletes.
BOOTSTRAP = """
import os, sys
ours = ("APPTAINER", "SINGULARITY", "PROMPT_COMMAND", "LD_LIBRARY_PATH", "PS1", "PWD", "OLDPWD", "USER_PATH")
kept = {n: v for n, v in os.environ.items() if not n.startswith(ours) and not n.lower().endswith("_proxy")}
serve = "import socket; s = socket.socket(fileno=0); p = s.recv(1 << 17).decode(); s.detach(); exec(p)"
os.execve(sys.executable, [sys.executable, "-I", "-c", serve], kept)
"""
GRACE_S = 15.0
"""A command's time limit is kept inside the sandbox; this much later the host keeps it."""
LOOK_S = 0.2
"""How often another clock than the wall's is looked at."""
ENDING_S = 3.0
_OF_DAEMON = (errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE, errno.EIO)
"""What files answer whose FUSE daemon has ended, which they do a moment before it is seen to."""
_PASSED_ON = ("APPTAINERENV_", "SINGULARITYENV_")
"""Variables of the host that Apptainer would set inside."""
GONE = CommandResult(exit_code=137, output="The sandbox is gone.", broke_sandbox=True)


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one sandbox may use."""

    processes: int = 128
    """Threads count, too: libraries that start one for each core of a large node need about that many. All of
    them may spin, so no more than is needed."""
    file_mb: int = 64
    """Largest single file, command output included."""
    address_space_mb: int = 4096
    """Of one process."""
    memory_mb: int = 8192
    """Of all processes together, looked at four times a second; a command that uses more is killed."""
    nice: int = 10
    """Added to that of every process, so that hosts of sandboxes, engines and learners come first."""
    disk_mb: int = 512
    """Everything written; it is memory of the job."""
    output_bytes: int = 64_000
    """What a command's result carries."""
    read_bytes: int = 1_000_000
    """Largest file given out."""


class Container:
    """A running container that opens sandboxes. Its life hangs on our end of one socket."""

    def __init__(
        self,
        command: Sequence[str],
        limits: Limits,
        warm_up: str,
        start_timeout_s: float,
        mounts: Sequence[str] = (),
    ) -> None:
        """`mounts` are paths in the container that its sandboxes see too."""
        self._limits = limits
        self._start_timeout_s = start_timeout_s
        self._sending = threading.Lock()
        self._outside: dict[int, str | None] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the container)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*command, "-I", "-c", BOOTSTRAP],
                env={name: value for name, value in os.environ.items() if not name.startswith(_PASSED_ON)},
                stdin=theirs.fileno(),
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,
            )
        settings = {name: getattr(limits, name) for name in limits.__struct_fields__}
        settings |= {"warm_up": warm_up, "mounts": list(mounts)}
        self._channel.settimeout(start_timeout_s)
        try:
            self._channel.send(PROGRAM.read_bytes())
            self._channel.send(json.dumps(settings).encode())
            up = self._channel.recv(16)
        except OSError as error:
            up = str(error).encode()
        if up != b"up":
            self.close(min(GRACE_S, start_timeout_s))
            raise SandboxError(f"the container did not start: {self.complaint() or up.decode()}")
        self._outside = _outside(self._process.pid)

    @property
    def is_alive(self) -> bool:
        """Whether it can open sandboxes. Without its FUSE daemon it runs, and can read nothing."""
        return self._process.poll() is None and len(self._outside_left()) == len(self._outside)

    def must_live(self, wait_s: float = 0.0) -> None:
        """Raise SandboxError when what a sandbox did or did not do is not its own doing.

        A sandbox ends a moment before its container is seen to, so one that ended is worth a wait.
        """
        if _is_readable(self._channel, wait_s) or not self.is_alive:
            raise SandboxError(f"the container ended under its sandboxes: {self.complaint()}")

    def complaint(self) -> str:
        """The end of what Apptainer and the container's program printed."""
        return collected(self._errors.fileno(), 2000).strip()

    @contextmanager
    def open(self, workdir: str) -> "Iterator[Session]":
        """A fresh sandbox, ended with everything in it at exit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(self._start_timeout_s)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ours)
            try:
                with theirs, self._sending:
                    socket.send_fds(self._channel, [workdir.encode()], [theirs.fileno()])
                process = _expect(ours, b"process")
                stack.callback(_end, process)
                folder = _expect(ours, b"ready")
            except OSError as error:
                raise SandboxError(f"no sandbox: {error}; container: {self.complaint()}") from error
            tree = Tree(folder, self._limits.read_bytes)
            stack.callback(tree.close)
            yield Session(self, ours, tree, self._limits.output_bytes)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End it and wait for it; its sandboxes end with it, and are told so by `must_live`."""
        with contextlib.suppress(OSError):  # when this interpreter ends, it may be closed already
            self._channel.shutdown(socket.SHUT_RDWR)
        if not self._has_ended(grace_s):
            self._outside = self._outside | _outside(self._process.pid)  # not in place: others read it
            end_namespace(self._process.pid)
            self._has_ended(grace_s)
        for pid in self._outside_left():  # when Apptainer itself was killed, or hangs
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self._has_ended(grace_s):
            # Its sandboxes are gone, and what they found is not lost for what the kernel cannot end.
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
    """One sandbox of a container."""

    def __init__(self, container: Container, host: socket.socket, tree: Tree, output_bytes: int) -> None:
        self._container = container
        self._host = host
        self._output_bytes = output_bytes
        self._tree = tree
        self._is_broken = False

    def read(self, path: str) -> bytes:
        """Content of a regular file."""
        with self._attributed():
            return self._tree.read(path)

    def write(self, path: str, data: bytes) -> None:
        """Put a file under its name at once."""
        with self._attributed():
            self._tree.write(path, data)

    def paths(self) -> list[str]:
        """Every regular file, sorted."""
        with self._attributed():
            return self._tree.paths()

    def entries(self, folder: str) -> dict[str, TreeEntry]:
        """What a folder holds."""
        with self._attributed():
            return self._tree.entries(folder)

    def target(self, path: str) -> str:
        """What a link points to."""
        with self._attributed():
            return self._tree.target(path)

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        """Run a shell line in the work directory."""
        return self._ask("shell", command, timeout_s, clock)

    def python(self, program: str, timeout_s: float) -> CommandResult:
        """Run a Python program in a fork of the warm interpreter."""
        return self._ask("python", program, timeout_s, None)

    def listen(self, port: int) -> socket.socket:
        """Process 1 makes the socket and hands it over."""
        try:
            self._host.settimeout(GRACE_S)
            self._host.send(json.dumps({"kind": "listen", "port": port}).encode())
            return socket.socket(fileno=_expect(self._host, b"listening"))
        except OSError as error:
            raise SandboxError(f"cannot listen on port {port} of the sandbox: {error}") from error

    def _ask(
        self, kind: Literal["shell", "python"], program: str, timeout_s: float, clock: Clock | None
    ) -> CommandResult:
        if self._is_broken:
            return GONE
        with _memory(program.encode()) as source, _memory(b"") as output:
            try:
                self._host.settimeout(timeout_s + GRACE_S)
                request = json.dumps({"kind": kind, "timeout_s": None if clock else timeout_s}).encode()
                socket.send_fds(self._host, [request], [source, output])
                answer = self._await(timeout_s, clock) if clock else self._host.recv(4096)
            except OSError:
                answer = b""
            if not answer.startswith(b"{"):  # nothing, or what its first process failed of
                return self._broken()
            result = CommandResult(output=collected(output, self._output_bytes), **json.loads(answer))
            self._container.must_live()  # "nothing found" ends with 0 as well
            return result

    def _await(self, timeout_s: float, clock: Clock) -> bytes:
        """The answer to a command whose time is up when `clock` says so."""
        until = clock() + timeout_s
        while (left_s := until - clock()) > 0:
            self._host.settimeout(min(left_s, LOOK_S))
            with contextlib.suppress(TimeoutError):
                return self._host.recv(4096)
        self._host.settimeout(GRACE_S)
        self._host.send(b"stop")
        return self._host.recv(4096)

    @contextmanager
    def _attributed(self) -> Iterator[None]:
        """An OSError is the policy's doing only while the container lives."""
        try:
            yield
        except OSError as error:
            self._container.must_live(ENDING_S if error.errno in _OF_DAEMON else 0.0)
            raise

    def _broken(self) -> CommandResult:
        self._is_broken = True
        self._container.must_live(ENDING_S)
        return GONE


def end_namespace(ancestor: int) -> None:
    """SIGKILL process 1 of every process namespace that begins below `ancestor`.

    Killing Apptainer itself would leave its FUSE daemons behind; this way it sees its payload end.
    """
    for child in descendants(ancestor):
        numbers = _numbers(child)
        if len(numbers) == 2 and numbers[-1] == "1":
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _outside(process: int) -> dict[int, str | None]:
    """It, and what of its descendants is in no process namespace of its own: FUSE daemons; and since when."""
    pids = [process, *(child for child in descendants(process) if len(_numbers(child)) == 1)]
    return {pid: start_time(pid) for pid in pids}


def _numbers(process: int) -> list[str]:
    """A process's number in each namespace that it is in, the host's first."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return next(line for line in lines if line.startswith("NSpid:")).split()[1:]


@contextmanager
def _memory(content: bytes) -> Iterator[int]:
    """An anonymous file: nothing on disk, no name to plant a link under."""
    file = os.memfd_create("sandbox")
    try:
        os.pwrite(file, content, 0)
        yield file
    finally:
        os.close(file)


def _expect(sender: socket.socket, what: bytes) -> int:
    message, received, _, _ = socket.recv_fds(sender, 4096, 1)
    if message != what:
        raise OSError(f"awaited {what.decode()}, got {message.decode(errors='replace') or 'the end'}")
    return received[0]


def _end(process: int) -> None:
    """Process 1 is reported gone only after all others of its namespace."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    _is_readable(process, GRACE_S)
    os.close(process)


def _is_readable(file: socket.socket | int, wait_s: float) -> bool:
    """Unlike select, poll knows no highest number of a file."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))
