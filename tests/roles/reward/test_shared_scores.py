"""Equal patches of a task are graded once, and nobody's misfortune is shared."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from msgspec.structs import replace

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import SandboxError
from hpc_swe.base.records import Score
from hpc_swe.config.settings import RewardConfig
from hpc_swe.roles.reward.shared_scores import SharedScores
from hpc_swe.roles.reward.worker import RewardResources, judge
from tests.kit.waiting import DEADLINE_S, until
from tests.roles.reward.test_worker import Judge, episode

WRONG = Score(outcome="unresolved", reward=0.0, seconds=2 * DEADLINE_S, is_final=True)


class Noting(Judge):
    """A grader that notes what it is asked."""

    def __init__(self, is_repeatable: bool = True) -> None:
        self.is_repeatable, self.asked = is_repeatable, list[str]()

    def grade(self, task, submission, sandboxes):
        self.asked.append(f"{task.task_id} {submission}")
        return replace(super().grade(task, submission, sandboxes), is_final=bool(submission))


def judged(task, grader, *episodes) -> list[Score]:
    tasks = {"t": task, "u": replace(task, task_id="u")}
    means = RewardResources(tasks, Process(), grader, RewardConfig())
    return [judge(means, each) for each in episodes]


def test_equal_patches_are_graded_once_but_in_an_evaluation(task):
    grader, tried = Noting(), episode(2, "one")
    evaluated = replace(tried, request=replace(tried.request, split="eval"))
    others = episode(0, "one"), episode(1, "two")
    found = judged(task, grader, *others, tried, episode(3, "one", task_id="u"), evaluated)
    assert grader.asked == ["t one", "t two", "u one", "t one"]
    assert [score.graded_as for score in found] == ["", "", "train-000000-00", "", ""]
    assert {(score.outcome, score.reward) for score in found} == {("unresolved", 0.0)}


@pytest.mark.parametrize(
    ("patch", "is_repeatable"), [("one", False), ("host", True), ("bug", True), ("", True)]
)
def test_chance_failures_and_empty_patches_are_not_shared(task, patch, is_repeatable):
    grader = Noting(is_repeatable)
    found = judged(task, grader, episode(0, patch), episode(1, patch))
    assert ([score.graded_as for score in found], len(grader.asked)) == (["", ""], 2)
    assert found[0] == found[1]


def _raise() -> Score:
    raise SandboxError("the node has no room")


def _late() -> Score:
    return replace(WRONG, is_final=False)


@pytest.mark.parametrize("first", [lambda: WRONG, _raise, _late])
def test_a_patch_waits_for_that_of_an_equal_one_and_takes_a_final_score(first):
    shared, may_end, graded = SharedScores(), Event(), []

    def awaited() -> Score:
        graded.append(1)
        assert may_end.wait(DEADLINE_S)
        return first()

    def one(name: str, grade=lambda: replace(WRONG, seconds=1.0)) -> Score:
        return shared.score(name, "t", "patch", DEADLINE_S, grade)

    with ThreadPoolExecutor(4) as threads:
        leader = threads.submit(one, "e0", awaited)
        until(lambda: graded)
        others = [threads.submit(one, name) for name in ("e1", "e2", "e3")]
        may_end.set()
        found = [each.result() for each in others]
    assert (leader.exception() is None) == (first is not _raise)
    assert {score.graded_as == "e0" for score in found} == {first not in (_raise, _late)}
    assert all(score.seconds < WRONG.seconds for score in found), "each costs its wait, or a grading"
    one("e4")
    assert one("e5", _raise).graded_as, "after a failure the next good score is shared"


def test_the_oldest_score_is_forgotten_and_one_of_many_tests_not_kept():
    shared, many = SharedScores(most=2), replace(WRONG, failed=[""] * 1001)
    graded = [shared.score(patch, "t", patch, 0.0, lambda: WRONG).graded_as for patch in "abcbca"]
    assert graded == ["", "", "", "b", "c", ""]
    assert [shared.score("n", "t", "many", 0.0, lambda: many).graded_as for _ in range(2)] == ["", ""]


def test_a_frozen_grading_holds_an_equal_patch_for_its_limit_only():
    shared, may_end = SharedScores(), Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(shared.score, "e0", "t", "patch", 1.0, lambda: may_end.wait(DEADLINE_S) and WRONG)
        until(lambda: shared._known)
        assert shared.score("e1", "t", "patch", 0.05, lambda: WRONG).graded_as == ""
        may_end.set()
