"""Load does not choose by length which episodes are trained: the table of docs/scale.md, in small."""

import pytest

from tests.bench.lengths import LOADS, RULES, row

MEAN_S = 1200.0


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS[2:], ids=lambda load: load.name)
def test_trained_and_finished_episodes_are_as_long_as_those_asked_for(load):
    found = row(load, RULES[-1], 1, MEAN_S)
    assert found["without result"] < 0.002
    assert found["finished"] == pytest.approx(found["asked for"], rel=0.02)
    assert found["trained"] == pytest.approx(found["finished"], rel=1e-9)


def test_a_clock_that_counts_the_queue_would_be_seen():
    found = row(LOADS[2], RULES[0], 1, MEAN_S)
    assert found["finished"] < 0.9 * found["asked for"]
