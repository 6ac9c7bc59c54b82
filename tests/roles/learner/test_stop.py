"""Signs of a failing training: which end a run, which are not enough, and what a restart makes of them."""

import math

import pytest

from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import stop_signs
from hpc_swe.config.settings import StopConfig

stop = pytest.importorskip("hpc_swe.roles.learner.stop")

FINE = {"policy/entropy": 0.3, "gap/k3": 1e-4, "episodes/tokens": 100.0, "groups/all_solved": 0.2}


def steps(run: RunDir, config: StopConfig, changes: dict[str, list[float]], first: int = 0) -> list[str]:
    """Enter a step for each value; return what each says."""
    count = len(next(iter(changes.values())))
    rows = [FINE | {curve: values[n] for curve, values in changes.items()} for n in range(count)]
    return [stop.enter(run, first + n, row, config, lambda: None) for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("config", "curve", "values", "reason"),
    [
        ({"entropy_low": 0.1}, "policy/entropy", [0.05, 0.2, 0.05, 0.06, 0.07], "below 0.1 in steps 2 to 4"),
        ({"entropy_high": 1.0}, "policy/entropy", [2, 2, 0.9, 2, 3, 4], "above 1 in steps 3 to 5: 2 3 4"),
        (
            {"gap": 0.01},
            "gap/k3",
            [0.02, 0.02, 0.03],
            "above 0.01 in steps 0 to 2: 0.02 0.02 0.03 (stop.gap)",
        ),
        ({"all_solved": 0.9}, "groups/all_solved", [0.95, 0.8, 0.95, 0.95, 1], "above 0.9 in steps 2 to 4"),
        # the mean of the first three is 100
        ({"length_growth": 2}, "episodes/tokens", [90, 110, 100, 150, 210, 199, 201, 220, 230], "above 200"),
    ],
)
def test_a_sign_in_three_batches_in_a_row_ends_the_run(run, config, curve, values, reason):
    found = steps(run, StopConfig(**config), {curve: values})
    assert found[:-1] == [""] * (len(values) - 1)
    assert found[-1].startswith(f"{curve} was ")
    assert reason in found[-1]


def test_without_bounds_nothing_ends_and_later_ones_know_the_first_steps(run):
    assert steps(run, StopConfig(), {"episodes/tokens": [100.0] * 3 + [300.0] * 8}) == [""] * 11
    assert [each.step for each in stop_signs.read(run).steps] == [0, 1, 2]
    found = steps(run, StopConfig(length_growth=2), {"episodes/tokens": [300.0] * 3}, 11)
    assert found[:-1] == ["", ""]
    assert "above 200 in steps 11 to 13" in found[-1]


def test_the_record_stays_small_and_knows_the_first_lengths(run):
    config = StopConfig(length_growth=3)
    assert not any(steps(run, config, {"episodes/tokens": [100.0] * 3 + [250.0] * 40}))
    assert [each.step for each in stop_signs.read(run).steps] == [0, 1, 2, 40, 41, 42]


def test_steps_that_are_trained_again_replace_themselves(run):
    config = StopConfig(gap=0.01)
    assert steps(run, config, {"gap/k3": [0.1, 0.1]}) == ["", ""]
    assert steps(run, config, {"gap/k3": [0.1, 0.1]}) == ["", ""], "two steps, each of them twice"
    assert steps(run, config, {"gap/k3": [0.1]}, first=2)[0]
    assert [each.step for each in stop_signs.read(run).steps] == [0, 1, 2]


def test_a_step_without_a_number_shows_nothing(run):
    config = StopConfig(gap=0.01)
    assert steps(run, config, {"gap/k3": [0.1, math.nan, 0.1, 0.1]}) == [""] * 4
    assert steps(run, config, {"gap/k3": [0.1]}, first=4)[0]


def test_a_person_who_changes_the_bounds_lets_the_run_go_on(run):
    config = StopConfig(length_growth=2)
    assert steps(run, config, {"episodes/tokens": [100.0] * 3 + [300.0] * 3})[-1]
    stop_signs.forgive(run)
    assert stop_signs.read(run).reason == ""
    assert steps(run, StopConfig(length_growth=4), {"episodes/tokens": [390.0] * 9}, 6) == [""] * 9
    assert steps(run, StopConfig(length_growth=4), {"episodes/tokens": [410.0] * 3}, 15)[-1]
