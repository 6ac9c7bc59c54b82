"""Claims among thousands of workers, and the rest that keeps them from asking too often."""

import pytest

from hpc_swe.roles.worker import FIRST_PAUSE_S, MAX_SLOWDOWN, Backoff
from tests.bench.simulate import Settings, simulate


def rests(*rounds: tuple[int, int, int], poll_s: float = 0.5) -> list[float]:
    worker = Backoff(poll_s)
    found = []
    for free, claimed, lost in rounds:
        worker.after(free, claimed, lost)
        found.append(worker.pause_s)
    return found


def test_a_worker_that_finds_nothing_rests_twice_as_long_each_time():
    assert rests(*[(1, 0, 0)] * 5) == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_worker_without_a_free_slot_only_looks_for_orders():
    assert rests((0, 3, 0), (0, 0, 0), (1, 0, 0)) == [
        MAX_SLOWDOWN * 0.5,
        MAX_SLOWDOWN * 0.5,
        2 * FIRST_PAUSE_S,
    ]


def test_lost_races_slow_a_worker_down_and_claims_speed_it_up_again():
    slowed = rests(*[(1, 0, 3)] * 8)
    assert slowed[0] == 2 * 0.1
    assert slowed[-1] == MAX_SLOWDOWN * 0.5
    assert rests(*[(1, 0, 3)] * 8, *[(1, 1, 0)] * 8)[-1] == FIRST_PAUSE_S


@pytest.mark.slow
@pytest.mark.parametrize("load", [1.1, 0.5], ids=["requests wait", "workers wait"])
def test_a_thousand_workers_win_most_races_and_keep_their_slots_busy(load):
    found = simulate(Settings(workers=1024, load=load, lasts_s=500.0, warm_s=350.0))
    assert found["lost races/claim"] < 1
    assert found["slots at work"] > 0.9 * min(load, 1.0)
    assert found["changes/episode"] == pytest.approx(13, rel=0.1)
