"""A debugging session ends with its time, its episode, its sandbox and its worker, and leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_swe.agents.loops.tool_agent import ToolAgent
from hpc_swe.base.errors import EngineError
from hpc_swe.cluster.processes import descendants, start_time
from tests.kit import checkout
from tests.kit.debugging import made, require, session, task
from tests.kit.scripted import Script, call
from tests.kit.waiting import until

SPIN = "import os\nopen('pid', 'w').write(str(os.getpid()))\nif os.fork():\n    while True:\n        pass\n"
SPIN += "while True:\n    open('alive', 'w').write('x')\n"


@pytest.fixture(params=["process", pytest.param("apptainer", marks=pytest.mark.slow)])
def kind(request) -> str:
    return require(request.param)


START, GO = call("pdb", command="start", file="spin.py"), call("pdb", command="c")


def alive() -> dict[int, str | None]:
    """This process's children and theirs, but not the containers that stay warm."""
    found = {pid: start_time(pid) for pid in descendants(os.getpid())}
    texts = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found if Path(f"/proc/{pid}").exists()}
    return {pid: found[pid] for pid, text in texts.items() if b"apptainer" not in text.lower()}


def test_the_seconds_of_all_calls_bound_a_session_s_calls(kind):
    of = task(spin="import re\nwhile True:\n    pass\n")
    agent = ToolAgent(tools=({"type": "pdb", "timeout_s": 1000.0, "grace_s": 1000.0},), tool_budget_s=2.0)
    with made(kind).open(of) as sandbox:
        result = agent.solve(of, sandbox, Script(START, GO))
        assert result.exit_status == "tool_time"
        assert result.tools_s < 600, "neither of the thousands"
        assert "so the session was ended" in result.messages[-1].content


@pytest.mark.slow
@pytest.mark.parametrize("end", ["submit", "turns", "error"])
def test_a_session_ends_with_the_agent_and_before_its_patch_is_taken(kind, end):
    of = task(spin=SPIN)
    agent = ToolAgent(
        tools=({"type": "pdb", "timeout_s": 2.0, "grace_s": 5.0}, "submit"),
        max_turns=2 if end == "turns" else 3,
    )
    last = {"submit": call("submit"), "turns": GO, "error": EngineError("gone")}[end]
    with made(kind).open(of) as sandbox:
        sandbox.python("", 60.0)  # starts the interpreter that stays warm
        before = set(alive())
        try:
            agent.solve(of, sandbox, Script(START, GO, last))
        except EngineError:
            assert end == "error"
        sandbox.write("alive", b"")
        time.sleep(0.3)
        assert sandbox.read("alive") == b"", "nothing of the program goes on"
        if kind == "process":
            assert set(alive()) <= before
            assert "pid" not in sandbox.paths() or start_time(int(sandbox.read("pid"))) is None


def test_a_session_that_is_left_open_ends_with_its_sandbox(kind):
    of = task(spin=SPIN)
    before = set(alive())
    with session(made(kind), of) as debug:
        debug.start("spin.py")
        debug.hurry(0.5)
        debug("c")
    until(lambda: set(alive()) <= before, "the end of the session's processes")


@pytest.mark.parametrize("state", ["waits", "runs"])
def test_a_session_ends_when_its_worker_is_killed(kind, state, tmp_path):
    line = [sys.executable, "-m", "tests.kit.debugging", kind, *(["run"] if state == "runs" else [])]
    environment = checkout.environment(TMPDIR=str(tmp_path))
    worker = subprocess.Popen(line, stdout=subprocess.PIPE, env=environment, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "started\n"
    if state == "runs":
        time.sleep(0.5)
    found = {pid: start_time(pid) for pid in descendants(worker.pid)}
    assert found
    worker.send_signal(signal.SIGKILL)
    worker.wait(60)
    until(lambda: not [pid for pid, born in found.items() if born and start_time(pid) == born], "their end")
