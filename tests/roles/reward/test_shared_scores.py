"""Equal patches of a task are graded once, and nobody's misfortune is shared."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from msgspec.structs import replace

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import SandboxError
from hpc_swe.base.records import RolloutRequest, Score
from hpc_swe.config.settings import RewardConfig
from hpc_swe.roles.reward.shared_scores import SharedScores
from hpc_swe.roles.reward.worker import RewardResources, judge
from hpc_swe.tasks.graders.pytest import Pytest
from hpc_swe.tasks.patch import difference
from tests.kit.cheats.cheat_task import RIGHT, TASK
from tests.kit.waiting import DEADLINE_S, until
from tests.roles.reward.test_worker import Judge, episode

WRONG = Score(outcome="unresolved", reward=0.0, seconds=2 * DEADLINE_S, is_final=True)


class Noting(Judge):
    """A grader that notes what it is asked."""

    def __init__(self, is_repeatable: bool = True) -> None:
        self.is_repeatable, self.asked = is_repeatable, list[str]()

    def grade(self, task, submission, sandboxes):
        self.asked.append(submission)
        return replace(super().grade(task, submission, sandboxes), is_final=bool(submission))


def judged(task, grader, *episodes) -> list[Score]:
    means = RewardResources({task.task_id: task}, Process(), grader, RewardConfig())
    return [judge(means, each) for each in episodes]


def test_equal_patches_are_graded_once_but_in_an_evaluation(task):
    grader, first = Noting(), episode(0, "one")
    evaluated = replace(first, request=replace(first.request, split="eval"))
    second = replace(first, request=sibling(1))
    found = judged(task, grader, first, episode(0, "two"), second, episode(1, "one"), evaluated)
    assert grader.asked == ["one", "two", "one", "one"]
    assert [score.graded_as for score in found] == ["", "", "train-000000-00", "", ""]
    assert {(score.outcome, score.reward) for score in found} == {("unresolved", 0.0)}


def test_siblings_share_a_score_of_pytest():
    right = episode(0, difference("mod.py", TASK.files["mod.py"], RIGHT), task_id=TASK.task_id)
    found = judged(TASK, Pytest(), right, right)
    assert [score.graded_as for score in found] == ["", "train-000000-00"]
    assert {score.outcome for score in found} == {"resolved"}


@pytest.mark.parametrize(
    ("patch", "is_repeatable"), [("one", False), ("host", True), ("bug", True), ("", True)]
)
def test_chance_failures_and_empty_patches_are_not_shared(task, patch, is_repeatable):
    grader = Noting(is_repeatable)
    found = judged(task, grader, episode(0, patch), episode(0, patch))
    assert ([score.graded_as for score in found], len(grader.asked)) == (["", ""], 2)
    assert found[0] == found[1]


def sibling(index: int) -> RolloutRequest:
    return replace(episode(0, "").request, index=index)


LATE = replace(WRONG, is_final=False)


@pytest.mark.parametrize("first", [WRONG, LATE, SandboxError("the node has no room")])
def test_a_patch_waits_for_that_of_an_equal_one_and_takes_a_final_score(first):
    shared, may_end, graded = SharedScores(), Event(), []

    def awaited() -> Score:
        graded.append(1)
        assert may_end.wait(DEADLINE_S)
        if isinstance(first, SandboxError):
            raise first
        return first

    def one(index: int, grade=lambda: replace(WRONG, seconds=1.0)) -> Score:
        return shared.score(sibling(index), "patch", DEADLINE_S, grade)

    with ThreadPoolExecutor(4) as threads:
        leader = threads.submit(one, 0, awaited)
        until(lambda: graded)
        others = [threads.submit(one, index) for index in (1, 2, 3)]
        may_end.set()
        found = [each.result() for each in others]
    assert leader.exception() in (None, first)
    assert {score.graded_as == sibling(0).name for score in found} == {first is WRONG}
    assert all(score.seconds < WRONG.seconds for score in found), "each costs its wait, or a grading"
    one(4)
    assert one(5, None).graded_as, "after a failure the next good score is shared"


def test_the_oldest_score_is_forgotten_and_one_of_many_tests_not_kept():
    shared, many = SharedScores(most=2), replace(WRONG, failed=[""] * 1001)
    graded = [shared.score(sibling(0), patch, 0.0, lambda: WRONG).graded_as != "" for patch in "abcbca"]
    assert graded == [False, False, False, True, True, False]
    assert [shared.score(sibling(0), "many", 0.0, lambda: many).graded_as for _ in range(2)] == ["", ""]


def test_a_frozen_grading_holds_an_equal_patch_for_its_limit_only():
    shared, may_end = SharedScores(), Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(shared.score, sibling(0), "patch", 1.0, lambda: may_end.wait(DEADLINE_S) and WRONG)
        until(lambda: shared._known)
        assert shared.score(sibling(1), "patch", 0.05, lambda: WRONG).graded_as == ""
        may_end.set()
