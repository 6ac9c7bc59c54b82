"""Processes of this machine are seen whole, whatever ends meanwhile."""

import contextlib
import os
import subprocess
import sys

from hpc_swe.plugins.sandboxes._session import end_namespace
from hpc_swe.processes import descendants, start_time

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
