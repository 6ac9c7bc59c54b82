"""Loops are compared over equally many samples, from what runs log."""

import pytest

from hpc_swe.base.metrics import Log
from hpc_swe.base.records import MetricLine
from hpc_swe.config.config import from_words
from hpc_swe.view.benchmarks.loop import Loop, Step, compare, steps_of
from tests.kit.checkout import ROOT, typed
from tests.kit.reported_run import RunMaker


def learner(step: int, time: float, wait: float = 1.0) -> MetricLine:
    return MetricLine(step=step, time=time, values={"step_seconds/wait": wait})


def batch(step: int, samples: float, solved: float) -> MetricLine:
    values = {"episodes/finished": samples, "solve/train": solved}
    return MetricLine(step=step, time=float(step), values=values)


def test_a_step_begins_where_the_last_ended_and_the_first_is_left_out():
    batches = [batch(0, 8, 0.5), batch(1, 4, 0.25), batch(2, 4, 1.0)]
    steps = steps_of([batches, [learner(0, 100), learner(1, 130)]])
    assert [(step.seconds, step.samples) for step in steps] == [(30, 4)]


def test_batches_that_were_sampled_before_a_restart_do_not_make_a_run_fast():
    first = [learner(step, 20.0 * step) for step in range(4)]
    again = [learner(step, 100.0 + 2 * step) for step in (1, 2, 3)]  # sampled before the restart
    new = [learner(step, 25.0 * step) for step in (4, 5, 6, 7)]  # the first one waits for engines
    logs = [again + new, [batch(step, 4, 0.5) for step in range(8)], first]  # as their names sort them
    assert [step.seconds for step in steps_of(logs)] == [20, 20, 20, 25, 25, 25]
    assert [step.seconds for step in steps_of(logs, ahead=1)] == [20, 25]
    assert steps_of(logs, ahead=4) == []


@pytest.fixture(scope="module")
def config():
    return from_words([str(ROOT / "configs/demo.toml")])


def test_a_run_is_compared_with_the_best_synchronous_one(config):
    steps = [Step(10.0, {"episodes/finished": 10.0})]
    still = from_words([str(ROOT / "configs/demo.toml"), "groups.max_staleness=0"])
    fast = [Step(5.0, steps[0].values)]
    rates = compare({"sync": Loop(still, steps, {"greedy": [0.25, 0.5]}), "async": Loop(config, fast)})
    cells = {row[0]: row[1:] for row in zip(*(column.cells for column in rates.columns), strict=True)}
    assert cells["times the best synchronous"] == ("1.00", "2.00")
    assert cells["held-out greedy"] == ("0.250 to 0.500", "-")


@pytest.fixture
def made(tmp_path):
    maker = RunMaker(tmp_path / "made")
    curves = Log(maker.run.metric_log("learner-1"))
    for step in range(5):  # the first two and the last are left out, at staleness 1
        stages = {"seconds/engine": 2.0, "seconds/decode": 1.5, "episodes/prompt_tokens": 40.0}
        stages |= {"episodes/cached_tokens": 30.0, "engines/idle": 0.25}
        stages |= {"episodes/finished": 20.0, "episodes/tokens": 90.0, "episodes/trained_tokens": 80.0}
        curves.write(step, {"step_seconds/wait": 0.0, "solve/train": 0.5, **stages})
    return maker.run.root


def test_the_command_prints_rates(made):
    done = typed("hpc_swe.benchmarks.loop", made)
    assert done.returncode == 0, done.stderr
    assert "asynchronous" in done.stdout
    cells = {line.rpartition(" ")[0].strip(): line.split()[-1] for line in done.stdout.splitlines() if line}
    assert (cells["s in decode"], cells["prompts cached %"]) == ("1.5", "75.0")
    assert (cells["engine idle %"], cells["engine full %"]) == ("25.0", "0.0")
    assert (cells["samples"], cells["tokens a trained one"]) == ("40", "80")
    done = typed("hpc_swe.benchmarks.loop", made.parent)
    assert (done.returncode, done.stdout) == (2, "")
