"""Honest submissions and honest suites of unusual shapes: none is lost but by a rule that the docs state."""

import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.graders.swebench import Swebench
from tests.kit.cheats.honest_submissions import BY_RULE, SUBMISSIONS
from tests.kit.cheats.honest_suites import SUITES
from tests.kit.cheats.honest_tasks import WORK, of_files, of_repository
from tests.kit.constants import varied
from tests.kit.toy import Checkout, make_repository


def test_there_are_as_many_as_the_docs_say():
    assert (len(SUBMISSIONS), len(SUITES), len(BY_RULE)) == (42, 25, 4)


@pytest.mark.parametrize("sealed", [True, False])
def test_honest_work_is_paid_by_the_grader_of_plain_files(sealed):
    """All of it in one grading, since each starts pytest."""
    task, submission = of_files(WORK.values())
    score = varied(Pytest, sealed=sealed)().grade(task, submission, Process())
    assert (score.outcome, score.failed) == ("resolved", []), score


@pytest.mark.parametrize("piece", BY_RULE.values(), ids=BY_RULE.keys())
def test_what_a_stated_rule_forbids_is_lost(piece):
    task, submission = of_files([piece])
    score = Pytest().grade(task, submission, Process())
    assert score.outcome == "cheated", score


@pytest.mark.slow
def test_honest_work_is_paid_in_a_repository(tmp_path):
    base = make_repository(tmp_path / "calc")
    task, submission = of_repository(tmp_path, base, WORK.values())
    score = Swebench().grade(task, submission, Checkout(repository=str(tmp_path / "calc")))
    assert (score.outcome, score.failed) == ("resolved", []), score
