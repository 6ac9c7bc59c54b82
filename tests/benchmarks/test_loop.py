"""Loops are compared over equally many samples, from what runs log."""

import subprocess
import sys

import pytest

from hpc_swe.benchmarks.loop import first_samples, solve_rates, steps_of
from hpc_swe.metrics import Log
from hpc_swe.records import MetricLine
from tests.kit.checkout import ROOT, environment
from tests.kit.reported_run import RunMaker


def learner(step: int, time: float, wait: float = 1.0) -> MetricLine:
    return MetricLine(step=step, time=time, values={"step_seconds/wait": wait})


def batch(step: int, samples: float, solved: float) -> MetricLine:
    values = {"length/finished_d0": samples, "solve/train": solved}
    return MetricLine(step=step, time=float(step), values=values)


def test_a_step_begins_where_the_last_ended_and_the_first_is_left_out():
    steps = steps_of(
        [batch(0, 8, 0.5), learner(0, 100), batch(1, 4, 0.25), learner(1, 130), batch(2, 4, 1.0)]
    )
    assert [(step.seconds, step.samples) for step in steps] == [(30, 4)]


def test_a_step_that_a_restart_repeated_ends_when_it_ended_last():
    steps = steps_of([learner(0, 10), learner(1, 20), learner(2, 30), learner(1, 70), learner(2, 80)])
    assert [step.seconds for step in steps] == [60, 10]


def test_runs_are_compared_over_equally_many_samples():
    lines = [line for n in range(5) for line in (batch(n, 4, n / 4), learner(n, 10.0 * n))]
    steps = steps_of(lines)
    assert len(first_samples(steps, 8)) == 2
    assert len(first_samples(steps, 9)) == 3
    assert solve_rates(steps) == [0.25, 0.5, 0.75, 1.0]


@pytest.fixture
def made(tmp_path):
    maker = RunMaker(tmp_path / "made")
    curves = Log(maker.run.metric_log("learner-1"))
    deciles = {
        f"length/{kind}_d{n}": float(kind != "dropped")
        for kind in ("finished", "trained", "dropped")
        for n in range(10)
    }
    for step in range(3):
        curves.write(step, {"step_seconds/wait": 0.0, "solve/train": 0.5, "seconds/engine": 2.0, **deciles})
    return maker.run.root


def test_the_command_prints_rates_and_counts_by_length(made):
    command = [sys.executable, "-m", "hpc_swe.benchmarks.loop"]
    done = subprocess.run([*command, made], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "asynchronous" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("made")]
    assert ["made", "trained", *["2"] * 10] in rows
    done = subprocess.run(
        [*command, made.parent], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
