"""What a cheat costs, so that a policy gains nothing by trying one."""

import pytest

from hpc_swe.tasks.graders.base import RESOLVED
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.graders.swebench import Swebench


@pytest.mark.parametrize("grader", [Pytest(), Swebench()], ids=["pytest", "swebench"])
def test_a_lie_that_is_paid_once_in_31_times_is_worth_less_than_a_failure(grader):
    lie = (RESOLVED + 30 * grader.cheated_reward) / 31
    assert lie < grader.unresolved_reward
