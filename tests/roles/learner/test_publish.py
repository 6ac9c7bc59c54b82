"""Which versions of the weights are full snapshots, and which checkpoint a learner resumes from."""

import pytest

from hpc_swe.base.errors import NodeError
from hpc_swe.base.records import WeightVersion
from hpc_swe.base.store import skipped, weights
from hpc_swe.roles.learner.batch_source import Order
from hpc_swe.roles.learner.loop import LearnerPlan, learn
from hpc_swe.roles.learner.publish import Snapshots, _checkpoints
from tests.kit.coordinator_kit import export, save
from tests.kit.one_rank import Batches, publish_batch
from tests.roles.learner.test_save_clock import Slow


@pytest.mark.parametrize(
    ("snapshots", "step", "deltas", "carrier"),
    [
        (Snapshots(), 5, None, "full"),
        (Snapshots(), 5, 0, "full"),
        (Snapshots(every=4), 5, None, "base"),  # the first of a process: nothing is kept
        (Snapshots(every=4), 6, 0, "delta"),
        (Snapshots(every=4), 8, 2, "delta"),
        (Snapshots(every=4), 9, 3, "base"),
        (Snapshots(every=4, multiples=(0, 10)), 10, 1, "base"),  # evaluated, or a milestone
        (Snapshots(every=4, multiples=(0, 10)), 11, 0, "delta"),
        (Snapshots(every=4, last=7), 7, 1, "base"),
    ],
)
def test_a_full_version_comes_when_it_must(snapshots, step, deltas, carrier):
    assert snapshots.carrier(step, deltas) == carrier


@pytest.mark.parametrize(("order", "name"), [(Order.DRAIN, "v000002-i02"), (Order.LEAVE, "v000000-i01")])
def test_a_run_that_ends_early_ends_with_weights_that_others_open(run, order, name):
    """A job that the scheduler ends has a successor, whose first version is full."""
    for step in range(2):
        publish_batch(run, step)
    plan = LearnerPlan(9, 1, 100, 0.0, max_skipped=1, writer="w", snapshots=Snapshots(every=9))
    learn(run, Slow(), None, plan, Batches(run, {2: [order]}), lambda *_: None)
    assert weights.newest_full(run).name == name
    assert weights.newest(run).step == 2


def test_a_checkpoint_that_may_not_be_finite_is_taken_last(run):
    for step in (2, 4):
        save(run, step, 1)
    export(run, WeightVersion(incarnation=1, step=3))
    run.batch(2).mkdir()

    def steps() -> list[int]:
        return [manifest.step for _, manifest in _checkpoints(run)]

    assert steps() == [4, 2]
    with pytest.raises(NodeError):
        skipped.refuse_weights(run, 6, "x is not finite")
    assert steps() == [2, 4]
    run.batch(2).rmdir()
    assert steps() == [4, 2], "the learner would wait for the batch that is gone"
    run.batch(2).mkdir()
    export(run, WeightVersion(incarnation=2, step=6))  # the steps were repeated, and all was well
    assert steps() == [4, 2]


def test_what_the_last_learner_saved_comes_before_later_steps_of_another(run):
    """A learner that had to go back trains other batches than the one before it, whose steps went further."""
    for step, incarnation in ((4, 1), (2, 2), (3, 2)):
        save(run, step, incarnation)
    found = [(manifest.incarnation, manifest.step) for _, manifest in _checkpoints(run)]
    assert found == [(2, 3), (2, 2), (1, 4)]
