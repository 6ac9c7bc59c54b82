"""When tests are run a second time."""

import threading

from hpc_swe.tasks.second_run import oom_kills, run_reliably
from tests.kit.waiting import DEADLINE_S


def test_only_a_run_that_is_late_or_lost_a_process_is_repeated():
    for late, counts, runs in ((False, [3, 3], 1), (True, [3, 3], 2), (False, [3, 4], 2), (True, [3, 4], 2)):
        made: list[int] = []
        count = iter(counts).__next__
        ended = run_reliably(
            lambda made=made: made.append(1) or len(made), lambda _, late=late: late, 9.0, count
        )
        assert ended == runs


def test_kills_are_those_of_the_job_and_else_of_the_node(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("4:cpu:/\n0::/job/step\n")
    (tmp_path / "job" / "step").mkdir(parents=True)
    events = tmp_path / "job" / "step" / "memory.events"
    events.write_text("low 0\noom 9\noom_kill 7\noom_group_kill 0\n")
    assert oom_kills(tmp_path, own) == 7
    events.unlink()
    own.write_text("4:cpuset,memory:/job\n0::/job/step\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.oom_control").write_text("under_oom 0\noom_kill 5\n")
    assert oom_kills(tmp_path, own) == 5
    own.write_text("")
    assert oom_kills(tmp_path, own) >= 0


def test_tests_that_never_end_keep_no_other_grading_waiting():
    """Second runs take turns; who does not get one in time is judged by the first."""
    begun, over = threading.Event(), threading.Event()
    runs = iter([lambda: "late", lambda: (begun.set(), over.wait(DEADLINE_S))[1] and "late"])
    first = threading.Thread(target=lambda: run_reliably(lambda: next(runs)(), lambda _: True, DEADLINE_S))
    first.start()
    assert begun.wait(DEADLINE_S)
    try:
        made: list[int] = []
        assert run_reliably(lambda: made.append(1) or len(made), lambda _: True, 0.1) == 1
    finally:
        over.set()
        first.join()
