"""Intervals that cover, gains that are paired."""

import numpy as np
import pytest

from hpc_swe.base import intervals


def test_interval_over_tasks_covers_the_truth_about_as_often_as_it_says():
    rng, hits = np.random.default_rng(0), 0
    for _ in range(60):
        chances = rng.uniform(0, 1, 40)
        outcomes = {str(i): (rng.random(4) < p).astype(float).tolist() for i, p in enumerate(chances)}
        estimate = intervals.solve_rate(outcomes)
        hits += estimate.low <= 0.5 <= estimate.high
    assert 50 <= hits <= 60


def test_gain_is_paired_by_task():
    before = {str(i): [i / 20] for i in range(20)}
    after = {task: [value[0] + 0.01] for task, value in before.items()}
    estimate = intervals.gain(before, after)
    assert estimate.low == pytest.approx(0.01)
    with pytest.raises(ValueError, match="different tasks"):
        intervals.gain(before, {"other": [1.0]})


@pytest.mark.parametrize(
    ("tasks", "solved", "gain"), [(5, 0.0, 0.6), (3, 1.0, 1.0), (30, 0.0, 0.1), (2, 0.0, 1.0)]
)
def test_tasks_with_equal_outcomes_do_not_show_that_no_gain_is_missed(tasks, solved, gain):
    alike = {str(i): [solved] for i in range(tasks)}
    assert intervals.detectable(alike) == pytest.approx(gain)
    third = {task: [0.3] for task in alike}
    assert intervals.detectable_gain(third, {task: [0.1 + 0.2] for task in alike}) == pytest.approx(gain)
