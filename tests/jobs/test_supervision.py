"""The watchdog obeys verdicts about its children: their stacks are kept, and they start again."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpc_swe.base.errors import NodeError, StuckRun
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, supervision
from hpc_swe.base.store.supervision import StuckProcess, Verdict
from hpc_swe.cluster.processes import MEETING
from hpc_swe.config import config as configuration
from jobs import stacks
from jobs.run import STUCK, ProcessGroup, await_end, supervise
from jobs.supervision import VerdictReader
from tests.kit.checkout import ROOT
from tests.kit.tracing import ALLOWS, traced
from tests.kit.waiting import until

BEGIN = "import ctypes, os, sys, time; from jobs import stacks; stacks.register()\n"
NOTE = "f = open(sys.argv[1], 'a'); n = f.tell(); print(os.getpid(), file=f, flush=True)\n"
HANGS = """
def hang_in_a_library():
    while True: ctypes.PyDLL(None).sleep(600)  # with Python's lock
if n < int(sys.argv[2]): hang_in_a_library()
"""


def watchdog(run: RunDir, codes: list[int], *commands: list[str], role="learner", stuck_s=4.0):
    """A group and its watchdog, in a thread."""
    words = ["model=m", f"supervision.stuck_s={stuck_s}", "max_restarts=2", "lease.ttl_s=1.0"]
    config = configuration.read(ROOT / "configs/demo.toml", overrides=words)
    group = ProcessGroup(commands, verdicts=VerdictReader(run, role, config, True, 0.0))
    threading.Thread(target=lambda: codes.append(supervise(group, run, 0)), daemon=True).start()
    return group


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def accuse(run: RunDir, number: int, pid: int, role="learner", *, gave_up: bool = False) -> None:
    process = StuckProcess(owner=f"{role}-1-aa", host=socket.gethostname(), pid=pid)
    found = Verdict(number=number, role=role, processes=[process], reason="r", tries=1, gave_up=gave_up)
    supervision.publish(run, found)


def pids(*notes: Path) -> list[int]:
    return [int(word) for note in notes if note.exists() for word in note.read_text().split()]


@pytest.mark.slow
def test_ranks_of_which_one_hangs_inside_a_library_start_again_with_stacks(run, tmp_path):
    notes, codes = [tmp_path / "0", tmp_path / "1"], []
    watchdog(run, codes, *[python(BEGIN + NOTE + HANGS, note, 1) for note in notes])
    until(lambda: len(pids(*notes)) == 2)
    time.sleep(1.0)  # both hang, and the watchdog has looked for older verdicts
    accuse(run, 1, pids(*notes)[1])
    until(lambda: codes == [0])
    assert len(pids(*notes)) == 4
    text = run.stack(1, "learner-1-aa").read_text()
    assert text.count("in hang_in_a_library") == 2
    assert supervision.read(run).number == 1


@pytest.mark.slow
def test_a_verdict_that_gives_up_ends_the_job_for_good(run, tmp_path):
    """The supervisor of an engine that somebody else runs lives in the coordinator's job."""
    codes: list[int] = []
    watchdog(run, codes, python(BEGIN + NOTE + HANGS, tmp_path / "0", 9), role="coordinator")
    until(lambda: pids(tmp_path / "0"))
    time.sleep(1.0)
    accuse(run, 1, pids(tmp_path / "0")[0], "inference", gave_up=True)
    until(lambda: codes == [StuckRun.exit_code])
    assert (len(pids(tmp_path / "0")), run.stop.exists()) == (1, True)
    assert run.stack(1, "inference-1-aa").exists()


@pytest.mark.slow
def test_a_process_that_hangs_when_the_run_ends_does_not_hold_its_job(run, tmp_path, caplog):
    codes: list[int] = []
    watchdog(run, codes, python(BEGIN + NOTE + HANGS, tmp_path / "0", 9), stuck_s=1.0)
    until(lambda: pids(tmp_path / "0"))
    time.sleep(1.0)
    run.stop.touch()
    until(lambda: codes == [STUCK])
    assert "in hang_in_a_library" in caplog.text


def test_a_killed_child_that_the_kernel_does_not_let_go_ends_its_job():
    text = f"{ALLOWS}import time; print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen(python(text), stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline()
    complaint = f"killed processes do not end within 3 s: {child.pid} Z"
    with traced(child.pid), pytest.raises(NodeError, match=complaint):
        await_end([child], 0.1, 3.0)
    assert child.wait(10) == -signal.SIGKILL


@pytest.mark.slow
def test_verdicts_about_others_and_from_before_are_nobody_s_order(run, tmp_path):
    codes: list[int] = []
    accuse(run, 3, 1)
    waits = python(BEGIN + NOTE + "sys.stdin.read() if 0 else time.sleep(2.5)", tmp_path / "0")
    watchdog(run, codes, waits)
    until(lambda: pids(tmp_path / "0"))
    (pid,) = pids(tmp_path / "0")
    time.sleep(0.8)
    accuse(run, 3, pid)
    accuse(run, 4, pid + 1)
    until(lambda: codes == [0])
    assert (pids(tmp_path / "0"), atomic.names(run.stacks)) == ([pid], [])


@pytest.mark.slow
def test_a_coordinator_whose_main_loop_stands_still_is_found(run, tmp_path):
    """It beats on; the second start turns its loop until it ends."""
    lives = (
        "from pathlib import Path; from hpc_swe.base.rundir import RunDir\n"
        "from hpc_swe.base.store.lease import Lease\n"
        "with Lease(RunDir(Path(sys.argv[2])), 'coordinator', '1', 0.2) as lease:\n"
        "    for _ in range(80 if n else 10): lease.turn(); time.sleep(0.1)\n"
        "    if not n: time.sleep(600)\n"
    )
    codes: list[int] = []
    (run.nodes / "coordinator-0-aa.json").write_bytes(b"\0" * 50)  # of one whose node lost power
    began = time.monotonic()
    watchdog(
        run, codes, python(BEGIN + NOTE + lives, tmp_path / "0", run.root), role="coordinator", stuck_s=2.0
    )
    until(lambda: codes == [0])
    assert time.monotonic() - began > 2.0
    assert len(pids(tmp_path / "0")) == 2
    verdict = supervision.read(run)
    assert (verdict.number, verdict.tries, verdict.role) == (1, 1, "coordinator")
    assert "_run_beats" in run.stack(1, verdict.processes[0].owner).read_text()


def test_no_process_without_a_handler_is_signalled(tmp_path):
    """The signal would end it."""
    other = subprocess.Popen(["sleep", "60"])
    text = stacks.collect([other.pid], tmp_path)
    assert other.poll() is None
    assert f"{other.pid} S" in text
    assert "'sleep'" in text
    other.kill()
    other.wait()


def test_stacks_of_many_threads_are_cut_and_the_main_thread_is_kept(tmp_path):
    code = BEGIN + "import threading\n"
    code += "def deep(n): return deep(n - 1) if n else time.sleep(600)\n"
    code += "for _ in range(60): threading.Thread(target=deep, args=(40,), daemon=True).start()\n"
    code += "def the_main_thread(): print(1, flush=True); time.sleep(600)\nthe_main_thread()\n"
    environ = {**os.environ, MEETING: str(tmp_path)}
    with subprocess.Popen(python(code), env=environ, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        text = stacks.collect([child.pid], tmp_path)
        child.send_signal(signal.SIGKILL)
    assert "in the_main_thread" in text
    assert len(text) < stacks.MOST + 1000
