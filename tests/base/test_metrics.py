from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_swe.base.drawing import FIRST, Drawing
from hpc_swe.base.metrics import Log


def curves(run):
    view = EventAccumulator(str(run.tensorboard))
    view.Reload()
    tags = [tag for tag in view.Tags()["scalars"] if not tag.startswith(FIRST)]
    return {tag: [(e.step, e.value) for e in view.Scalars(tag)] for tag in tags}


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
