import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_swe.base.records import Sampling
from hpc_swe.roles.coordinator.dispatch import RequestPlan, dispatch_end, retry_request

PLAN = RequestPlan(3, 4, Sampling())


def test_members_share_the_task_and_nothing_else():
    members = [request for g in range(100) for request in PLAN.group(g, "t")]
    assert len({m.seed for m in members}) == len(members)
    assert len({m.name for m in members}) == len(members)
    assert len({m.task_id for m in PLAN.group(9, "t")}) == 1


def test_another_attempt_keeps_the_name_and_changes_the_seed():
    first = PLAN.group(0, "t")[0]
    second, third = retry_request(first), retry_request(retry_request(first))
    assert {second.name, third.name} == {first.name}
    assert (second.attempt, third.attempt) == (1, 2)
    assert len({first.seed, second.seed, third.seed}) == 3
    assert retry_request(first) == second


def window(next_batch=0, newest=0, staleness=0, per_step=4, rate=1.0):
    return newest + staleness + 1 - next_batch, per_step, rate


@pytest.mark.parametrize(
    ("given_window", "signals", "expected"),
    [
        (window(), {}, 4),  # on policy: one batch
        (window(staleness=1), {}, 8),
        (window(rate=0.5), {}, 8),  # over-dispatch by the measured rate
        (window(rate=0.0), {}, 40),  # bounded
        (window(next_batch=1), {}, 0),  # batch 1 needs weights 1
        (window(next_batch=1, newest=1), {}, 4),
        (window(next_batch=9, newest=4, staleness=2), {}, 0),  # a learner that fell back
        (window(), {0: True, 1: False, 2: False}, 6),  # replacements at once
        (window(), {g: False for g in range(20)}, 24),
        (window(), {g: True for g in range(4)}, 4),
    ],
)
def test_dispatch_goes_as_far_as_the_foreseen_batch_allows(given_window, signals, expected):
    assert dispatch_end(0, signals.get, *given_window) == expected


@given(st.integers(0, 99), st.integers(0, 3), st.floats(0.05, 1.0), st.integers(1, 5))
def test_no_run_of_outcomes_starves_the_learner_or_outruns_it(seed, staleness, share, per_step):
    """Close everything that may be dispatched, in any order; a batch always comes of it."""
    draw = random.Random(seed)
    signals: dict[int, bool] = {}
    first, rate = 0, 1.0
    for step in range(6):
        while sum(signals.get(g, False) for g in range(first, first + len(signals) + 1)) < per_step:
            edge = dispatch_end(first, signals.get, *window(step, step, staleness, per_step, rate))
            todo = [g for g in range(first, edge) if g not in signals]
            assert todo, "nothing may be dispatched, and nothing is open: deadlock"
            signals[draw.choice(todo)] = draw.random() < share
        used, done = first, 0
        while done < per_step:
            if used not in signals:
                signals[used] = draw.random() < share  # lower-numbered groups close first
            done += signals[used]
            used += 1
        rate = (rate * per_step + per_step) / (per_step + used - first)
        signals = {g: signal for g, signal in signals.items() if g >= used}
        first = used
