"""A worker has fewer episodes at once where engines let their requests wait, and more where they do not."""

import pytest

from hpc_swe.base.records import EngineStages
from hpc_swe.roles.rollout.admission import Admission

ROOM = 40


def generation(admission: Admission, room: int) -> None:
    """End as many episodes as run, at an engine with room for some of them."""
    active = admission.allowed(0)
    admission.allowed(active)
    waited_s = max(0.0, active / room - 1)
    for _ in range(active):
        admission.note(EngineStages(queue_s=waited_s, decode_s=1.0))


@pytest.mark.parametrize(("slots", "low", "high"), [(128, ROOM, 1.3 * ROOM), (16, 16, 16), (1000, 125, 125)])
def test_it_finds_the_level_of_the_engine(slots: int, low: float, high: float) -> None:
    admission = Admission(slots)
    for _ in range(30):
        generation(admission, ROOM)
    assert low <= admission.limit <= high
    for _ in range(30):
        generation(admission, 2000)
    assert admission.limit == slots


def test_episodes_that_ran_before_the_last_change_change_nothing() -> None:
    admission = Admission(10)
    for _ in range(10):
        admission.note(EngineStages(queue_s=1.0))
    fewer = admission.limit
    admission.allowed(10)  # none has ended since
    for _ in range(fewer):
        admission.note(EngineStages(queue_s=1.0))
    assert fewer == admission.limit == 8


def test_engines_that_say_nothing_leave_all_slots() -> None:
    admission = Admission(4)
    for _ in range(8):
        admission.note(EngineStages())
    assert admission.limit == 4
