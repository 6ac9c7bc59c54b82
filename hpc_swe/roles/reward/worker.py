"""The reward worker: episodes become scored episodes.

Consumes episodes/; produces scored/. Waits for a finished episode (rollout workers make them). Each
grading has fresh sandboxes, which end with the process. Now and then the grader itself is tried, in the
slot of an episode whose result is out already: what came of it goes with the next result.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from hpc_swe.errors import EpisodeError, HpcSweError
from hpc_swe.plugins.graders.base import GRADER_BROKE, Examiner, Grader
from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.records import Episode, ExitStatus, Score, ScoredEpisode, Task
from hpc_swe.roles.reward import alone
from hpc_swe.rundir import RunDir
from hpc_swe.settings import RewardConfig
from hpc_swe.store.lease import Lease
from hpc_swe.store.spool import Spool
from hpc_swe.store.worker import Work, Worker

Sentinel = Literal["reference", "nothing"]
MOST_DETAIL = 2000
"""Characters of a score's detail, which a submission can fill; every table and archive of a run holds it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardResources:
    """What all gradings of a process are made with."""

    tasks: Mapping[str, Task]
    sandboxes: Sandboxes
    grader: Grader
    config: RewardConfig
    references: Mapping[str, str] = field(default_factory=dict)
    """Task id -> a submission that is right."""
    alone: Sequence[str] = ()
    """Command that grades an episode in a process of its own, whose grading was lost; without one, here."""
    told: deque[str] = field(default_factory=deque)
    """What sentinels came to that no result has taken along yet."""


@dataclass(frozen=True)
class Grading(Work[ScoredEpisode]):
    """One grading."""

    resources: RewardResources
    episode: Episode
    losses: int = 0

    def run(self) -> ScoredEpisode:
        """Judge."""
        is_apart = self.losses and self.resources.alone
        score = (
            _judge_alone(self.resources, self.episode) if is_apart else judge(self.resources, self.episode)
        )
        log.info("graded %s: %s in %.2f s", self.episode.request.name, score.outcome, score.seconds)
        return ScoredEpisode(episode=self.episode, score=score, sentinels=list(_taken(self.resources.told)))

    def after(self) -> None:
        """Try the grader on the task in hand, under the load that the episode was graded under."""
        task = self.resources.tasks.get(self.episode.request.task_id)
        which = sentinel(self.episode.request.name, self.resources.config.sentinel_every)
        if which is not None and task is not None:
            stand(self.resources, task, which)


def judge(resources: RewardResources, episode: Episode) -> Score:
    """The score of an episode. What the host does wrong has no reward, and none can be gained by it."""
    task = resources.tasks.get(episode.request.task_id)
    if episode.exit_status == ExitStatus.INFRA_ERROR:
        return Score(outcome="infra_error", reward=None, detail=episode.error)
    if task is None:
        detail = f"task {episode.request.task_id!r} is not in the run's tasks.parquet"
        return Score(outcome="infra_error", reward=None, detail=detail)
    # An agent that broke, or that broke its sandbox, has handed nothing in.
    submission = "" if episode.exit_status == ExitStatus.AGENT_ERROR else episode.submission
    try:
        score = resources.grader.grade(task, submission, resources.sandboxes)
        return msgspec.structs.replace(score, detail=score.detail[:MOST_DETAIL])
    except EpisodeError as error:
        return Score(outcome="infra_error", reward=None, detail=str(error)[:MOST_DETAIL])
    except HpcSweError:  # the run's configuration, not the submission, is wrong
        raise
    except Exception as error:  # noqa: BLE001 - what breaks a grader was chosen by the policy, and costs its episode alone
        log.exception("grader broke on %s", episode.request.name)
        detail = f"{GRADER_BROKE}: {type(error).__name__}: {error}"[:MOST_DETAIL]
        return Score(outcome="unresolved", reward=resources.grader.unresolved_reward, detail=detail)


def _judge_alone(resources: RewardResources, episode: Episode) -> Score:
    log.info("grading alone: %s was lost before", episode.request.name)
    try:
        return alone.watch(resources.alone, episode, resources.grader.unresolved_reward)
    except EpisodeError as error:
        return Score(outcome="infra_error", reward=None, detail=str(error))


def sentinel(request: str, every: int) -> Sentinel | None:
    """What follows the grading of a request: one in `every`, and the same when it is graded again."""
    number = int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big")
    if not every or number % every:
        return None
    return "reference" if number // every % 2 else "nothing"


def stand(resources: RewardResources, task: Task, which: Sentinel) -> None:
    """Grade what is known to be right, or wrong; without a reference, or with a simple grader, the other."""
    reference, grader = resources.references.get(task.task_id, ""), resources.grader
    if isinstance(grader, Examiner) and (which == "nothing" or not reference):
        submission, expected, grade = "", "unresolved", grader.examine
    elif reference:
        submission, expected, grade = reference, "resolved", grader.grade
    else:
        return
    try:
        score = grade(task, submission, resources.sandboxes)
    except EpisodeError as error:
        log.warning("sentinel of %s told nothing: %s", task.task_id, error)
        return
    except HpcSweError:
        raise
    except Exception as error:  # noqa: BLE001
        log.exception("grader broke on a sentinel of %s", task.task_id)
        score = Score(outcome="unresolved", reward=0.0, detail=f"{GRADER_BROKE}: {error!r}")
    what = "the reference" if submission else "nothing"
    wrong = f"sentinel: {what} of {task.task_id} is {score.outcome}: {score.detail[:300]}"
    resources.told.append("" if score.outcome == expected else wrong)
    if score.outcome != expected:
        log.error("%s; failed %s", wrong, score.failed[:5])


def _taken(told: deque[str]) -> Iterator[str]:
    """Each by one thread only."""
    try:
        while True:
            yield told.popleft()
    except IndexError:
        return


def worker(run: RunDir, lease: Lease, resources: RewardResources) -> Worker[Episode, ScoredEpisode]:
    """Threads get no time to clean up: the kernel ends the sandboxes of a process that ends."""
    return Worker(
        run,
        lease,
        Spool(run.episodes, Episode),
        Spool(run.scored, ScoredEpisode),
        lambda claim: Grading(resources, claim.message, claim.address.losses),
        resources.config.slots,
        resources.config.poll_s,
    )
