"""What a step has to show for an alarm."""

import math

import pytest

from hpc_swe.roles.learner.alarm import Alarm

FINE = {"gap/k3": 0.001, "ratio/effective_share": 0.98, "policy/grad_norm": 0.2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gap/k3": 0.02}, "gap/k3 = 0.02 is above 0.01"),
        ({"ratio/effective_share": 0.3}, "ratio/effective_share = 0.3 is below 0.5"),
        ({"policy/grad_norm": 2.2}, "policy/grad_norm = 2.2 is 11 times the median of before"),
    ],
)
def test_a_step_out_of_the_ordinary_is_told_with_its_numbers(change, words):
    alarm = Alarm()
    assert [alarm.look(step, FINE) for step in range(6)] == [""] * 6
    assert alarm.look(6, FINE | change) == f"alarm in step 6: {words}"
    assert alarm.look(7, FINE) == ""


def test_norms_alarm_only_beside_several_others_and_stay_a_median():
    alarm = Alarm()
    assert [alarm.look(step, {"policy/grad_norm": norm}) for step, norm in enumerate([0.01, 5, 5, 5])] == [
        ""
    ] * 4
    assert alarm.look(4, {"policy/grad_norm": math.nan}) == "", "that is counted as skipped"
    assert alarm.look(5, {"policy/grad_norm": 5.0}) == ""
    assert all(alarm.look(step, {"policy/grad_norm": 51.0}) for step in (6, 7))


def test_a_batch_without_trained_tokens_is_no_alarm_and_no_sign():
    statistics = pytest.importorskip("hpc_swe.roles.learner.token_statistics")
    names = (*statistics.OF_POLICY, *statistics.OF_SAMPLER)
    found = statistics.means([0.0] * (1 + len(names) + statistics.BINS), (), is_sampled=True)
    assert Alarm().look(0, found) == ""
    assert "policy/entropy" not in found, "an entropy of 0 would end a run by stop.entropy_low"
