"""Nothing of a session goes on between its messages, whatever its program prepares."""

import time
from collections.abc import Iterator

import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.agents.sandboxes.base import Sandbox, SessionEnded
from hpc_swe.base.records import Task

pytestmark = pytest.mark.slow
ANSWERS = """
import ctypes, os, signal, struct, sys, threading, time
libc = ctypes.CDLL(None)

def after(seconds, number):
    '''Let a timer of the kernel send this process a signal once.'''
    timer, event = ctypes.c_void_p(), struct.pack("qii48x", 0, number, 0)
    while libc.timer_create(1, event, ctypes.byref(timer)):
        time.sleep(0.01)  # the kernel refuses while the user has too many signals pending
    when = divmod(int(seconds * 10**9), 10**9)
    libc.timer_settime(timer, 0, struct.pack("4q", 0, 0, *when), None)

def write():
    while True:
        with open("alive", "ab") as file:
            file.write(b"x")
        time.sleep(0.002)

def child(prepare, act):
    done, says = os.pipe()
    if os.fork() == 0:
        prepare()
        os.write(says, b"x")
        act()
    os.read(done, 1)

def answer():
    while os.read(int(sys.argv[1]), 4):
        os.write(int(sys.argv[2]), struct.pack(">I", 2) + b"ok")
"""
ESCAPES = {
    "a child whom the program does not adopt": """
libc.prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
if os.fork() == 0:
    child(lambda: None, write)
    os._exit(0)
os.wait()
answer()
""",
    "a child that wakes after the program's end": """
child(lambda: after(1.2, signal.SIGCONT), write)
after(0.6, signal.SIGKILL)
answer()
""",
    "a child that wakes itself": """
child(lambda: after(1.0, signal.SIGCONT), write)
answer()
""",
    "a child that runs for moments": """
def moments():
    while True:
        began = time.process_time()
        while time.process_time() < began + 0.005:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)

child(lambda: [after(0.02 * number, signal.SIGCONT) for number in range(1, 150)], moments)
answer()
""",
    "threads without the first one": """
threading.Thread(target=write).start()
threading.Thread(target=lambda: time.sleep(0.3) or answer()).start()
libc.syscall(60, 0)  # exit, of this thread alone
""",
}


@pytest.fixture(scope="module")
def sandbox(apptainer: Apptainer, task: Task) -> Iterator[Sandbox]:
    with apptainer.open(task) as opened:
        yield opened


@pytest.mark.parametrize("escape", ESCAPES)
def test_nothing_of_a_session_goes_on_between_its_messages(sandbox, escape):
    sandbox.write("alive", b"")
    with sandbox.session(ANSWERS + ESCAPES[escape]) as session:
        assert session.ask(b"", 60) == b"ok"
        time.sleep(2.5)  # all that was prepared has begun
        size = len(sandbox.read("alive"))
        time.sleep(0.5)
        assert len(sandbox.read("alive")) == size
        if escape == "threads without the first one":  # they were stopped like any others
            assert session.ask(b"", 60) == b"ok"
        else:
            with pytest.raises(SessionEnded) as ended:
                session.ask(b"", 60)
            assert not ended.value.broke_sandbox
    assert sandbox.run("echo alive", 60).output == "alive\n"
