"""Batches that were skipped are counted in the run folder, whichever start of the learner skipped them."""

import pytest

from hpc_swe.rundir import RunDir
from hpc_swe.store import skipped


@pytest.mark.parametrize(
    ("batches", "steps", "in_a_row"),
    [
        ([], [], []),
        ([(3, False)], [], []),
        ([(3, True), (4, True)], [3, 4], [3, 4]),
        ([(3, True), (4, False), (5, True)], [5], [5]),
        ([(3, True), (4, True), (3, True)], [3, 4], [3, 4]),  # a restart repeats batch 3
        ([(3, True), (4, True), (3, False)], [4], [4]),
        ([(3, True), (4, True), (2, False), (3, True), (4, True), (5, True)], [3, 4, 5], [3, 4, 5]),
        ([(3, True), (6, True), (4, True)], [3, 4, 6], [3, 4]),
    ],
)
def test_the_count_goes_on_over_restarts(tmp_path, batches, steps, in_a_row):
    run = RunDir(tmp_path)
    run.make()
    for step, is_skipped in batches:
        skipped.enter(run, step, is_skipped)
    assert skipped.read(run).steps == steps
    assert skipped.read(run).in_a_row == in_a_row
    assert bool(skipped.refusal(run, limit=1)) == (len(in_a_row) > 1)
