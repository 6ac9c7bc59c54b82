"""Every row of the table of faults, on one run."""

import pytest

from tests.bench import faults

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
CHECKPOINT_EVERY = 5
MOST_LOST = {"poweroff-learner": 2 * CHECKPOINT_EVERY}
"""Learner steps; elsewhere none when a step and a save fit the notice, else one checkpoint's worth. When this
node is back, Slurm sends it the order to end the lost step, and hits the new one, which has its name."""
EITHER = {"cut", "slurmctld-start", "slurmctld-submission"}
"""The new coordinator may lose a race against the one behind the cut link, and leave; that one dies later. A
controller may have saved its state just before it was killed: it then remembers the start or submission."""


@pytest.fixture(scope="module")
def rows(cluster):  # whose own says whether this machine can have one
    found = faults.measure(list(faults.FAULTS))
    print(f"\n{faults.markdown(found)}")
    return dict(zip(faults.FAULTS, found, strict=True))


@pytest.mark.parametrize("name", faults.FAULTS)
def test_what_clusters_do_to_jobs_costs_no_episode(rows, name):
    row = rows[name]
    assert row.episodes > 0
    assert (row.lost, row.twice) == (0, 0)
    assert row.by == faults.FAULTS[name].by or name in EITHER
    assert row.steps_lost <= MOST_LOST.get(name, CHECKPOINT_EVERY)
