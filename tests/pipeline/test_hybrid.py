"""A whole run in which engine and learner use the same device in turns, and the learner is killed once."""

import os
import re
import signal

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

from hpc_swe.base.store import weights  # noqa: E402
from tests.kit.run_processes import role_pids  # noqa: E402

STEPS = 2
TWO = "learner.data_parallel=2"


def test_turns_end_with_their_holders_and_the_run_finishes(small_run, warm_model):
    killed = []

    def kill_once(run):
        if not killed and (version := weights.newest(run)) and version.step == 1:
            killed.append(role_pids(run, "learner")[0])
            os.kill(killed[0], signal.SIGKILL)

    words = [f"model={warm_model}", f"steps={STEPS}", "eval.every=0", "groups.resample=false"]
    run = small_run("hybrid", *words, TWO, "hybrid=true", "groups.max_staleness=0", each=kill_once)
    assert run.finished.exists()
    assert killed
    assert max(v.step for v in weights.published(run)) == STEPS
    log = "".join(path.read_text() for path in run.logs("learner").glob("*.log"))
    turns = re.findall(r"gave the GPUs back", log)
    assert len(turns) >= STEPS, "before each step the engine made room"
    served = re.findall(r"updated to v(\d+)-i\d+|serving v(\d+)-i\d+", log)
    assert {int(a or b) for a, b in served} >= {0, 1}
