"""Bombs go off inside: they cost their own command, never the sandbox's host, and never its attribution."""

from collections.abc import Iterator

import pytest

from hpc_swe.agents.sandboxes._exchange import OUTPUT_BYTES
from hpc_swe.agents.sandboxes._session import Limits
from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandbox
from hpc_swe.base.records import Task

pytestmark = pytest.mark.slow


@pytest.fixture
def sandbox(apptainer: Apptainer, task: Task) -> Iterator[Sandbox]:
    limits = Limits(processes=64, file_mb=8, address_space_mb=1024, disk_mb=32)
    small = Apptainer(images=apptainer.images, limits=limits)
    with small.open(task) as opened:
        yield opened
        assert opened.run("echo alive", 20).output == "alive\n"


def test_a_fork_bomb_ends_with_its_command(sandbox):
    result = sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 2; echo end", 20)
    assert not result.broke_sandbox
    count = "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))"
    assert int(sandbox.python(count, 20).output) <= 3


def test_processes_are_limited(sandbox):
    count = """
import os, time
made = 0
try:
    while made < 5000:
        if os.fork() == 0:
            time.sleep(30)
        made += 1
except OSError:
    print(made)
"""
    assert int(sandbox.python(count, 20).output) < 64 + 300


def test_a_memory_bomb_ends_with_its_command(sandbox):
    assert "MemoryError" in sandbox.python("x = bytearray(4 << 30)", 20).output


def test_the_memory_of_all_processes_together_has_a_bound(apptainer, task):
    """Each of them stays below its own."""
    hog = """
import os, time
for _ in range(2): os.fork()
kept = bytearray(os.urandom(1 << 20)) * 150
time.sleep(60)
"""
    small = Apptainer(images=apptainer.images, limits=Limits(memory_mb=300))
    with small.open(task) as sandbox:
        sandbox.write("hog.py", hog.encode())
        result = sandbox.run("python3 hog.py; echo end", 50)
        assert (result.exit_code, result.timed_out, result.broke_sandbox) == (137, False, False)
        shared = (
            "import os, time; kept = bytearray(1 << 20) * 150; [os.fork() for _ in range(2)]; time.sleep(1.5)"
        )
        assert sandbox.python(f"{shared}; print('end')", 50).exit_code == 0, "what they share counts once"


@pytest.mark.parametrize(
    "call",
    [
        "shmget(0, 4096, 0o1600)",
        "msgget(0, 0o1600)",
        "semget(0, 1, 0o1600)",
        "memfd_create(b'x', 0)",
        "syscall(447, 0)",  # memfd_secret
        "syscall(425, 8, 0)",  # io_uring_setup
        "syscall(240, b'x', 0o102, 0o600, 0)",  # mq_open
        "fcntl(os.pipe()[0], 1031, 1 << 20)",  # larger pipes
    ],
)
def test_memory_that_no_limit_counts_is_not_to_be_had(sandbox, call):
    program = f"import ctypes, os; raise SystemExit(int(ctypes.CDLL(None).{call} >= 0))"
    assert sandbox.python(program, 20).exit_code == 0


def test_ordinary_programs_miss_nothing_of_what_is_refused(sandbox):
    pools = """
import ctypes, multiprocessing as m, os, tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory
def twice(x): return 2 * x
if __name__ == "__main__":
    with m.Pool(2) as pool: assert pool.map(twice, range(3)) == [0, 2, 4]
    with ProcessPoolExecutor(2) as pool: assert list(pool.map(twice, range(3))) == [0, 2, 4]
    lock, queue, shared = m.Lock(), m.Queue(), shared_memory.SharedMemory(create=True, size=4096)
    with lock: queue.put(bytes(shared.buf[:2]))
    assert queue.get() == bytes(2)
    shared.close(); shared.unlink()
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(twice)(4) == 8
    kept = [tempfile.TemporaryFile() for _ in range(900)]
    print("ok")
"""
    sandbox.write("pools.py", pools.encode())
    assert sandbox.run("python3 pools.py", 50).output == "ok\n"
    commit = "git init -q r; cd r; touch a; git add a; git -c user.name=a -c user.email=a@a commit -qm x"
    pipes = "git gc -q; git log --format=%s; seq 9999 | sort -R --parallel=4 | tail -n0"
    assert sandbox.run(f"{commit}; {pipes}", 50).output == "x\n"


def test_files_watches_cores_and_signals_have_bounds(sandbox):
    count = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
watches = 0
while libc.inotify_init() >= 0: watches += 1
files = 0
try:
    while os.open("/dev/null", 0): files += 1
except OSError: pass
print(watches <= 64, files <= 4096, resource.getrlimit(resource.RLIMIT_CORE), os.nice(0) >= 10, os.getsid(0))
"""
    assert sandbox.python(count, 20).output == "True True (1, 1) True 0\n", "0 is a session outside"


def test_a_full_disk_is_the_command_s_error_and_the_tools_say_so(sandbox):
    fill = "for i in $(seq 10); do head -c 7M /dev/zero > f$i; done"
    assert "No space left" in sandbox.run(fill, 20).output
    with pytest.raises(OSError, match="No space left"):
        sandbox.write("new", b"x" * 100_000)
    sandbox.run("rm f*", 20)
    sandbox.write("new", b"x")
    assert sandbox.read("new") == b"x"


def test_a_large_file_and_endless_output_are_cut(sandbox):
    assert sandbox.run("exec head -c 9M /dev/zero > big", 20).exit_code == 153
    result = sandbox.run("exec yes", 20)
    assert result.exit_code == 153
    assert "bytes cut" in result.output
    assert result.output.endswith("[the output ends here, at file_mb = 8 of the sandbox's limits]")
    assert len(result.output) < 1.1 * OUTPUT_BYTES
    with pytest.raises(OSError, match="larger"):
        sandbox.read("big")


def test_time_ends_everything_at_work(sandbox):
    result = sandbox.run("trap '' TERM; setsid sleep 50 & sleep 50", 0.3)
    assert (result.timed_out, result.exit_code, result.broke_sandbox) == (True, 137, False)


def test_a_command_whose_end_a_tracer_hides_ends_all_the_same(sandbox):
    """The kernel shows the end of a traced process to its tracer alone, as long as that lives."""
    program = """
import ctypes, os, sys, time
if os.fork() == 0:
    assert ctypes.CDLL(None).ptrace(0x4206, os.getppid(), 0, 0) == 0  # PTRACE_SEIZE
    open("traced", "w").close()
    time.sleep(1000)
while not os.path.exists("traced"):
    time.sleep(0.01)
sys.exit(3)
"""
    result = sandbox.python(program, 60)
    assert (result.output, result.exit_code, result.timed_out, result.broke_sandbox) == ("", 3, False, False)
    traces_me = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 15)"
    result = sandbox.python(traces_me, 0.5)
    assert (result.exit_code, result.timed_out, result.broke_sandbox) == (137, True, False)


@pytest.mark.parametrize("command", ["kill -9 -1", "kill -9 1", "kill -STOP -1", "kill -9 $PPID", "exit 137"])
def test_killing_about_harms_nobody_else(sandbox, command):
    assert not sandbox.run(f"{command}; sleep 0.1", 2).broke_sandbox


def test_the_first_process_cannot_be_traced(sandbox):
    attach = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    assert sandbox.python(attach, 20).output == "-1\n"


def test_a_program_may_do_all_that_python_does(sandbox):
    program = "import sys, multiprocessing\nprint(__name__, sys.argv, sys.path[0] != '')\nraise SystemExit(7)"
    result = sandbox.python(program, 20)
    assert (result.output, result.exit_code) == ("__main__ [''] True\n", 7)
    assert sandbox.python("raise ValueError('here')", 20).exit_code == 1
    assert "ValueError: here" in sandbox.python("raise ValueError('here')", 20).output
    assert sandbox.python("def (", 20).exit_code == 1
    assert sandbox.python("import os; os.kill(os.getpid(), 9)", 20).exit_code == 137
