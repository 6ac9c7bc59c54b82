"""Processes of this machine are seen whole, whatever ends meanwhile."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from hpc_swe.agents.sandboxes._session import end_namespace
from hpc_swe.cluster.processes import Flag, completed, descendants, free_port, printed, start_time, starved_s
from tests.kit.waiting import until

# Each child is started by a thread that ends at once.
RESTLESS = """
import subprocess, sys, threading
def begin():
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
while sys.stdin.readline():
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
"""
NAMED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(15, b") \\xff R 1")
if os.fork():
    print("up", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def started(program: str):
    """A Python program that is ended at exit, and what it started before."""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        for pid in [child.pid, *descendants(child.pid)]:
            os.kill(pid, 9)
        child.communicate()


def test_a_child_is_seen_while_the_thread_that_started_it_ends():
    with started(RESTLESS) as parent:
        for _ in range(80):
            parent.stdin.write("\n")
            parent.stdin.flush()
            born = int(parent.stdout.readline())
            assert all(born in descendants(parent.pid) for _ in range(3))


def test_a_process_s_own_choice_of_name_breaks_nothing():
    with started(NAMED) as parent:
        parent.stdout.readline()
        assert start_time(parent.pid) is not None
        (child,) = descendants(parent.pid)
        end_namespace(parent.pid)
        assert start_time(child) is not None, "it is no first process of a namespace"


SIGNALLED = """
import signal
from hpc_swe.cluster.processes import Flag
flag, handled = Flag(), []
signal.signal(signal.SIGALRM, lambda *_: (handled.append(1), flag.set()))
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
while len(handled) < 1000:
    flag.wait(1e-4)
    flag.clear()
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_flag_may_be_set_by_a_handler_that_interrupts_its_wait():
    done = subprocess.run([sys.executable, "-c", SIGNALLED], timeout=600)
    assert done.returncode == 0


def test_a_forked_child_sets_no_flag_of_its_parent():
    flag = Flag()
    child = os.fork()
    if child == 0:
        flag.set()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not flag.is_set()


def test_a_flag_wakes_a_wait_and_lasts_until_it_is_cleared():
    flag = Flag()
    assert not flag.wait(0.0)
    flag.set()
    flag.set()
    assert flag.wait(60.0)
    assert flag.is_set()
    flag.clear()
    assert not flag.is_set()


def test_a_worker_may_open_more_files_than_its_sandboxes():
    program = """
import resource
from hpc_swe.cluster.processes import allow_open_files
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
allow_open_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_free_port_lies_below_the_ephemeral_ports():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert free_port("127.0.0.1") < lowest <= server.getsockname()[1] or lowest <= 20_000


def test_a_late_command_is_left_although_another_process_holds_its_pipes(tmp_path):
    """subprocess.run would wait for that one, as for one in a frozen file system that no signal ends."""
    note, began = tmp_path / "pid", time.monotonic()
    job = subprocess.Popen(
        ["sh", "-c", f"setsid sleep 600 & echo $! > {note}; wait"], stdout=PIPE, stderr=PIPE
    )
    until(lambda: note.exists() and note.read_text().endswith("\n"), "its child")
    with pytest.raises(subprocess.TimeoutExpired):
        completed(job, 0.5)
    assert time.monotonic() - began < 300
    assert job.returncode == -9
    os.kill(int(note.read_text()), 9)


def test_waits_for_a_processor_are_read_while_processes_end():
    forks = "import os\nwhile True:\n    if os.fork() == 0: os._exit(0)\n    os.wait()"
    with subprocess.Popen([sys.executable, "-c", forks]) as job:
        try:
            assert all(starved_s(job.pid) >= 0 for _ in range(2000))
        finally:
            job.kill()


def test_a_completed_command_has_its_code_and_its_words():
    job = subprocess.Popen(["sh", "-c", "cat; exit 3"], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
    done = completed(job, 60, "words")
    assert (done.returncode, done.stdout, done.stderr) == (3, "words", "")


def test_a_command_is_late_by_its_silence_and_not_by_its_reader():
    slow = printed(["sh", "-c", "echo $$; echo word; exec sleep 60"], 2.0)
    with contextlib.suppress(KeyError), slow as output:
        pid = int(output.readline())
        time.sleep(2.5)
        assert output.read(5) == b"word\n"
        raise KeyError
    assert start_time(pid) is None
    with (
        pytest.raises(subprocess.CalledProcessError),
        printed(["sh", "-c", "echo part; exit 3"], 9) as output,
    ):
        assert output.read() == b"part\n"
    silent = printed(["sleep", "60"], 0.5)
    with pytest.raises(subprocess.TimeoutExpired, match="timed out after 0.5 seconds"), silent as output:
        output.read(1)
