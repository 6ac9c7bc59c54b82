"""The reward worker meets others only in the run folder."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import ConfigError, SandboxError
from hpc_swe.base.records import Episode, RolloutRequest, Sampling, Score, ScoredEpisode, Task, Timing
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.lease import Lease
from hpc_swe.base.store.spool import Spool
from hpc_swe.config.settings import RewardConfig
from hpc_swe.roles.reward.worker import MAX_DETAIL, RewardResources, self_check, worker
from hpc_swe.tasks.graders.base import Grader
from tests.kit.constants import varied
from tests.kit.waiting import DEADLINE_S, until


class Judge(Grader):
    """A grader that says what the submission says."""

    unresolved_reward = -0.5

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        if submission == "host":
            raise SandboxError("the disk is full")
        if submission == "bug":
            raise KeyError("bug")
        if submission == "configuration":
            raise ConfigError("no such row")
        if submission.startswith("await"):
            until(Path(submission.split()[1]).exists)
        detail = 1_000_000 * "x" if submission == "long" else ""
        return Score(outcome="unresolved" if submission else "no_submission", reward=0.0, detail=detail)


class Trial(Judge):
    """A grader that can be tried, and that wants to see the result of an episode before its self-check.

    Nothing is no solution for it in one of two ways: tests fail, or it takes no empty patch, as one that has
    no `examine`.
    """

    def __init__(self, run: RunDir, *, errs: bool = False) -> None:
        self.run, self.errs = run, errs
        self.waited: list[bool] = []

    def grade(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        return self.tried(True) if submission == "right" else super().grade(task, submission, sandboxes)

    def examine(self, task: Task, submission: str, sandboxes: Sandboxes) -> Score:
        assert not submission
        return self.tried(False)

    def tried(self, is_right: bool) -> Score:
        until(lambda: scores(self.run), "the episode's result")
        self.waited.append(True)
        refused = ("unresolved", "no_submission")[len(self.waited) % 2]
        return Score(outcome="resolved" if is_right or self.errs else refused, reward=1.0)


def episode(number: int, submission: str, exit_status: str = "submitted", task_id: str = "t") -> Episode:
    request = RolloutRequest(group_id=number, index=0, task_id=task_id, seed=0, sampling=Sampling())
    return Episode(
        request=request,
        turns=[],
        messages=[],
        exit_status=exit_status,
        submission=submission,
        timing=Timing(),
        worker="w",
        error="why",
    )


def put(run: RunDir, *episodes: Episode) -> None:
    for one in episodes:
        Spool(run.episodes, Episode).put(one.request.name, one)


def scores(run: RunDir) -> dict[int, Score]:
    spool = Spool(run.scored, ScoredEpisode)
    found = [spool.read(address) for address in spool.addresses("ready")]
    return {one.episode.request.group_id: one.score for one in found if one is not None}


def work(
    run: RunDir, task: Task, done: Callable[[], bool], order: str = "DRAIN", trial: Trial | None = None
) -> None:
    config = varied(RewardConfig, self_check_every=1 if trial else 100)(slots=2)
    with Lease(run, "reward", "test", 1.0) as lease:
        means = RewardResources(
            {"t": task}, Process(), trial or Judge(), config, {"t": "right"} if trial else {}
        )
        grader = worker(run, lease, means, 0.05)
        failures: list[BaseException] = []

        def body() -> None:
            try:
                grader.work()
            except ConfigError as error:
                failures.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        until(lambda: done() or not thread.is_alive())
        (run.control / order).touch()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def states(run: RunDir) -> dict[str, int]:
    return {
        state: len(Spool(run.episodes, Episode).addresses(state)) for state in ("ready", "claimed", "dead")
    }


def test_every_episode_gets_the_score_it_deserves(run, task):
    put(
        run,
        episode(0, "text"),
        episode(1, ""),
        episode(2, "text", "infra_error"),
        episode(3, "text", "agent_error"),
        episode(4, "host"),
        episode(5, "text", task_id="unknown"),
    )
    work(run, task, lambda: len(scores(run)) == 6)
    outcomes = {number: score.outcome for number, score in scores(run).items()}
    assert outcomes == {
        0: "unresolved",
        1: "no_submission",
        2: "infra_error",
        3: "no_submission",
        4: "infra_error",
        5: "infra_error",
    }
    assert scores(run)[2].detail == "why"
    assert scores(run)[4].detail == "the disk is full"
    assert states(run) == {"ready": 0, "claimed": 0, "dead": 0}


def test_an_exception_of_a_grader_costs_its_episode_and_the_worker_goes_on(run, task, caplog):
    put(run, episode(0, "bug"), episode(1, "text"))
    work(run, task, lambda: len(scores(run)) == 2)
    found = scores(run)
    assert (found[0].outcome, found[0].reward) == ("unresolved", -0.5)
    assert found[0].detail == "the grader broke: KeyError: 'bug'"
    assert found[1].reward == 0.0
    assert "grader broke on train-000000-00" in caplog.text


def test_a_wrong_configuration_of_a_grader_ends_the_worker(run, task):
    put(run, episode(0, "configuration"))
    with pytest.raises(ConfigError, match="no such row"):
        work(run, task, lambda: False)
    assert scores(run) == {}
    assert states(run)["claimed"] == 1


def test_text_that_a_submission_chose_does_not_fill_the_run(run, task):
    put(run, episode(0, "long"))
    work(run, task, lambda: len(scores(run)) == 1)
    assert len(scores(run)[0].detail) == MAX_DETAIL


def self_checks(run: RunDir) -> list[str]:
    spool = Spool(run.scored, ScoredEpisode)
    found = [spool.read(address) for address in spool.addresses("ready")]
    return [told for one in found if one is not None for told in one.self_checks]


def test_one_grading_in_a_hundred_is_followed_by_the_same_self_check():
    names = [f"train-{group:06d}-{index:02d}" for group in range(2500) for index in range(8)]
    chosen = {name: kind for name in names if (kind := self_check(name, 100)) is not None}
    assert chosen == {name: kind for name in names if (kind := self_check(name, 100)) is not None}
    counts = Counter(chosen.values())
    assert 60 < counts["reference"] < 140  # of 100 that are expected, four standard deviations
    assert 60 < counts["nothing"] < 140


def test_a_self_check_follows_the_result_and_is_reported_with_a_later_one(run, task):
    trial = Trial(run)
    put(run, *(episode(number, "text") for number in range(12)))
    work(run, task, lambda: len(scores(run)) == len(trial.waited) == 12, trial=trial)
    assert {score.outcome for score in scores(run).values()} == {"unresolved"}, (
        "no self-check's score is theirs"
    )
    assert len(trial.waited) == 12
    assert all(trial.waited), "the episode's own result was out first"
    assert set(self_checks(run)) == {""}
    assert 8 <= len(self_checks(run)) < 12


class Slow(Trial):
    """A grader whose trial takes longer than anybody waits."""

    def tried(self, is_right: bool) -> Score:
        time.sleep(60)
        return super().tried(is_right)


def test_a_drain_waits_for_no_self_check_and_begins_none(run, task):
    """Nobody is left to take along what they come to."""
    put(run, episode(0, "text"), episode(1, f"await {run.drain}"))
    work(run, task, lambda: len(scores(run)) == 1, trial=Slow(run))
    assert len(scores(run)) == 2
    assert states(run) == {"ready": 0, "claimed": 0, "dead": 0}


def test_a_grader_that_takes_nothing_for_a_solution_is_told_of(run, task, caplog):
    put(run, *(episode(number, "text") for number in range(12)))
    work(run, task, lambda: len(scores(run)) == 12, trial=Trial(run, errs=True))
    wrong = [told for told in self_checks(run) if told]
    assert wrong
    assert {told.partition(": ")[2] for told in wrong} == {"nothing of t is resolved: "}
    assert "self-check: nothing of t is resolved" in caplog.text
    assert "" in self_checks(run), "references still count as right"
