"""Batches that were skipped are counted in the run folder, whichever start of the learner skipped them."""

import pytest

from hpc_swe.base.errors import ConfigError, NodeError
from hpc_swe.base.store import skipped


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
def test_the_count_goes_on_over_restarts(run, batches, steps, in_a_row):
    for step, is_skipped in batches:
        skipped.enter(run, step, is_skipped)
    assert skipped.read(run).steps == steps
    assert skipped.read(run).in_a_row == in_a_row
    assert bool(skipped.refusal(run, limit=1)) == (len(in_a_row) > 1)


@pytest.mark.parametrize("last", [5, 4])
def test_weights_that_are_refused_twice_up_to_one_step_are_final(run, last):
    """Ticks then submit nothing. Batches that are trained in between change nothing."""
    for step in (3, 5):
        with pytest.raises(NodeError, match=f"x is not finite, after step {step}; a faulty node"):
            skipped.refuse_weights(run, step, "x is not finite")
        skipped.enter(run, 1, True)
        skipped.enter(run, 2, False)
        assert skipped.refusal(run, limit=1) == ""
    with pytest.raises(ConfigError, match="lower learner.optimizer.lr"):
        skipped.refuse_weights(run, last, "x is not finite")
    assert f"remove {run.skipped_steps}" in skipped.refusal(run, limit=1)
