"""Inspect the processes of this machine through Linux's /proc."""

import contextlib
import ctypes
import io
import os
import resource
import select
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import SystemRandom
from typing import AnyStr

PR_SET_PDEATHSIG = 1
PF_KTHREAD = 0x00200000  # of linux/sched.h: a kernel thread runs no program, so it has no environment
RETRIES = 100
KILLED_S = 10.0  # longest wait for the end of a killed command
MEETING = "HPC_SWE_MEETING"  # variable that names the folder in which the processes of a job meet
LIBC = ctypes.CDLL(None)  # loaded here, since a child must not load it between fork and exec


class Flag:
    """Notify threads and signal handlers of one process that something has happened.

    A signal handler must not set a `threading.Event`: `set` takes the lock that an interrupted `wait` of the
    same thread may hold, and the process would wait for itself for ever. This one is the kernel's and has no
    lock.
    """

    def __init__(self) -> None:
        self._file, self._process = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), os.getpid()
        weakref.finalize(self, os.close, self._file).atexit = False  # daemon threads may set it until the end

    def set(self) -> None:
        """Set the flag until `clear`; a forked child, which inherits handlers too, sets nothing."""
        if os.getpid() == self._process:
            os.eventfd_write(self._file, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._file)

    def is_set(self) -> bool:
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, for at most `seconds` (finite, from 0 on); returns whether it is."""
        look = select.poll()
        look.register(self._file, select.POLLIN)
        return bool(look.poll(seconds * 1000))


def start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, which with the pid identifies it.

    None when no such process lives; a pid alone may be reused.
    """
    state, *fields = _stat(pid) or ["X"]
    return None if state in "ZX" else fields[18]


def descendants(pid: int) -> list[int]:
    """Return all children, their children and so on, each after its parent.

    This reads the parent of every process. The lists of children that /proc has per thread miss some while a
    thread ends.
    """
    children: dict[int, list[int]] = {}
    for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if fields := _stat(each):
            children.setdefault(int(fields[1]), []).append(each)
    found = list(children.get(pid, []))
    for each in found:  # the list grows during the loop
        found += children.get(each, [])
    return found


def pid_of(handle: int) -> int:
    """Return the pid of a pidfd's process; -1 when that has ended, or is not known."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("Pid:")), -1)
    return -1


def starved_s(pid: int) -> float:
    """Return how long a thread of the process, or of one below it, was ready to run and had no processor.

    This is the longest such time of all threads, in seconds since each began; 0 where the kernel counts none.
    """
    waited_ns = [0]
    with contextlib.suppress(OSError):  # there is no room for an open file
        for each in (pid, *descendants(pid)) if pid > 0 else ():
            with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
                for thread in os.listdir(f"/proc/{each}/task"):
                    waited_ns.append(
                        int(Path(f"/proc/{each}/task/{thread}/schedstat").read_text().split()[1])
                    )
    return max(waited_ns) / 1e9


def leader(pid: int) -> int:
    """Return the leader of a process's group; 0 when there is no such process."""
    fields = _stat(pid)
    return int(fields[2]) if fields else 0


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process."""
    return _stat(pid)[:1] in (["T"], ["t"])


def await_stop(pids: Iterable[int], timeout_s: float) -> None:
    """Wait until all threads of processes that were sent SIGSTOP have stopped, for at most `timeout_s`.

    A process that is inside fork may still start a child before it stops.
    """
    deadline = time.monotonic() + timeout_s
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Return whether a thread of a process is neither stopped nor ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any((_stat(int(thread)) or ["X"])[0] not in "TtZX" for thread in threads)


class StoppedProcesses:
    """Find processes that stay stopped; a debugger or a scheduler may stop one only for a moment."""

    def __init__(self, checks: int = 10) -> None:
        self._checks = checks
        self._stopped: dict[int, int] = {}

    def find(self, pids: Iterable[int]) -> list[int]:
        """Check the processes; return those that were stopped in each of the last checks."""
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in pids if is_stopped(pid)}
        return [pid for pid, checks in self._stopped.items() if checks >= self._checks]


def variable(pid: int, name: str) -> str | None:
    """Return an environment variable as of the start of a process's program; None if it is not readable."""
    start = os.fsencode(f"{name}=")
    words = _environ(pid).split(b"\0")
    return next((os.fsdecode(word[len(start) :]) for word in words if word.startswith(start)), None)


def with_variable(name: str) -> dict[int, str]:
    """Return pid -> value of a variable, for the live processes that have it and that this user may read."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    found = {pid: value for pid in pids if (value := variable(pid, name)) is not None}
    return {pid: value for pid, value in found.items() if start_time(pid)}


def _environ(pid: int) -> bytes:
    """Read a process's environment; retry, since it is empty for a moment while a program starts."""
    for _ in range(RETRIES):
        try:
            if found := Path(f"/proc/{pid}/environ").read_bytes():
                return found
        except OSError:
            break
        fields = _stat(pid) or ["X"]
        if fields[0] in "ZX" or int(fields[6]) & PF_KTHREAD:
            break
        time.sleep(0.001)
    return b""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or none once the process has ended.

    The program's name before them may hold any bytes.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def kill_and_wait(job: "subprocess.Popen[AnyStr]") -> bool:
    """Kill a command, wait up to KILLED_S for its end, and return whether it has ended.

    A frozen file system may hold it in the kernel.
    """
    job.kill()  # which does nothing once it has ended
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(KILLED_S)
    return job.returncode is not None


def completed(
    job: "subprocess.Popen[AnyStr]", timeout_s: float, stdin: AnyStr | None = None
) -> "subprocess.CompletedProcess[AnyStr]":
    """Return a command's exit code, and what it has printed into pipes; kill it if it takes too long.

    Raise subprocess.TimeoutExpired then. After a kill subprocess.run waits without a limit, also for others
    that hold the command's pipes.
    """
    try:
        output, errors = job.communicate(stdin, timeout_s)
    finally:
        kill_and_wait(job)
    return subprocess.CompletedProcess(job.args, job.returncode, output, errors)


@contextlib.contextmanager
def printed(command: Sequence[str], silent_s: float) -> Iterator[io.BufferedReader]:
    """Start a command, and yield what it prints as it comes, to be read to its end; kill the command at exit.

    Raise subprocess.TimeoutExpired once it prints nothing for `silent_s`, and CalledProcessError if it fails,
    as what was read may then be a part. It prints into a socket, whose reads have a deadline; those of a pipe
    have none.
    """
    ours, theirs = socket.socketpair()
    ours.settimeout(silent_s)
    with ours, ours.makefile("rb") as output:
        with theirs:
            job = subprocess.Popen(command, stdout=theirs.fileno(), preexec_fn=die_with_parent)
        try:
            yield output
            code = job.wait(silent_s)
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, silent_s) from None
        finally:
            kill_and_wait(job)
    if code:
        raise subprocess.CalledProcessError(code, command)


def free_port(host: str = "") -> int:
    """Return a TCP port of this machine that is free now; raise OSError if the host is another machine.

    It lies below the ephemeral ports, if there is room: a server may bind it minutes later, and meanwhile
    Linux may give an ephemeral port to another program.
    """
    for port in _ports_below_ephemeral():
        with contextlib.suppress(OSError):
            return _bound(host, port)
    return _bound(host, 0)


def _ports_below_ephemeral() -> list[int]:
    """Choose some ports at random; none where the range of ephemeral ports is not to be read."""
    try:
        lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return []
    below = range(20_000, lowest_ephemeral)
    return SystemRandom().sample(below, min(20, len(below)))


def _bound(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may.

    Linux refuses to pass a descriptor over a socket while a user has more of them in flight, over all
    processes, than the sender may open. The programs of sandboxes may open a quarter of this at most.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; for `preexec_fn`."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
