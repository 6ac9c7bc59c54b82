"""Bombs go off inside: they cost their own command, never the sandbox's host, and never its attribution."""

from collections.abc import Iterator

import pytest

from hpc_swe.plugins.sandboxes._session import Limits
from hpc_swe.plugins.sandboxes.apptainer import Apptainer
from hpc_swe.plugins.sandboxes.base import Sandbox
from hpc_swe.records import Task

pytestmark = pytest.mark.slow


@pytest.fixture
def sandbox(apptainer: Apptainer, task: Task) -> Iterator[Sandbox]:
    limits = Limits(
        processes=64, file_mb=8, address_space_mb=1024, disk_mb=32, output_bytes=1000, read_bytes=1000
    )
    small = Apptainer(images=apptainer.images, limits=limits)
    with small.open(task) as opened:
        yield opened
        assert opened.run("echo alive", 20).output == "alive\n"


def test_a_fork_bomb_ends_with_its_command(sandbox: Sandbox):
    result = sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 2; echo end", 20)
    assert not result.broke_sandbox
    count = "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))"
    assert int(sandbox.python(count, 20).output) <= 3


def test_processes_are_limited(sandbox: Sandbox):
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


def test_a_memory_bomb_ends_with_its_command(sandbox: Sandbox):
    assert "MemoryError" in sandbox.python("x = bytearray(4 << 30)", 20).output


def test_a_full_disk_is_the_command_s_error_and_the_tools_say_so(sandbox: Sandbox):
    fill = "for i in $(seq 10); do head -c 7M /dev/zero > f$i; done"
    assert "No space left" in sandbox.run(fill, 20).output
    with pytest.raises(OSError, match="No space left"):
        sandbox.write("new", b"x" * 100_000)
    sandbox.run("rm f*", 20)
    sandbox.write("new", b"x")
    assert sandbox.read("new") == b"x"


def test_a_large_file_and_endless_output_are_cut(sandbox: Sandbox):
    assert sandbox.run("exec head -c 9M /dev/zero > big", 20).exit_code == 153
    result = sandbox.run("exec yes", 20)
    assert result.exit_code == 153
    assert "bytes cut" in result.output
    assert len(result.output) < 1200
    with pytest.raises(OSError, match="larger"):
        sandbox.read("big")


def test_time_ends_everything_at_work(sandbox: Sandbox):
    result = sandbox.run("trap '' TERM; setsid sleep 50 & sleep 50", 0.3)
    assert (result.timed_out, result.exit_code, result.broke_sandbox) == (True, 137, False)


@pytest.mark.parametrize("command", ["kill -9 -1", "kill -9 1", "kill -STOP -1", "kill -9 $PPID", "exit 137"])
def test_killing_about_harms_nobody_else(sandbox: Sandbox, command: str):
    assert not sandbox.run(f"{command}; sleep 0.1", 2).broke_sandbox


def test_the_first_process_cannot_be_traced(sandbox: Sandbox):
    attach = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    assert sandbox.python(attach, 20).output == "-1\n"


def test_a_program_may_do_all_that_python_does(sandbox: Sandbox):
    program = "import sys, multiprocessing\nprint(__name__, sys.argv, sys.path[0] != '')\nraise SystemExit(7)"
    result = sandbox.python(program, 20)
    assert (result.output, result.exit_code) == ("__main__ [''] True\n", 7)
    assert sandbox.python("raise ValueError('here')", 20).exit_code == 1
    assert "ValueError: here" in sandbox.python("raise ValueError('here')", 20).output
    assert sandbox.python("def (", 20).exit_code == 1
    assert sandbox.python("import os; os.kill(os.getpid(), 9)", 20).exit_code == 137
