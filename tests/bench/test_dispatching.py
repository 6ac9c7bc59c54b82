"""No trained token is older than the limit, however the share of groups with signal changes."""

import pytest

from tests.bench.dispatching import RATES, Loop

STEPS = 24


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("name", RATES)
def test_no_batch_is_older_than_the_limit_at_any_rate_of_signal(name: str, staleness: int) -> None:
    loop = Loop(RATES[name], staleness, seed=1, steps=STEPS).run()
    assert max(loop.ages) <= staleness
    assert len(loop.ages) == STEPS
    assert loop.dropped < 0.3
