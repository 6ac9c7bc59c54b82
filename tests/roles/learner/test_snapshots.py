"""Which versions of the weights are full snapshots."""

import pytest

from hpc_swe.roles.learner.publish import Snapshots


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
