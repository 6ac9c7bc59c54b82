"""Turn episodes into scored episodes: the reward worker.

It consumes episodes/, produces scored/, and waits for finished episodes, which rollout workers make. Each
grading has fresh sandboxes, which end with the process. At intervals a self-check tests the grader itself
on a known patch, after an episode's result is published; its finding travels with the next result.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Literal

import msgspec

from hpc_swe.agents.sandboxes.base import Sandboxes
from hpc_swe.base.errors import EpisodeError, HpcSweError
from hpc_swe.base.records import Episode, ExitStatus, Score, ScoredEpisode, Task
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.lease import Lease
from hpc_swe.base.store.spool import Spool
from hpc_swe.config.settings import RewardConfig
from hpc_swe.roles.reward import alone
from hpc_swe.roles.reward.alone import Patience
from hpc_swe.roles.reward.shared_scores import SharedScores
from hpc_swe.roles.worker import Work, Worker
from hpc_swe.tasks.graders.base import GRADER_BROKE, Grader

SelfCheck = Literal["reference", "nothing"]
"""The known patch of a self-check: the task's reference solution, or an empty patch."""
MAX_DETAIL = 2000
"""Most characters of a score's detail: a patch can fill it, and every table and archive of a run keeps it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardResources:
    """Hold what all gradings of a process share."""

    tasks: Mapping[str, Task]
    sandboxes: Sandboxes
    grader: Grader
    config: RewardConfig
    references: Mapping[str, str] = field(default_factory=dict)
    """Task id -> a patch that is right."""
    alone: Sequence[str] = ()
    """Command that grades one episode in a process of its own, after a lost grading; empty grades it here."""
    patience: Patience = Patience()
    """How long a grading in a process of its own may last without progress."""
    opened_by: Callable[[Thread], int] = lambda _: 0
    """Counts the sandboxes that a grading, in a thread of its own, has opened or closed."""
    shared: SharedScores = field(default_factory=SharedScores)
    findings: deque[str] = field(default_factory=deque)
    """Results of self-checks that no scored episode carries yet; an empty one is a check that passed."""


@dataclass(frozen=True)
class Grading(Work[ScoredEpisode]):
    """Grade one episode."""

    resources: RewardResources
    episode: Episode
    redeliveries: int = 0

    def run(self) -> ScoredEpisode:
        """Judge the episode, in a process of its own if its grading was lost before."""
        grade = _judge_alone if self.redeliveries and self.resources.alone else judge
        score = grade(self.resources, self.episode)
        shared = f", the score of {score.graded_as}" * bool(score.graded_as)
        log.info("graded %s: %s in %.2f s%s", self.episode.request.name, score.outcome, score.seconds, shared)
        findings = list(_drain(self.resources.findings))
        return ScoredEpisode(episode=self.episode, score=score, self_checks=findings)

    def steps(self, thread: Thread) -> int:
        """Count the sandboxes that were opened or closed for the grading."""
        return self.resources.opened_by(thread)

    def after(self) -> None:
        """Run a self-check on the same task, under the load under which the episode was graded."""
        task = self.resources.tasks.get(self.episode.request.task_id)
        which = self_check(self.episode.request.name, self.resources.config.self_check_every)
        if which is not None and task is not None:
            check_grader(self.resources, task, which)


def judge(resources: RewardResources, episode: Episode) -> Score:
    """Score an episode: a host failure has no reward, whatever a policy can cause is unresolved."""
    task = resources.tasks.get(episode.request.task_id)
    if episode.exit_status == ExitStatus.INFRA_ERROR:
        return Score(outcome="infra_error", reward=None, detail=episode.error)
    if task is None:
        detail = f"task {episode.request.task_id!r} is not in the run's tasks.parquet"
        return Score(outcome="infra_error", reward=None, detail=detail)
    # An agent that broke, or that broke its sandbox, counts as having no patch.
    patch = "" if episode.exit_status == ExitStatus.AGENT_ERROR else episode.submission
    try:
        grade, request = partial(_grade, resources, task, patch), episode.request
        if request.split == "eval" or not resources.grader.is_repeatable:
            return grade()
        wait_s = resources.grader.longest_s(task)
        return resources.shared.score(request, patch, wait_s, grade)
    except EpisodeError as error:
        return Score(outcome="infra_error", reward=None, detail=str(error)[:MAX_DETAIL])
    except HpcSweError:  # the run's configuration, not the patch, is wrong
        raise
    except Exception as error:  # noqa: BLE001 - the policy chose the patch that broke the grader: only its episode pays
        log.exception("grader broke on %s", episode.request.name)
        detail = f"{GRADER_BROKE}: {type(error).__name__}: {error}"[:MAX_DETAIL]
        return Score(outcome="unresolved", reward=resources.grader.unresolved_reward, detail=detail)


def _grade(resources: RewardResources, task: Task, patch: str) -> Score:
    score = resources.grader.grade(task, patch, resources.sandboxes)
    return msgspec.structs.replace(score, detail=score.detail[:MAX_DETAIL])


def _judge_alone(resources: RewardResources, episode: Episode) -> Score:
    log.info("grading alone: %s was lost before", episode.request.name)
    try:
        return alone.watch(resources.alone, episode, resources.grader.unresolved_reward, resources.patience)
    except EpisodeError as error:
        return Score(outcome="infra_error", reward=None, detail=str(error))


def self_check(request: str, every: int) -> SelfCheck | None:
    """Choose the self-check after a request's grading: one in `every`, the same at each repetition."""
    number = int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big")
    if number % every:
        return None
    return "reference" if number // every % 2 else "nothing"


def check_grader(resources: RewardResources, task: Task, which: SelfCheck) -> None:
    """Grade a patch that is known to be right or wrong, and add a finding.

    Without a reference the empty patch is graded instead: tests may fail it, or a grader refuse it.
    """
    reference, grader = resources.references.get(task.task_id, ""), resources.grader
    if which == "nothing" or not reference:
        patch, expected, grade = "", {"unresolved", "no_submission"}, grader.examine
    else:
        patch, expected, grade = reference, {"resolved"}, grader.grade
    try:
        score = grade(task, patch, resources.sandboxes)
    except EpisodeError as error:
        log.warning("self-check of %s failed to run: %s", task.task_id, error)
        return
    except HpcSweError:
        raise
    except Exception as error:  # noqa: BLE001
        log.exception("grader broke in a self-check of %s", task.task_id)
        score = Score(outcome="unresolved", reward=0.0, detail=f"{GRADER_BROKE}: {error!r}")
    what = "the reference" if patch else "nothing"
    wrong = f"self-check: {what} of {task.task_id} is {score.outcome}: {score.detail[:300]}"
    resources.findings.append("" if score.outcome in expected else wrong)
    if score.outcome not in expected:
        log.error("%s; failed %s", wrong, score.failed[:5])


def _drain(findings: deque[str]) -> Iterator[str]:
    """Yield and remove all findings; each goes to one thread only."""
    try:
        while True:
            yield findings.popleft()
    except IndexError:
        return


def worker(
    run: RunDir, lease: Lease, resources: RewardResources, poll_s: float
) -> Worker[Episode, ScoredEpisode]:
    """Make the reward worker. Its threads get no time to clean up: sandboxes end with the process."""
    return Worker(
        run,
        lease,
        Spool(run.episodes, Episode),
        Spool(run.scored, ScoredEpisode),
        lambda claim: Grading(resources, claim.message, claim.address.redeliveries),
        resources.config.slots,
        poll_s,
    )
