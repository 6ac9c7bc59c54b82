"""Two minutes of what soak.py does for longer."""

import pytest

from tests.bench import soak

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def report(cluster):  # whose own says whether this machine can have one
    found = soak.soak(minutes=2.0, seed=7)
    print(f"\n{found}")
    return found


def test_every_group_is_closed_exactly_once(report):
    assert sorted(report.groups) == list(range(len(report.groups)))
    assert report.groups, "nothing was trained"


def test_no_episode_is_lost_or_trained_twice(report):
    assert (report.books.lost, report.books.twice, report.dead) == (0, 0, 0)


def test_there_were_faults_of_several_kinds(report):
    assert len(report.faults) > soak.LEAST_KINDS
