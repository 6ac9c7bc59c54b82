"""python broken_node.py FAULT ARGUMENT...: python with these arguments, on a node that is broken on purpose.

Only the node `c2` is. Where the kernel can be made to misbehave for one process and its children, it is:
by a seccomp filter, which needs no rights, or by a user namespace. The clock is that of this interpreter.
"""

import ctypes
import os
import platform
import runpy
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NODE = "c2"
FLOCK, BIND = {"x86_64": (73, 49), "aarch64": (32, 200)}[platform.machine()]
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of the BPF machine
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NUMBER, THIRD_ARGUMENT = 0, 32  # where they lie in struct seccomp_data
INTERNET = (16, 28)  # sizes of struct sockaddr_in and sockaddr_in6
EOPNOTSUPP = 95
CLOCK_S = 90.5


def filter_calls(*program: tuple[int, int, int, int]) -> None:
    """Install a seccomp filter, which outlives exec."""
    packed = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(packed)
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, pointer in ((38, 1, None), (22, 2, header)):  # no new privileges, then the filter
        if libc.prctl(option, value, pointer, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {option}")


def flock_does_nothing() -> None:
    filter_calls(
        (LOAD, 0, 0, NUMBER), (EQUAL, 0, 1, FLOCK), (RETURN, 0, 0, FAIL), (RETURN, 0, 0, ALLOW)
    )  # "fails" with error 0: it succeeds, undone


def no_unix_sockets() -> None:
    filter_calls(
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 0, 3, BIND),
        (LOAD, 0, 0, THIRD_ARGUMENT),
        (EQUAL, 1, 0, INTERNET[0]),
        (EQUAL, 0, 1, INTERNET[1]),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL | EOPNOTSUPP),
    )


def no_user_namespaces() -> None:
    """A namespace that may have none below it, as sysctl user.max_user_namespaces=0 makes of a node."""
    inside = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        inside,
        "sh",
        sys.executable,
        *sys.argv[2:],
    ]
    sys.exit(subprocess.run(command, check=False).returncode)


def no_apptainer() -> None:
    os.environ["PATH"] = "/var/empty"


def no_tensorboard() -> None:
    """The same packages, but one, seen by an interpreter without packages of its own."""
    packages = Path(tempfile.mkdtemp())
    sites = [Path(folder) for folder in sys.path if folder.endswith("site-packages")]
    for entry in (entry for site in sites for entry in site.iterdir()):
        if not entry.name.startswith("tensorboard") and not (packages / entry.name).is_symlink():
            (packages / entry.name).symlink_to(entry)
    command = [sys.executable, "-S", *sys.argv[2:]]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": f"{packages}:{Path.cwd()}"}, check=False)
    shutil.rmtree(packages)
    sys.exit(done.returncode)


def clock_is_ahead() -> None:
    real = time.time
    time.time = lambda: real() + CLOCK_S
    sys.argv = sys.argv[3:]  # after -m
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.exit(0)


def hangs() -> None:
    time.sleep(600)


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        flock_does_nothing,
        no_unix_sockets,
        no_user_namespaces,
        no_apptainer,
        no_tensorboard,
        clock_is_ahead,
        hangs,
    )
}

if __name__ == "__main__":
    if socket.gethostname() == NODE:
        FAULTS[sys.argv[1]]()
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
