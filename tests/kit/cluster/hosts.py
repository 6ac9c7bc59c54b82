"""The hosts of a test cluster as the machine sees them: namespaces, and processes in them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from hpc_swe.cluster.processes import descendants
from tests.kit.cluster.configuration import Host

INSIDE = Path(__file__).with_name("inside.py")
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
PATIENCE_S = 600.0  # ends what hangs; machines differ too much for a deadline to time anything
T = TypeVar("T")


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers are the machine's, not those of the host that it runs on."""

    pid: int
    uid: int
    arguments: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.arguments[0].rpartition("/")[2] if self.arguments else ""

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(self.pid, sig)


class Inside(subprocess.Popen[str]):
    """A command on a host. Signals go to it, not to the nsenter that stands between."""

    def send_signal(self, sig: int) -> None:
        # an nsenter that is killed while it forks leaves its child behind
        found = wait_for("a child", lambda: descendants(self.pid) or self.poll() is not None, every=0.01)
        if isinstance(found, list):
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(found[0], sig)


def wait_for(what: str, predicate: Callable[[], T], every: float = 0.1) -> T:
    """The first true value of the predicate."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:g} s in vain for {what}")
        time.sleep(every)
    return value


def create(
    host: Host, log: Path, prefix: Sequence[str] = (), lifeline: bool = False
) -> subprocess.Popen[bytes]:
    """Starts a host's PID 1 in new namespaces; a prefix that enters another host nests it there."""
    orders = json.dumps(msgspec.to_builtins(host))
    unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    command = [*prefix, *unshare, sys.executable, "-I", "-S", str(INSIDE), orders]
    stdin = subprocess.PIPE if lifeline else subprocess.DEVNULL
    with log.open("ab") as output:
        return subprocess.Popen(command, stdin=stdin, stdout=output, stderr=output, start_new_session=True)


def first_process(created: subprocess.Popen[bytes]) -> int:
    """The machine's number of a new host's PID 1."""

    def find() -> list[int]:
        still_runs(created)
        return [pid for pid in descendants(created.pid) if arguments(pid)[1:4] == ("-I", "-S", str(INSIDE))]

    return wait_for("the namespaces of a new host", find, every=0.005)[0]


def until_ready(created: subprocess.Popen[bytes], first: int) -> None:
    def ready() -> bool:
        still_runs(created)
        name = Path(f"/proc/{first}/comm")
        return name.exists() and name.read_text() == "ready\n"

    wait_for("a new host's view of the machine", ready, every=0.005)


def still_runs(created: subprocess.Popen[bytes]) -> None:
    if created.poll() is not None:
        raise ChildProcessError(f"the host's PID 1 ended with {created.returncode}")


def arguments(pid: int) -> tuple[str, ...]:
    try:
        return tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
    except OSError:
        return ()


def processes(first: int) -> list[Process]:
    """All that run on the host with this PID 1, without those of hosts nested in it."""
    try:
        namespace = Path(f"/proc/{first}/ns/pid").readlink()
    except OSError:
        return []
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "ns/pid").readlink() == namespace and folder.name != str(first):
                pid = int(folder.name)
                found.append(Process(pid=pid, uid=folder.stat().st_uid, arguments=arguments(pid)))
        except OSError:
            continue  # it ended meanwhile
    return found


def enter(first: int, command: Sequence[str], environment: Mapping[str, str], cwd: str = "/") -> list[str]:
    """The command line that runs another on a host, as its USER and with this environment alone."""
    user, values = environment["USER"], [f"{name}={value}" for name, value in environment.items()]
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--pdeathsig=KILL"]
    clean = ["env", "-i", f"--chdir={cwd}", *values]
    return ["nsenter", f"--target={first}", *NAMESPACES, "--", *become, *clean, *command]


def login_environment(user: str, home: str) -> dict[str, str]:
    return {
        "PATH": PATH,
        "LANG": "C.UTF-8",
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "HOME": home,
    }
