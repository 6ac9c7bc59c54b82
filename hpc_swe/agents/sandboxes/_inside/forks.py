# ruff: noqa: BLE001, PTH101, PTH123
"""Fork the commands of `process` sandboxes from an interpreter that has loaded pytest.

The program is sent to the interpreter as text, after those of `descriptors` and `program`: standard library
only. It reads nothing but the host's requests and preludes, and no code of a task runs in it. For each
request it forks a reaper, which forks the command. The reaper adopts all orphans of the command, so it can
end every process that the command has started, and does so when the command has ended or the host says so or
is gone.

    interpreter <- b"prelude" + text
                <- {"kind", "folder", "environment", "python", "nice"} + socket, program, output, ...
    socket      -> b"started" + pidfds of reaper and command, exit code
                <- anything, or the end: kill the command
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

# In the interpreter, these are in the texts above this one.
from hpc_swe.agents.sandboxes._inside.descriptors import send_files
from hpc_swe.agents.sandboxes._inside.program import WARM_UP, execute, fork_for, prepare, reap

PR_SET_CHILD_SUBREAPER = 36


def serve(channel: socket.socket) -> None:
    """Fork one reaper for each request, until the host is gone."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # reapers must not keep the socket open
    exec(WARM_UP, {"__name__": "warm_up"})
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    channel.send(b"up")
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1 << 16, 5)
        if not message:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # so that a pid listed below stays its reaper's
            for pid in children():
                os.kill(pid, signal.SIGCONT)  # its command may have stopped it
            return
        if message == b"prelude":
            prepare(files)
            continue
        if fork_for(files[0]) == 0:
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            oversee(json.loads(message), *files)
        for file in files:
            os.close(file)


def oversee(request: dict[str, Any], host: int, *files: int) -> NoReturn:
    """Become a reaper: fork the command, and answer when it and all that it has started have ended."""
    try:
        wait, go = os.pipe()
        command = fork_for(host)
        if command < 0:
            os._exit(0)
        if command == 0:
            os.close(go)
            if os.read(wait, 1):
                run(request, *files)
            os._exit(126)
        for file in files:
            os.close(file)  # a pipe must end with the program that has it
        os.setpgid(0, 0)  # a command that kills the group of its session's leader does not reach it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent to a stopped reaper when its interpreter ends
        adopt_orphans()
        handle = os.pidfd_open(command)
        send_files(socket.socket(fileno=os.dup(host)), b"started", [os.pidfd_open(os.getpid()), handle])
        os.write(go, b"g")
        if host in select.select([handle, host], [], [])[0]:
            os.read(host, 16)  # a socket that closes with a message unread takes back the answer
        code = os.waitstatus_to_exitcode(end(command))
        os.write(host, str(code if code >= 0 else 128 - code).encode())
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose parents end."""
    # Loaded after the fork of the command: code under test must load it itself, which the graders see.
    import _ctypes

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    if _ctypes.call_function(prctl, (PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)):
        raise OSError("prctl")


def end(command: int) -> int:
    """Kill and reap all processes below this one; return the command's wait status."""
    status: int = signal.SIGKILL
    while True:
        try:
            ended, found = os.waitpid(-1, os.WNOHANG)
            if not ended:
                for pid in children():
                    os.kill(pid, signal.SIGKILL)  # not reaped, so its number is nobody else's
                ended, found = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended == command:
            status = found


def children() -> list[int]:
    own = str(os.getpid())
    try:
        with open(f"/proc/self/task/{own}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # this kernel does not keep such lists
        pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]  # noqa: PTH208
        return [int(pid) for pid in pids if parent(pid) == own]


def parent(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[1].decode()
    except OSError:  # it ended meanwhile
        return ""


def run(request: dict[str, Any], program: int, output: int, *more: int) -> NoReturn:
    """Run a shell command, or a Python program in this warm interpreter; called in the forked child."""
    try:
        text = os.pread(program, os.fstat(program).st_size, 0).decode()
        environment = request["environment"]
        os.setpgid(0, 0)  # no session: Linux may give each session an equal share of the processors
        for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(source, number)
        passed = [str(os.dup2(file, number)) for number, file in enumerate(more, 256)]
        os.closerange(3, 256)
        os.chdir(request["folder"])
        os.nice(request["nice"])
        os.environ.clear()
        show(environment)
        if request["kind"] == "shell":
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
                signal.signal(number, signal.SIG_DFL)
            os.execvpe("bash", ["bash", "--noprofile", "--norc", "-c", text], environment)
        if request["python"]:
            os.execvpe(request["python"], [request["python"], "-I", "-c", text, *passed], environment)
        os._exit(execute(text, passed, environment))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(126)


def show(environment: dict[str, str]) -> None:
    """Write these variables where /proc shows those with which a process began: the host looks for them."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, stop = int(fields[47]), int(fields[48])
    text = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text[: stop - start].ljust(stop - start, b"\0"))


if __name__ == "__main__":
    serve(socket.socket(fileno=os.dup(0)))
