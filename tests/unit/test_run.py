"""The keeper of a job's processes, on real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import DEADLINE_S, until

from hpc_swe.errors import StorageError
from hpc_swe.rundir import RunDir
from jobs.run import Gang, keep

COUNT = "import os, sys; f = open(sys.argv[1], 'a'); n = f.tell(); f.write('x'); f.flush();"


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.make()
    return run


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_process_that_dies_is_started_again(tmp_path, run):
    tally = tmp_path / "tally"
    gang = Gang([python(COUNT + "sys.exit(0 if n == 1 else os.kill(os.getpid(), 9))", tally)])
    assert keep(gang, run, max_restarts=3) == 0
    assert tally.read_text() == "xx"


def test_process_that_always_dies_is_given_up(tmp_path, run):
    tally = tmp_path / "tally"
    assert keep(Gang([python(COUNT + "sys.exit(1)", tally)]), run, max_restarts=1) == 1
    assert tally.read_text() == "xx"


def test_refusal_of_the_file_system_is_waited_out_and_counts_as_no_restart(tmp_path, run):
    tally = tmp_path / "tally"
    gang = Gang([python(COUNT + "sys.exit(4 if n < 3 else 0)", tally)])
    assert keep(gang, run, max_restarts=0, refused_s=0.1) == 0
    assert tally.read_text() == "xxxx"


@pytest.mark.parametrize("code", [2, 3])
def test_mistake_in_the_configuration_is_not_tried_again(tmp_path, run, code):
    tally = tmp_path / "tally"
    assert keep(Gang([python(COUNT + f"sys.exit({code})", tally)]), run, max_restarts=3) == code
    assert tally.read_text() == "x"


def test_order_to_stop_ends_the_restarts(tmp_path, run):
    tally = tmp_path / "tally"
    run.stop.touch()
    keep(Gang([python(COUNT + "sys.exit(1)", tally)]), run, max_restarts=3)
    assert tally.read_text() == "x"


@pytest.mark.slow
def test_leader_that_is_done_ends_a_companion_that_is_not(run):
    began = time.monotonic()
    gang = Gang([python("pass"), python("import time; time.sleep(600)")])
    assert keep(gang, run, max_restarts=0) == 0
    assert time.monotonic() - began < 500


def test_gang_that_starts_again_forgets_the_deadline_of_the_start_before(tmp_path, run):
    tally = tmp_path / "tally"
    failing = python(COUNT + "import time; time.sleep(1); sys.exit(1 if n == 0 else 0)", tally)
    gang = Gang([python("import time; time.sleep(0.1)"), failing])
    gang.start()
    assert gang.wait() == 1
    gang._until = 0.0  # long ago
    gang.start()
    assert gang.wait() == 0
    assert tally.read_text() == "xx", "it was given the time to do its work"


def test_rank_that_dies_takes_its_gang_along_and_all_start_again(tmp_path, run):
    code = (
        "import os, sys, time, pathlib; r = os.environ['RANK']; p = pathlib.Path(sys.argv[1]) / r;"
        "n = len(p.read_text()) if p.exists() else 0; p.open('a').write('x');"
        "assert os.environ['WORLD_SIZE'] == '2'\n"
        "while r == '1' and not p.with_name('0').exists(): time.sleep(0.01)\n"
        "n == 0 and r == '1' and os.kill(os.getpid(), 9); n == 0 and time.sleep(60)"
    )
    assert keep(Gang([python(code, tmp_path)] * 2), run, max_restarts=3) == 0
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "xx"


def test_rank_that_was_refused_is_believed_before_one_that_only_lost_it(tmp_path):
    """The other one's end is seen first."""
    refused = python(
        "import sys, time; open(sys.argv[1], 'w'); time.sleep(0.5); sys.exit(4)", tmp_path / "ready"
    )
    lost = python(
        "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit(1)",
        tmp_path / "ready",
    )
    for commands in ([refused, lost], [lost, refused]):
        gang = Gang(commands)
        gang.start()
        assert gang.wait() == StorageError.exit_code
        (tmp_path / "ready").unlink()


def test_signal_of_the_scheduler_reaches_the_children_and_nothing_starts_again(tmp_path, run):
    ready = tmp_path / "ready"
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(1));"
    code += "open(sys.argv[1], 'w'); time.sleep(60)"
    gang = Gang([python(code, ready)])
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(keep(gang, run, max_restarts=3)))
    thread.start()
    until(ready.exists)
    gang.forward(signal.SIGTERM, None)
    thread.join(DEADLINE_S)
    assert result == [1]


def test_signal_between_two_starts_is_not_lost(tmp_path, run):
    tally = tmp_path / "tally"
    gang = Gang([python(COUNT + "sys.exit(1)", tally)])
    thread = threading.Thread(target=lambda: keep(gang, run, max_restarts=3))
    thread.start()
    until(lambda: tally.exists() and tally.read_text() == "xxx")
    time.sleep(1.0)  # it has ended; the next start is due after four seconds
    gang.forward(signal.SIGTERM, None)
    thread.join(DEADLINE_S)
    assert (thread.is_alive(), tally.read_text()) == (False, "xxx")


def test_children_of_a_killed_keeper_die_with_it(tmp_path):
    pid_file = tmp_path / "pid"
    child = python(
        "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)", pid_file
    )
    keeper = subprocess.Popen(
        python(f"from jobs.run import Gang; g = Gang([{child!r}]); g.start(); g.wait()")
    )
    until(lambda: pid_file.exists() and pid_file.read_text())
    os.kill(keeper.pid, signal.SIGKILL)
    keeper.wait()
    until(lambda: not is_alive(int(pid_file.read_text())))
