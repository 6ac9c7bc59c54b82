# ruff: noqa: BLE001, PTH101, PTH102, PTH103, PTH110, PTH123, PTH211
"""Run inside a container and open its sandboxes.

The program is sent there as text, so it imports the standard library only. A warm interpreter serves the
host: for each sandbox it forks, and the child enters user, process, mount, network, IPC, control group and
host-name namespaces of its own, over a root whose writable layer is a tmpfs of limited size. That child is
process 1 of the sandbox: nothing inside can kill, trace or outlive it, and when its socket closes it exits
and the kernel ends all the rest.

    container  <- settings, then one socket per sandbox, or b"prelude" + text
    sandbox    -> b"process" + pidfd, b"ready" + work directory  <- {"kind"} + program, output
               -> b"listening" + socket                          <- {"kind": "listen", "port"}
               -> b"session"           <- {"kind": "session", "python"} + program, output, requests, answers
               -> nothing              <- {"kind": "resume" or "pause"}, {"kind": "interrupt", "signal"}
               -> b"ended"             <- {"kind": "end"}
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from typing import Any, NoReturn

# In a container, these are in the texts above this one.
from hpc_swe.agents.sandboxes._inside.descriptors import most_open_files, send_files
from hpc_swe.agents.sandboxes._inside.processes import Processes
from hpc_swe.agents.sandboxes._inside.program import execute, fork_for, prepare, reap, thread_variables

NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
MS_RDONLY, MS_NOSUID_NOEXEC, MS_NOSUID_NODEV_NOEXEC = 1, 10, 14
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 1 << 18
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41
CAPABILITY_V3 = 0x20080522
BASE, SCRATCH = "/mnt", "/tmp"
MEMORY_CHECK_S = 0.25
# Linux counts these for the host's user over all sandboxes, unless a namespace has a bound of its own.
USER_LIMITS = {"max_user_namespaces": 0, "max_inotify_instances": 32, "max_inotify_watches": 16384}
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
Table = dict[str, Any]

INITIAL = dict(os.environ)
"""Variables of the sandbox's programs."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    packed = [a.encode() if isinstance(a, str) else a for a in arguments]
    if libc[name](*packed) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def mount(kind: str, target: str, flags: int = 0, options: str | None = None) -> None:
    os.makedirs(target, exist_ok=True)
    call("mount", kind, target, kind, flags, options)


def put(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def serve(channel: socket.socket) -> None:
    """Fork one sandbox per socket received, until the host is gone."""
    settings = json.loads(channel.recv(1 << 16))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[name]  # so that the audit event of an import shows who loads it
    INITIAL.update(thread_variables(settings["threads"]))
    os.environ.update(INITIAL)  # a library reads them when it is loaded, and the warm-up may load it
    exec(settings["warm_up"], {"__name__": "warm_up"})
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Bind the root without its locked child mounts: only then may it be the lower layer of an overlay.
    call("mount", None, "/", None, MS_PRIVATE, None)
    call("mount", "/", BASE, None, MS_BIND, None)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    channel.send(b"up")
    while True:
        message, received, _, _ = socket.recv_fds(channel, 4096, 1)
        if not message:
            return
        if message == b"prelude":
            prepare(received)
            continue
        if fork_for(received[0]) == 0:
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            start(socket.socket(fileno=received[0]), message.decode(), settings)
        os.close(received[0])


def start(host: socket.socket, workdir: str, settings: Table) -> NoReturn:
    """Become a sandbox, and send any error to the host."""
    try:
        user, group = os.geteuid(), os.getegid()
        call("unshare", NEW_NAMESPACES)
        put("/proc/self/setgroups", "deny")
        put("/proc/self/uid_map", f"0 {user} 1")
        put("/proc/self/gid_map", f"0 {group} 1")
        if os.fork():
            os._exit(0)
        # From here on this is the first process of the new process namespace.
        send_files(host, b"process", [os.pidfd_open(os.getpid())])
        set_up_files(settings["disk_mb"], workdir, settings["mounts"])
        drop_privileges(settings["processes"])
        send_files(host, b"ready", [os.open(workdir, os.O_RDONLY | os.O_DIRECTORY)])
        os.closerange(host.fileno() + 1, 256)
        serve_host(host, workdir, settings)
    except BaseException:
        host.send(b"failed: " + traceback.format_exc().encode()[-2000:])
    os._exit(1)


def set_up_files(disk_mb: int, workdir: str, mounts: list[str]) -> None:
    """Change to a root of the sandbox's own: the image below, a tmpfs above, nothing shared with others."""
    call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    mount("tmpfs", SCRATCH, 0, f"size={disk_mb}m,nr_inodes={disk_mb}k,mode=700")
    root, dev = f"{SCRATCH}/root", f"{SCRATCH}/root/dev"
    for name in ("upper", "work"):
        os.mkdir(f"{SCRATCH}/{name}")
    mount("overlay", root, 0, f"lowerdir={BASE},upperdir={SCRATCH}/upper,workdir={SCRATCH}/work,userxattr")
    mount("tmpfs", dev, 0, "size=64m,nr_inodes=16k,mode=755")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        if os.path.exists(f"/dev/{name}"):
            put(f"{dev}/{name}", "")
            call("mount", f"/dev/{name}", f"{dev}/{name}", None, MS_BIND, None)
            # Read-only: a host user who is root owns the device node, and could change its mode for the host.
            flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID_NOEXEC
            call("mount", None, f"{dev}/{name}", None, flags, None)
    mount("devpts", f"{dev}/pts", 0, "newinstance,ptmxmode=0666,mode=620")
    for name, target in LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    os.makedirs(f"{dev}/shm", exist_ok=True)
    for folder in (f"{dev}/shm", f"{root}/tmp", f"{root}/var/tmp"):
        os.chmod(folder, 0o1777)
    for path in mounts:  # the container mounted them read-only, and a bind mount stays read-only
        os.makedirs(root + path, exist_ok=True)
        call("mount", path, root + path, None, MS_BIND, None)
    mount("proc", f"{root}/proc", MS_NOSUID_NODEV_NOEXEC)
    mount("sysfs", f"{root}/sys", MS_NOSUID_NODEV_NOEXEC | MS_RDONLY)
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", MNT_DETACH)
    os.makedirs(workdir, exist_ok=True)
    os.chdir(workdir)


def drop_privileges(processes: int) -> None:
    """Set the loopback up, forbid further namespaces, then drop all capabilities for good."""
    call("sethostname", "sandbox", 7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))
    for name, most in USER_LIMITS.items():
        put(f"/proc/sys/user/{name}", str(most))
    with contextlib.suppress(OSError):  # works since Linux 6.14, where RLIMIT_NPROC does not bind root
        put("/proc/sys/kernel/pid_max", str(300 + processes))  # Linux assigns numbers below 300 only once
    put("/proc/self/oom_score_adj", "1000")  # when the node runs out of memory, end sandboxes first
    # Where the host user is root, /proc/sys and sysrq-trigger would be writable without any capability.
    call("mount", None, "/proc", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID_NODEV_NOEXEC, None)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_V3, 0), (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def serve_host(host: socket.socket, workdir: str, settings: Table) -> None:
    """Carry out the host's requests one at a time.

    All processes of a command have ended when it is answered; those of an open session go on.
    """
    processes = Processes(settings["memory_mb"])
    while True:
        while processes.program and not select.select([host], [], [], MEMORY_CHECK_S)[0]:
            processes.watch()
        message, files, _, _ = socket.recv_fds(host, 4096, 4)
        if not message:
            return
        if message == b"stop":  # any message ends a command, but this one came after its end
            continue
        request = json.loads(message)
        if request["kind"] == "listen":
            listen(host, request["port"])
        elif request["kind"] in ("shell", "python"):
            run_command(host, request, files, workdir, settings, processes)
        elif request["kind"] == "session":
            start_session(host, request["python"], files, workdir, settings, processes)
        else:
            steer_session(host, request, processes)


def run_command(
    host: socket.socket, request: Table, files: list[int], workdir: str, settings: Table, processes: Processes
) -> None:
    """Run one command and say how it ended, when all its processes have ended."""
    child = processes.fork()
    if child == 0:
        run(request["kind"], files, workdir, settings)
    handle = os.pidfd_open(child)
    has_ended = await_end(handle, host.fileno(), processes)
    code = os.waitstatus_to_exitcode(processes.end(child))
    for file in (handle, *files):
        os.close(file)
    host.send(
        json.dumps({"exit_code": code if code >= 0 else 128 - code, "timed_out": not has_ended}).encode()
    )


def start_session(
    host: socket.socket, python: str, files: list[int], workdir: str, settings: Table, processes: Processes
) -> None:
    """Start the program of a session, after the end of any other."""
    processes.kill_all()
    child = os.fork()
    if child == 0:
        run("session", files, workdir, settings, python)
    processes.program = child
    for file in files:
        os.close(file)
    host.send(b"session")


def steer_session(host: socket.socket, request: Table, processes: Processes) -> None:
    """Resume, interrupt, pause or end a session."""
    if request["kind"] == "end":
        processes.kill_all()
        host.send(b"ended")
    elif request["kind"] == "interrupt":
        processes.interrupt(request["signal"])
    else:
        processes.signal(signal.SIGCONT if request["kind"] == "resume" else signal.SIGSTOP)


def await_end(child: int, host: int, processes: Processes) -> bool:
    """Wait for a command's end, and kill it when it takes too much; return False if the host ends it."""
    while not (ready := select.select([child, host], [], [], MEMORY_CHECK_S)[0]):
        processes.kill_greedy()
    return child in ready


def listen(host: socket.socket, port: int) -> None:
    """Pass the host a listening socket of this network: it accepts there, and no process inside can."""
    try:
        with socket.create_server(("127.0.0.1", port), backlog=64) as server:
            send_files(host, b"listening", [server.fileno()])
    except OSError as error:
        host.send(f"failed: {error}".encode())


def run(kind: str, files: list[int], workdir: str, settings: Table, python: str = "") -> NoReturn:
    """Run a shell command, or a Python program in this warm interpreter; called in the forked child."""
    try:
        program = os.pread(files[0], os.fstat(files[0]).st_size, 0).decode()
        os.setpgid(0, 0)  # no session: Linux may give each session an equal share of the processors
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
        for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), files[1], files[1])):
            os.dup2(source, number)
        pipes = [str(fcntl.fcntl(file, fcntl.F_DUPFD, 256)) for file in files[2:]]
        os.closerange(3, 256)
        os.chdir(workdir)
        set_limits(settings)
        os.nice(settings["nice"])
        if kind == "shell":
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
                signal.signal(number, signal.SIG_DFL)
            os.execvpe("bash", ["bash", "--noprofile", "--norc", "-c", program], INITIAL)
        if kind == "session":
            call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if python:
            os.execvpe(python, [python, "-I", "-c", program, *pipes], INITIAL)
        vars(ctypes).clear()  # which the methods of its classes show
        for name in ("ctypes", "libc"):  # the frames above the program show these globals
            del globals()[name]
        os._exit(execute(program, pipes, INITIAL))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(126)


def set_limits(settings: Table) -> None:
    limits = {
        resource.RLIMIT_NPROC: settings["processes"],
        resource.RLIMIT_FSIZE: settings["file_mb"] << 20,
        resource.RLIMIT_AS: settings["address_space_mb"] << 20,
        resource.RLIMIT_NOFILE: most_open_files(),
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
        resource.RLIMIT_MEMLOCK: 1 << 16,
        # Not 0: with 0 Linux still starts a core_pattern that is a program of the host; with 1 it does not.
        resource.RLIMIT_CORE: 1,
    }
    for which, value in limits.items():
        most = resource.getrlimit(which)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (value, value))


if __name__ == "__main__":
    serve(socket.socket(fileno=os.dup(0)))
