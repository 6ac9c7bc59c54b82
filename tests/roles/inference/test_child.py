"""An engine's processes, and what its guard sees of others."""

import os
import subprocess
import sys

import pytest

from hpc_swe.base.errors import NodeError
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


NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, b'() \\xff R 1)'); print(1, flush=True); input()"


def test_a_process_whose_name_is_no_text_ends_no_guard():
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in guard._others()
        child.communicate()
