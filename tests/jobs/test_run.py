"""The watchdog of a job's processes, on real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpc_swe.base.errors import ConfigError, StorageError
from hpc_swe.cluster.processes import MEETING
from jobs import heartbeat
from jobs.run import ProcessGroup, supervise
from tests.kit.checkout import typed
from tests.kit.waiting import DEADLINE_S, until

COUNT = "import os, sys; f = open(sys.argv[1], 'a'); n = f.tell(); f.write('x'); f.flush();"


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    except OSError:
        return False


def test_process_that_dies_is_started_again(tmp_path, run):
    tally = tmp_path / "tally"
    group = ProcessGroup([python(COUNT + "sys.exit(0 if n == 1 else os.kill(os.getpid(), 9))", tally)])
    assert supervise(group, run, max_restarts=3) == 0
    assert tally.read_text() == "xx"


def test_process_that_always_dies_is_given_up(tmp_path, run):
    tally = tmp_path / "tally"
    assert supervise(ProcessGroup([python(COUNT + "sys.exit(1)", tally)]), run, max_restarts=1) == 1
    assert tally.read_text() == "xx"


def test_refusal_of_the_file_system_is_waited_out_and_counts_as_no_restart(tmp_path, run):
    tally = tmp_path / "tally"
    group, codes = ProcessGroup([python(COUNT + "sys.exit(4 if n < 3 else 0)", tally)]), list[int]()
    group.report = codes.append
    assert supervise(group, run, max_restarts=0, refused_s=0.1) == 0
    assert (tally.read_text(), codes) == ("xxxx", [4, 4, 4])


@pytest.mark.parametrize("code", [2, 3, 7])  # a mistake, a broken run, a node that cannot do the work
def test_what_no_restart_mends_is_not_tried_again(tmp_path, run, code):
    tally = tmp_path / "tally"
    assert supervise(ProcessGroup([python(COUNT + f"sys.exit({code})", tally)]), run, max_restarts=3) == code
    assert tally.read_text() == "x"


LEARNER = COUNT + "import time\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.01)"
ENGINE = COUNT + "import time; n == 0 and time.sleep(2); sys.exit(1 if n == 0 else 0)"


@pytest.mark.parametrize(("is_trained", "starts"), [(True, "xx"), (False, "x")])
def test_engines_outlast_a_learner_that_has_taken_its_last_step_alone(tmp_path, run, is_trained, starts):
    learner, engine = tmp_path / "learner", tmp_path / "engine"
    group = ProcessGroup([python(LEARNER, learner, engine), python(ENGINE, engine)])
    group.lasting, group.may_last = 1, lambda: is_trained
    assert supervise(group, run, max_restarts=3) == 0
    assert learner.read_text() == "x", "what is done is not started again"
    assert engine.read_text() == starts


@pytest.mark.slow
def test_leader_that_is_done_ends_a_companion_that_is_not(run):
    began = time.monotonic()
    group = ProcessGroup([python("pass"), python("import time; time.sleep(600)")])
    assert supervise(group, run, max_restarts=0) == 0
    assert time.monotonic() - began < 500


@pytest.mark.parametrize(
    ("codes", "is_stopping", "has_deadline"),
    [
        ([0, None, None], False, True),
        ([None, 0, None], False, False),
        ([None, 0, None], True, True),
        ([None, None, 0], True, False),
        ([None, None, None], True, False),
    ],
)
def test_ranks_that_wait_for_one_that_a_signal_ended_get_a_deadline(codes, is_stopping, has_deadline):
    """The last of three processes is an engine."""
    group = ProcessGroup([])
    group.lasting = 1
    if is_stopping:
        group.forward(signal.SIGTERM, None)
    assert group._goes_on(codes)
    assert (group._until < float("inf")) == has_deadline


@pytest.mark.slow
def test_gang_that_starts_again_forgets_the_deadline_of_the_start_before(tmp_path, run):
    tally = tmp_path / "tally"
    failing = python(COUNT + "import time; time.sleep(1); sys.exit(1 if n == 0 else 0)", tally)
    group = ProcessGroup([python("import time; time.sleep(0.1)"), failing])
    group.start()
    assert group.wait() == 1
    group._until = 0.0  # long ago
    group.start()
    assert group.wait() == 0
    assert tally.read_text() == "xx", "it was given the time to do its work"


@pytest.mark.slow
def test_rank_that_dies_takes_its_gang_along_and_all_start_again(tmp_path, run):
    code = (
        "import os, sys, time, pathlib; r = os.environ['RANK']; p = pathlib.Path(sys.argv[1]) / r;"
        "n = len(p.read_text()) if p.exists() else 0; p.open('a').write('x');"
        "assert os.environ['WORLD_SIZE'] == '2'\n"
        "while r == '1' and not p.with_name('0').exists(): time.sleep(0.01)\n"
        "n == 0 and r == '1' and os.kill(os.getpid(), 9); n == 0 and time.sleep(60)"
    )
    assert supervise(ProcessGroup([python(code, tmp_path)] * 2), run, max_restarts=3) == 0
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "xx"


def test_the_log_names_the_rank_that_was_killed_not_the_one_that_lost_it(tmp_path, caplog):
    """The kernel kills without a word when memory is short, and the other rank's error speaks of sockets."""
    group = ProcessGroup([python("import sys; sys.exit(1)"), python("import os; os.kill(os.getpid(), 9)")])
    group.start()
    assert group.wait() in (1, -9)
    assert "killed: process 1 of the job, by signal 9 (Killed)" in caplog.text
    assert caplog.text.count("killed: process") == 1


def test_rank_that_was_refused_is_believed_before_one_that_only_lost_it(tmp_path):
    """The other one's end is seen first."""
    ready = tmp_path / "ready"
    refused = python("import sys, time; open(sys.argv[1], 'w'); time.sleep(0.5); sys.exit(4)", ready)
    waits = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit(1)"
    lost = python(waits, ready)
    for commands in ([refused, lost], [lost, refused]):
        group = ProcessGroup(commands)
        group.start()
        assert group.wait() == StorageError.exit_code
        ready.unlink()


def test_signal_of_the_scheduler_reaches_the_children_and_restarts_nothing(tmp_path, run):
    ready = tmp_path / "ready"
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(1));"
    code += "open(sys.argv[1], 'w'); time.sleep(60)"
    group = ProcessGroup([python(code, ready)])
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(supervise(group, run, max_restarts=3)))
    thread.start()
    until(ready.exists)
    group.forward(signal.SIGTERM, None)
    thread.join(DEADLINE_S)
    assert result == [1]


def test_signal_that_comes_before_a_child_is_noted_reaches_it():
    group = ProcessGroup([python("import time; time.sleep(600)")])
    group.forward(signal.SIGTERM, None)
    group.start()
    assert group.wait() == -signal.SIGTERM


def test_children_of_a_killed_watchdog_die_with_it(tmp_path):
    pid_file = tmp_path / "pid"
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    child = python(code, pid_file)
    watchdog = subprocess.Popen(
        python(f"from jobs.run import ProcessGroup; g = ProcessGroup([{child!r}]); g.start(); g.wait()")
    )
    until(lambda: pid_file.exists() and pid_file.read_text())
    os.kill(watchdog.pid, signal.SIGKILL)
    watchdog.wait()
    until(lambda: not is_alive(int(pid_file.read_text())))


BEATING = "import sys, time; from jobs import heartbeat; heartbeat.start();"


@pytest.mark.slow
def test_stopped_rank_ends_the_gang_which_starts_again(tmp_path, run, capsys):
    """Each rank notes its pid; the second start of all of them ends well."""
    code = BEATING + "import os; f = open(sys.argv[1], 'a'); n = f.tell();"
    code += "print(os.getpid(), file=f, flush=True); time.sleep(600 if n < int(sys.argv[2]) else 0)"
    notes = [tmp_path / "0", tmp_path / "1"]
    group = ProcessGroup([python(code, note, 1) for note in notes])
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(supervise(group, run, max_restarts=3)))
    thread.start()
    until(lambda: all(note.exists() and note.read_text() for note in notes))
    began = time.monotonic()
    os.kill(int(notes[1].read_text()), signal.SIGSTOP)
    thread.join(DEADLINE_S)
    with capsys.disabled():
        print(f"\nrank stopped: all ranks started again and done after {time.monotonic() - began:.1f} s")
    assert codes == [0]
    assert [len(note.read_text().split()) for note in notes] == [2, 2]
    assert not any(is_alive(int(pid)) for note in notes for pid in note.read_text().split())


def test_silent_rank_is_frozen_and_one_that_ended_is_not(tmp_path):
    """As a rank of another node, of which the watchdog sees the beats alone."""
    environ = {**os.environ, MEETING: str(tmp_path)}
    code = BEATING.replace("heartbeat.start()", "heartbeat.BEAT_S = 0.01; heartbeat.start()")
    with (
        subprocess.Popen(python(code + "time.sleep(600)"), env=environ | {"RANK": "3"}) as rank,
        subprocess.Popen(python(code + "sys.stdin.read()"), env=environ | {"RANK": "4"}, stdin=-1) as other,
    ):
        until(lambda: len(list(tmp_path.glob(f"{heartbeat.BEATS}*"))) == 2)
        other.communicate()
        assert [path.name for path in tmp_path.glob(f"{heartbeat.BEATS}*")] == [f"{heartbeat.BEATS}3"]
        os.kill(rank.pid, signal.SIGSTOP)
        watch = heartbeat.HeartbeatMonitor(tmp_path, silent=5, look_s=0.05)
        until(lambda: "rank 3 gave no sign of life" in watch.frozen([]))
        rank.kill()


def test_full_node_local_file_system_makes_no_rank_seem_frozen(tmp_path, tmpfs):
    """Sandboxes fill /tmp, and the beats of every process of the node lie there."""
    tmpfs(tmp_path, "size=64k")
    code = BEATING.replace("heartbeat.start()", "heartbeat.BEAT_S = 0.01; heartbeat.start()")
    environ = {**os.environ, MEETING: str(tmp_path)}
    with subprocess.Popen(python(code + "time.sleep(600)"), env=environ | {"RANK": "3"}) as rank:
        beat = tmp_path / f"{heartbeat.BEATS}3"
        until(beat.exists, "a beat")
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "ballast").write_bytes(b"x" * 100_000)
        for _ in range(3):
            last = beat.read_bytes()
            until(lambda: beat.read_bytes() not in (last, b""), "a later beat")  # noqa: B023
        rank.kill()


def test_rank_that_started_on_a_full_file_system_is_not_frozen(tmp_path):
    """The file of its first beat could be made, and has no content until there is room."""
    beat = tmp_path / f"{heartbeat.BEATS}0"
    beat.touch()
    watch = heartbeat.HeartbeatMonitor(tmp_path, silent=3, look_s=0.0)
    assert [watch.frozen([]) for _ in range(9)] == [""] * 9
    beat.write_text("1")
    assert any("rank 0 gave no sign of life" in watch.frozen([]) for _ in range(9)), "it stopped"


def test_watchdog_that_slept_finds_its_children_alive(tmp_path):
    (tmp_path / f"{heartbeat.BEATS}0").write_text("1")
    watch = heartbeat.HeartbeatMonitor(tmp_path, silent=3)
    assert not watch.frozen([])
    watch._due = 0.0  # an hour later
    assert not watch.frozen([])


@pytest.mark.parametrize("by", ["signal", "order"])
def test_watchdog_that_waits_between_two_starts_ends_when_it_is_told(tmp_path, run, by):
    """As after a refusal of the file system, which is waited out for a minute."""
    tally = tmp_path / "tally"
    group, codes, reports = ProcessGroup([python(COUNT + "sys.exit(4)", tally)]), list[int](), list[int]()
    group.report = reports.append
    work = lambda: codes.append(supervise(group, run, max_restarts=3, refused_s=600.0))  # noqa: E731
    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: reports)
    group.forward(signal.SIGTERM, None) if by == "signal" else run.stop.touch()
    thread.join(30)
    assert codes == [4 if by == "signal" else 0]
    assert tally.read_text() == "x"


def test_meeting_folder_goes_with_the_group(tmp_path, run):
    out = tmp_path / "place"
    code = f"import os, sys; open(sys.argv[1], 'w').write(os.environ['{MEETING}'])"
    group = ProcessGroup([python(code, out)])
    assert supervise(group, run, max_restarts=0) == 0
    assert out.read_text()
    assert not Path(out.read_text()).exists()


def test_engines_beside_a_learner_have_no_deadline_after_its_end(tmp_path):
    done = tmp_path / "done"
    serve = "import os, sys, time; time.sleep(1); open(sys.argv[1], 'w').write(os.environ['WORLD_SIZE'])"
    group = ProcessGroup([python("pass"), python(serve, done)])
    group.lasting = 1
    group.start()
    assert group.wait() == 0
    assert group._until == float("inf")
    assert done.read_text() == "1", "the engine is no rank"


def test_a_job_whose_run_was_removed_while_it_waited_says_so_in_one_line(tmp_path):
    done = typed("jobs.run", "reward", tmp_path / "gone", "--submission", "3")
    assert done.returncode == ConfigError.exit_code
    assert f"{tmp_path}/gone: no run here" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "gone").exists()
