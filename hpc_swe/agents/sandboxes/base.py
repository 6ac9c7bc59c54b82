"""Define a sandbox: the container in which an episode acts, and its tests run."""

import math
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from hpc_swe.base.errors import ConfigError, NodeError, SandboxError, boundary
from hpc_swe.base.records import Task

FAILURES_BEFORE_CHECK = 8
"""Sandboxes in a row that do not open before the node itself is checked."""
INTERRUPT = signal.SIGRTMIN + 7
"""Signal that asks the program of a session to answer; programs seldom use it for themselves."""
NICE = 10
"""Niceness added to every process of a sandbox, so that workers, engines and learners come first."""
Clock = Callable[[], float]
"""Returns seconds; they may stand still, and infinity ends what is timed."""


class TreeEntry(NamedTuple):
    """Describe one name in a folder of a sandbox."""

    kind: Literal["file", "executable", "link", "folder", "other"]
    size: int
    changed_ns: int

    @property
    def is_file_or_link(self) -> bool:
        """Return whether a patch can hold it."""
        return self.kind in ("file", "executable", "link")


@dataclass(frozen=True)
class CommandResult:
    """Hold how a command in the sandbox ended, and its output."""

    exit_code: int
    output: str
    """Standard output and error, merged; the middle is cut out when they are too long."""
    timed_out: bool = False
    broke_sandbox: bool = False
    """The command ended the sandbox itself. Once the agent has acted, the policy caused this."""
    left_s: float = math.inf
    """Seconds left of a budget when the command began; they bound its time whatever was asked for."""


class SessionEnded(Exception):
    """The program of a session has ended, or does not answer as it must; its session is closed."""

    def __init__(self, why: str, broke_sandbox: bool = False) -> None:
        """Say why, and whether the sandbox itself ended with it."""
        super().__init__(why)
        self.broke_sandbox = broke_sandbox


class ProgramSession(Protocol):
    """Exchange messages with a program that goes on between commands.

    What comes back was written where the policy's code runs: it is an observation, and proves nothing.
    """

    def ask(self, message: bytes, timeout_s: float) -> bytes:
        """Send a message and return the program's answer to it.

        Raise TimeoutError if there was no answer in time: the program goes on, and `wait` may still get it.
        Raise SessionEnded if the program has ended, or its answer is longer than an answer may be, and
        SandboxError if the host failed.
        """

    def wait(self, timeout_s: float) -> bytes:
        """Return the next answer without another message; raises as `ask` does."""

    def interrupt(self) -> None:
        """Send INTERRUPT to the program, which may then answer before it has finished."""

    def printed(self) -> str:
        """Return what was written to standard output and error since the last call; a long middle is cut."""


class Sandbox(Protocol):
    """Run commands and exchange files with one open sandbox.

    Processes end with the command that started them, except those of an open session. After a command broke
    the sandbox all further ones report the same, and files stay readable. Commands raise SandboxError when
    the host failed, and not the command. Methods for files start no process in the sandbox. They raise
    OSError when there is no such file, folder or link below the work directory, no access, or when a link or
    ``..`` leads there.
    """

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        """Run a shell command in the work directory. Its time is wall time, or that of `clock`."""

    def python(
        self, program: str, timeout_s: float, longest_s: float = 0.0, prelude: str = ""
    ) -> CommandResult:
        """Run a Python program in the work directory, isolated as by ``python3 -I``.

        `prelude` runs before it, and the program has its names. A warm interpreter may run it once for all
        programs and sandboxes, outside of these, so no part of it may be a task's or a policy's.

        The time-out is wall time. If `longest_s` is more, the time in which a thread was ready to run and had
        no processor does not count, that of the thread that waited most; after `longest_s` it ends anyway.
        """

    def session(self, program: str, python: str = "") -> AbstractContextManager[ProgramSession]:
        """Run a Python program as ``python -I`` does, until exit; one session may be open at a time.

        The program's arguments are the numbers of two open files: it reads messages from the first and writes
        its answers to the second, each behind its length in four bytes, big end first. Its standard input is
        empty. Between messages all its processes stand still, where the sandbox can stop them. `python` is
        the path of its interpreter in the sandbox; empty means the one of the method `python`. A broken
        sandbox raises SessionEnded.
        """

    def read(self, path: str) -> bytes:
        """Return the content of a regular file; raise OSError, too, if it is too large."""

    def write(self, path: str, data: bytes) -> None:
        """Write a regular file, and make its folders; raise OSError, too, if the disk is full."""

    def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on 127.0.0.1 of the sandbox's network; only this host accepts on it.

        Where the sandbox uses the host's network, the socket takes any free port. Call this before the agent
        acts: the policy could take the port. It raises SandboxError if the socket could not be made.
        """

    def entries(self, folder: str) -> dict[str, TreeEntry]:
        """List a folder by name, "" is the work directory; raise OSError, too, for too many names."""

    def target(self, path: str) -> str:
        """Return the target of a link, as written in it."""

    def paths(self) -> list[str]:
        """List every regular file, sorted, following no link; raise OSError for too many files."""


def add_files(sandbox: Sandbox, files: Mapping[str, str], doing: str) -> None:
    """Write files (path -> text) before any agent acts; a failure is a SandboxError, which says `doing`."""
    with boundary(SandboxError, doing):
        for path, text in files.items():
            sandbox.write(path, text.encode())


@dataclass
class SandboxWrapper(Sandbox):
    """Forward every call to another sandbox; subclasses change some of them."""

    sandbox: Sandbox

    def run(self, command: str, timeout_s: float, clock: Clock | None = None) -> CommandResult:
        return self.sandbox.run(command, timeout_s, clock)

    def python(
        self, program: str, timeout_s: float, longest_s: float = 0.0, prelude: str = ""
    ) -> CommandResult:
        return self.sandbox.python(program, timeout_s, longest_s, prelude)

    def session(self, program: str, python: str = "") -> AbstractContextManager[ProgramSession]:
        return self.sandbox.session(program, python)

    def read(self, path: str) -> bytes:
        return self.sandbox.read(path)

    def write(self, path: str, data: bytes) -> None:
        self.sandbox.write(path, data)

    def listen(self, port: int) -> socket.socket:
        return self.sandbox.listen(port)

    def entries(self, folder: str) -> dict[str, TreeEntry]:
        return self.sandbox.entries(folder)

    def target(self, path: str) -> str:
        return self.sandbox.target(path)

    def paths(self) -> list[str]:
        return self.sandbox.paths()


class Sandboxes(ABC):
    """Open sandboxes for tasks."""

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError, with the remedy, when this machine cannot open sandboxes."""

    @abstractmethod
    def open(self, task: Task) -> AbstractContextManager[Sandbox]:
        """Open a fresh sandbox of a task's image, its files in the work directory, or raise SandboxError."""


class ImageSandboxes(Sandboxes):
    """Open sandboxes from image files of one folder, which `hpc_swe.build_images` fills."""

    images: str
    """Folder of ``<image>.sif`` files."""

    @abstractmethod
    def for_trial(self, images: Path) -> Sandboxes:
        """Return the same sandboxes for another folder of images, without containers that stay warm."""


@dataclass
class WatchedSandboxes(Sandboxes):
    """End the process on a node that opens no sandbox any more.

    Such a node fails episodes faster than all other nodes complete them, and would use up a run's groups.
    """

    sandboxes: Sandboxes
    opened: int = field(default=0, init=False)
    """Sandboxes that were opened or closed so far, by children of this process too."""
    opened_by: WeakKeyDictionary[threading.Thread, int] = field(default_factory=WeakKeyDictionary, init=False)
    """The same for each thread: one that hangs must not hide behind others."""
    _failures: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def check(self) -> None:
        self.sandboxes.check()

    @contextmanager
    def open(self, task: Task) -> Iterator[Sandbox]:
        """Open a sandbox; raise NodeError if none of the last ones started and this machine opens none."""
        with ExitStack() as stack:
            try:
                sandbox = stack.enter_context(self.sandboxes.open(task))
            except SandboxError as error:
                self._count(error)
                raise
            with self._lock:
                self._failures = 0
            self.note()
            yield sandbox
        self.note()

    def note(self) -> None:
        """Count a sandbox that was opened or closed."""
        thread = threading.current_thread()
        with self._lock:
            self.opened += 1
            self.opened_by[thread] = self.opened_by.get(thread, 0) + 1

    def _count(self, error: SandboxError) -> None:
        with self._lock:
            self._failures += 1
            if self._failures % FAILURES_BEFORE_CHECK:
                return
            try:
                self.sandboxes.check()  # when it passes, the images of some tasks may be broken
            except ConfigError:
                host = socket.gethostname()
                raise NodeError(
                    f"{self._failures} sandboxes in a row could not be opened on {host}: {error}"
                ) from error
