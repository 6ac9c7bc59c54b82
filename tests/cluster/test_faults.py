"""What clusters do to jobs, done to one run fault by fault; at last all of its jobs are cancelled at once.

-k chooses faults: -k "cut or walltime" causes these two alone.
"""

import pytest

from tests.kit.cluster import faults, run_kit

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
CHECKPOINT_EVERY = 5
ROWS = list(faults.FAULTS)
MOST_LOST = {"poweroff-learner": 2 * CHECKPOINT_EVERY}
"""Learner steps; elsewhere none when a step and a save fit the notice, else one checkpoint's worth. When this
node is back, Slurm sends it the order to end the lost step, and hits the new one, which has its name."""
EITHER = {"cut", "slurmctld-start", "slurmctld-submission"}
"""The new coordinator may lose a race against the one behind the cut link, and leave; that one dies later. A
controller may have saved its state just before it was killed: it then remembers the start or submission."""


@pytest.fixture(scope="module")
def suffered(cluster, request):  # whose own says whether this machine can have one
    chosen = [name for name in ROWS if any(f"[{name}]" in item.name for item in request.session.items)]
    with run_kit.running(reward_min=2 if "walltime" in chosen else 30) as run:
        rows = faults.measure(run, chosen)
        print(f"\n{faults.markdown(rows)}")
        ending = faults.end(run)
    return dict(zip(chosen, rows, strict=True)), ending


@pytest.mark.parametrize("name", ROWS)
def test_what_clusters_do_to_jobs_costs_no_episode(suffered, name):
    row = suffered[0][name]
    assert row.episodes > 0
    assert (row.lost, row.twice) == (0, 0)
    assert row.by == faults.FAULTS[name].by or name in EITHER
    assert row.steps_lost <= MOST_LOST.get(name, CHECKPOINT_EVERY)


def test_every_group_is_closed_exactly_once(suffered):
    groups = suffered[1].groups
    assert sorted(groups) == list(range(len(groups)))
    assert groups, "nothing was trained"


def test_no_episode_is_lost_or_trained_twice(suffered):
    ending = suffered[1]
    assert (ending.books.lost, ending.books.twice, ending.dead) == (0, 0, 0)
