import resource
import signal
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_swe.base.drawing import FIRST, Drawing
from hpc_swe.base.errors import StorageError
from hpc_swe.base.metrics import METRICS, Log, meaning
from hpc_swe.base.rundir import RunDir
from hpc_swe.roles.inference.child import Child


@pytest.fixture
def run(tmp_path):
    made = RunDir(tmp_path / "run")
    made.make()
    return made


def curves(run):
    view = EventAccumulator(str(run.tensorboard))
    view.Reload()
    tags = [tag for tag in view.Tags()["scalars"] if not tag.startswith(FIRST)]
    return {tag: [(e.step, e.value) for e in view.Scalars(tag)] for tag in tags}


def test_lines_of_all_writers_become_curves(run):
    Log(run.metric_log("a")).write(0, {"reward/mean": 0.5})
    Log(run.metric_log("b")).write(0, {"learner/loss": 2.0})
    Drawing(run).update()
    assert curves(run) == {"reward/mean": [(0, 0.5)], "learner/loss": [(0, 2.0)]}


def test_drawing_goes_on_where_it_was(run):
    log, drawing = Log(run.metric_log("a")), Drawing(run)
    for step in range(3):
        log.write(step, {"reward/mean": step})
        drawing.update()
        drawing.update()
    assert curves(run) == {"reward/mean": [(0, 0), (1, 1), (2, 2)]}
    assert len(list(run.tensorboard.iterdir())) == 1


def test_a_step_trained_again_after_a_restart_is_one_point_the_later_one(run):
    drawing = Drawing(run)
    first = Log(run.metric_log("learner-1"))
    for step in range(4):
        first.write(step, {"learner/loss": 1.0})
    drawing.update()
    second = Log(run.metric_log("learner-0"))  # sorts before the first
    for step in range(2, 6):
        second.write(step, {"learner/loss": 2.0})
    drawing.update()
    expected = [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]
    assert curves(run) == {"learner/loss": expected}
    Drawing(run).update()
    assert curves(run) == {"learner/loss": expected}


def test_the_view_may_be_deleted(run):
    Log(run.metric_log("a")).write(3, {"reward/mean": 0.5})
    Drawing(run).update()
    before = curves(run)
    for path in run.tensorboard.iterdir():
        path.unlink()
    Drawing(run).update()
    assert curves(run) == before


def test_a_line_that_is_being_written_waits_and_a_broken_one_is_skipped(run, caplog):
    log, drawing = Log(run.metric_log("a")), Drawing(run)
    log.write(0, {"reward/mean": 1})
    with run.metric_log("a").open("ab") as file:
        file.write(b'{"step": 1, "time": 1.0, "values"')
        file.flush()
        drawing.update()
        file.write(b'"garbage"\n')
    log.write(2, {"reward/mean": 2})
    drawing.update()
    assert curves(run) == {"reward/mean": [(0, 1), (2, 2)]}
    assert "skipped 1 lines" in caplog.text


def test_numbers_that_are_not_finite_are_left_out_and_said(run, caplog):
    log = Log(run.metric_log("a"))
    log.write(4, {"reward/mean": float("nan"), "reward/std": 1.0})
    Drawing(run).update()
    assert curves(run) == {"reward/std": [(4, 1)]}
    assert "not finite at step 4: reward/mean" in caplog.text


def test_recent_values_are_kept_for_status(run):
    log = Log(run.metric_log("a"))
    for step in range(30):
        log.write(step, {"reward/mean": step})
    assert log.recent["reward/mean"] == [float(step) for step in range(10, 30)]


def test_every_meaning_is_one_line_and_patterns_are_understood():
    assert all(text and "\n" not in text for text in METRICS.values())
    assert meaning("exit/submitted") == METRICS["exit/*"]
    assert meaning("no/such") == ""


def test_a_torn_line_takes_no_other_along(run):
    """As a full disk leaves it: by this process, or by one before it with the same file."""
    log = Log(run.metric_log("a"))
    log.write(0, {"reward/mean": 0.0})
    with run.metric_log("a").open("ab") as file:
        file.write(b'{"step":1,"ti')
    log = Log(run.metric_log("a"))
    log.write(2, {"reward/mean": 2.0})
    log.write(3, {"reward/mean": 3.0})
    Drawing(run).update()
    assert curves(run) == {"reward/mean": [(0, 0), (2, 2), (3, 3)]}


def test_a_line_that_a_limit_cut_short_takes_no_other_along(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = Log(run.metric_log("a"))
    log.write(0, {"reward/mean": 0.0})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.metric_log("a").stat().st_size + 10, hard))
        log.write(1, {"reward/mean": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    log.write(2, {"reward/mean": 2.0})
    Drawing(run).update()
    assert curves(run) == {"reward/mean": [(0, 0), (2, 2)]}


def test_a_log_that_a_full_file_system_refuses_is_one_error(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        with pytest.raises(StorageError, match=rf"^{tmp_path}/log.jsonl: no space is left; free some"):
            Log(tmp_path / "log.jsonl")
        with pytest.raises(StorageError, match=rf"^{tmp_path}/engine.log: no space is left; free some"):
            Child(["false"], {}, tmp_path / "engine.log")
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
