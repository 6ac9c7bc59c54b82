"""What clusters do to jobs, done to one run: first fault by fault, then a minute of them at random."""

import pytest

from tests.bench import faults, soak
from tests.kit.cluster import run_kit

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
CHECKPOINT_EVERY = 5
ROWS = [
    *("walltime", "preempt-requeue", "preempt-cancel", "poweroff-learner", "poweroff", "cut"),
    *("slurmctld-start", "slurmctld-submission", "slurmdbd"),
]
"""The other rows are gentler, or ticks of which test_ticks.py says what they submit."""
MOST_LOST = {"poweroff-learner": 2 * CHECKPOINT_EVERY}
"""Learner steps; elsewhere none when a step and a save fit the notice, else one checkpoint's worth. When this
node is back, Slurm sends it the order to end the lost step, and hits the new one, which has its name."""
EITHER = {"cut", "slurmctld-start", "slurmctld-submission"}
"""The new coordinator may lose a race against the one behind the cut link, and leave; that one dies later. A
controller may have saved its state just before it was killed: it then remembers the start or submission."""


@pytest.fixture(scope="module")
def suffered(cluster):  # whose own says whether this machine can have one
    with run_kit.running(reward_min=2) as run:
        rows = faults.measure(run, ROWS)
        print(f"\n{faults.markdown(rows)}")
        report = soak.soak(run, minutes=1.0, seed=7)
        print(f"\n{report}")
    return dict(zip(ROWS, rows, strict=True)), report


@pytest.mark.parametrize("name", ROWS)
def test_what_clusters_do_to_jobs_costs_no_episode(suffered, name):
    row = suffered[0][name]
    assert row.episodes > 0
    assert (row.lost, row.twice) == (0, 0)
    assert row.by == faults.FAULTS[name].by or name in EITHER
    assert row.steps_lost <= MOST_LOST.get(name, CHECKPOINT_EVERY)


def test_every_group_is_closed_exactly_once(suffered):
    report = suffered[1]
    assert sorted(report.groups) == list(range(len(report.groups)))
    assert report.groups, "nothing was trained"


def test_no_episode_is_lost_or_trained_twice(suffered):
    report = suffered[1]
    assert (report.books.lost, report.books.twice, report.dead) == (0, 0, 0)


def test_there_were_faults_of_several_kinds(suffered):
    assert len(suffered[1].faults) > soak.LEAST_KINDS
