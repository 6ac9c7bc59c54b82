"""What the kernel keeps for a program, and what of it reaches beyond the sandbox."""

import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_swe.agents.sandboxes._session import Limits, namespace_pids
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.records import Task

pytestmark = pytest.mark.slow
TAKES = {
    "a lock of a device": "fcntl.flock(os.open('/dev/null', os.O_RDWR), fcntl.LOCK_EX)",
    "a range of a device": "fcntl.lockf(os.open('/dev/zero', os.O_RDWR), fcntl.LOCK_EX, 1, 7)",
    "a lock of a mount": "fcntl.flock(os.open('/opt/shown/file', os.O_RDONLY), fcntl.LOCK_EX)",
    "ranges of a file": "[fcntl.lockf(own, fcntl.LOCK_EX, 1, 2 * n) for n in range(6000)]",
    "filled pipes": "[os.fork() for _ in range(5)]\npipes = [os.pipe() for _ in range(1800)]\n"
    "[os.set_blocking(end, False) for _, end in pipes]\n[os.write(end, bytes(4096)) for _, end in pipes]",
    "maps of single pages": "[os.fork() for _ in range(3)]\nplace = mmap.mmap(-1, 60_000 << 12)\n"
    "start = ctypes.addressof(ctypes.c_char.from_buffer(place))\n"
    "[libc.mprotect(start + (n << 12), 4096, 1) for n in range(0, 60_000, 2)]",
    "page tables": "[os.fork() for _ in range(5)]\n"
    "places = [mmap.mmap(-1, 3 << 30, 34, 1) for _ in range(10)]\n"
    "[place[at] for place in places for at in range(0, 3 << 30, 2 << 20)]",
}
SMALL = Limits(memory_mb=120, address_space_mb=40_000)


@pytest.fixture
def sandbox(apptainer: Apptainer, task: Task, tmp_path: Path) -> Iterator[Sandbox]:
    (tmp_path / "file").write_text("")
    made = Apptainer(images=apptainer.images, limits=SMALL, mounts=(f"{tmp_path}:/opt/shown",))
    with made.open(task) as opened:
        yield opened


def ends(sandbox: Sandbox, take: str, wait_s: float = 60.0):
    program = f"""
import ctypes, fcntl, mmap, os, time
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
own = open("own", "w")
{take}
time.sleep({wait_s})
print("end")
"""
    return sandbox.python(program, 120.0)


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_who_takes_much_of_the_kernel_or_locks_what_others_use_is_killed(sandbox, take):
    result = ends(sandbox, take)
    assert (result.exit_code, result.timed_out, result.broke_sandbox) == (137, False, False), result.output
    assert sandbox.run("echo alive", 60).output == "alive\n"


def test_a_lock_in_a_sandbox_is_gone_from_the_host_within_moments(sandbox):
    assert ends(sandbox, TAKES["a lock of a device"]).exit_code == 137
    with Path("/dev/null").open("w") as null:
        fcntl.flock(null, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    "take",
    [
        "fcntl.flock(own, fcntl.LOCK_EX)\nfcntl.lockf(open('/dev/shm/x', 'w'), fcntl.LOCK_EX)",
        "[fcntl.lockf(own, fcntl.LOCK_EX, 1, 2 * n) for n in range(2000)]",
        "files = [open('own') for _ in range(900)] + [os.pipe() for _ in range(100)]",
    ],
)
def test_locks_and_files_of_ordinary_programs_are_left_alone(sandbox, take):
    assert ends(sandbox, take, 1.2).output == "end\n"


def test_calls_that_reach_the_whole_host_are_refused(sandbox):
    program = """
import ctypes, fcntl, os, struct
libc = ctypes.CDLL(None, use_errno=True)
here = os.open(".", os.O_RDONLY)
own = open("own", "w")
for act in (lambda: libc.syscall(162), lambda: libc.syncfs(here), lambda: libc.vmsplice(1, None, 0, 0)):
    print(act(), ctypes.get_errno())
for lock in (37, 38):
    try:
        fcntl.fcntl(own, lock, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0))
    except PermissionError as error:
        print(error.errno)
os.fsync(own)
"""
    assert sandbox.python(program, 60).output.split() == ["-1", "1"] * 3 + ["1", "1"]
    assert sandbox.run("sync; echo $?", 600).output.endswith("0\n")


def test_a_process_may_have_any_name(sandbox):
    program = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
for name in (b"\\xff", "\u00fc".encode() * 8, b"a\\rb", b"x\\rFDSize: z", b"\\rNSpid: 1"):
    assert libc.prctl(15, name) == 0
    time.sleep(0.6)
print("end")
"""
    assert sandbox.python(program, 60).output == "end\n"
    assert sandbox.run("echo alive", 60).output == "alive\n"


def test_a_name_hides_from_the_host_no_number_of_a_process():
    command, own = Path("/proc/self/comm"), namespace_pids(os.getpid())
    before = command.read_bytes()
    try:
        command.write_bytes(b"\rNSpid: 1 2")
        assert namespace_pids(os.getpid()) == own != ["1", "2"]
    finally:
        command.write_bytes(before.rstrip(b"\n"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls are those of x86-64")
def test_high_bits_which_the_kernel_ignores_evade_no_refusal(sandbox):
    program = """
import ctypes, mmap, os, struct
libc = ctypes.CDLL(None, use_errno=True)
own, pipe = os.open("own", os.O_RDWR | os.O_CREAT), os.pipe()[0]
page = mmap.mmap(-1, 4096)
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
lock = ctypes.create_string_buffer(struct.pack("hhqqi4x", 1, 0, 0, 1, 0))
end = struct.pack("QQ", start, 1)
MADVISE, FCNTL, FADVISE, PREADV2, SOCKET, SOCKETPAIR = 28, 72, 221, 327, 41, 53
CALLS = {
    "lock": (FCNTL, own, 37, lock),
    "wait for a lock": (FCNTL, own, 38, lock),
    "larger pipe": (FCNTL, pipe, 1031, 1 << 20),
    "cold": (MADVISE, start, 4096, 20),
    "page out": (MADVISE, start, 4096, 21),
    "drop": (FADVISE, own, 0, 0, 4),
    "only what is in memory": (PREADV2, own, end, 1, 0, 0, 8),
    "do not keep": (PREADV2, own, end, 1, 0, 0, 128),
    "packets": (SOCKET, 17, 3, 0),
    "pair": (SOCKETPAIR, 38, 5, 0, ctypes.create_string_buffer(8)),
}
PLACES = {FCNTL: 2, MADVISE: 3, FADVISE: 4, PREADV2: 6, SOCKET: 1, SOCKETPAIR: 1}
for what, call in CALLS.items():
    for high in (0, 1 << 32, 1 << 63):
        values = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in call]
        values[PLACES[call[0]]] = ctypes.c_ulong(call[PLACES[call[0]]] | high)
        ctypes.set_errno(0)
        if libc.syscall(*values) != -1 or ctypes.get_errno() != 1:
            print(what, high, ctypes.get_errno())
print("end")
"""
    assert sandbox.python(program, 60).output == "end\n"
