"""An engine's processes, and what its guard sees of others."""

import os
import signal
import subprocess
import sys

import pytest

from hpc_swe.base.errors import NoAnswer, NodeError
from hpc_swe.cluster.processes import descendants, start_time
from hpc_swe.roles.inference import guard
from hpc_swe.roles.inference.child import Child
from tests.kit.tracing import ALLOWS, traced
from tests.kit.waiting import until

ENGINE = f"""{ALLOWS}
import os, threading, time
def thread():
    print(os.getpid(), threading.get_native_id(), flush=True)
    time.sleep(600)
threading.Thread(target=thread).start()
"""


@pytest.mark.slow
def test_a_killed_engine_that_does_not_end_is_an_error_of_the_node(tmp_path):
    log = tmp_path / "engine.log"
    child = Child([sys.executable, "-c", ENGINE], dict(os.environ), log)
    until(lambda: log.read_text().endswith("\n"), "the engine's thread")
    pid, thread = map(int, log.read_text().split())
    with traced(thread), pytest.raises(NodeError, match=rf"memory of GPUs: {pid}; see .*engine\.log"):
        child.stop(killed_s=0.5)
    child.stop()


SERVER = """import subprocess, sys, time
core = 'open("/proc/self/comm", "w").write("VLLM::EngineCore"); print(1, flush=True); input()'
subprocess.Popen([sys.executable, "-c", core], stdin=subprocess.PIPE)
time.sleep(600)
"""


def test_a_server_whose_core_is_dead_is_not_waited_for(tmp_path):
    """vLLM's server may then answer neither a request nor a question of its health."""
    log = tmp_path / "engine.log"
    child = Child([sys.executable, "-c", SERVER], dict(os.environ), log, vital="VLLM::")
    try:
        until(lambda: log.read_text() == "1\n", "the core")
        core = descendants(child._guard.pid)[-1]
        for _ in range(2):
            child._due = 0.0
            child.require_alive()
        os.kill(core, signal.SIGKILL)
        until(lambda: start_time(core) is None, "the core's end")
        child._due = 0.0
        with pytest.raises(NoAnswer, match=f"VLLM::EngineCor, process {core} of the engine, has ended"):
            child.require_alive()
    finally:
        child.stop()


NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, b'() \\xff R 1)'); print(1, flush=True); input()"


def test_a_process_whose_name_is_no_text_ends_no_guard():
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in guard._others()
        child.communicate()
