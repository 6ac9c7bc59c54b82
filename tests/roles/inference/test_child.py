"""An engine whose processes the kernel does not let go is not replaced by another one."""

import os
import sys

import pytest

from hpc_swe.base.errors import NodeError
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
