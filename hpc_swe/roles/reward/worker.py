"""The reward worker: episodes become scored episodes.

Consumes episodes/; produces scored/. Waits for a finished episode (rollout workers make them). Each
grading has fresh sandboxes, which end with the process.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_swe.config import RewardConfig
from hpc_swe.errors import EpisodeError
from hpc_swe.plugins.graders.base import Grader
from hpc_swe.plugins.sandboxes.base import Sandboxes
from hpc_swe.records import Episode, ExitStatus, Score, ScoredEpisode, Task
from hpc_swe.rundir import RunDir
from hpc_swe.store.lease import Lease
from hpc_swe.store.spool import Spool
from hpc_swe.store.worker import Work, Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Means:
    """What all gradings of a process are made with."""

    tasks: Mapping[str, Task]
    sandboxes: Sandboxes
    grader: Grader
    config: RewardConfig


@dataclass(frozen=True)
class Grading(Work[ScoredEpisode]):
    """One grading."""

    means: Means
    episode: Episode

    def run(self) -> ScoredEpisode:
        """Judge."""
        score = judge(self.means, self.episode)
        log.info("graded %s: %s in %.2f s", self.episode.request.name, score.outcome, score.seconds)
        return ScoredEpisode(episode=self.episode, score=score)


def judge(means: Means, episode: Episode) -> Score:
    """The score of an episode. What the host does wrong has no reward, and none can be gained by it."""
    task = means.tasks.get(episode.request.task_id)
    if episode.exit_status == ExitStatus.INFRA_ERROR:
        return Score(outcome="infra_error", reward=None, detail=episode.error)
    if task is None:
        detail = f"task {episode.request.task_id!r} is not in the run's tasks.parquet"
        return Score(outcome="infra_error", reward=None, detail=detail)
    # An agent that broke, or that broke its sandbox, has handed nothing in.
    submission = "" if episode.exit_status == ExitStatus.AGENT_ERROR else episode.submission
    try:
        return means.grader.grade(task, submission, means.sandboxes)
    except EpisodeError as error:
        return Score(outcome="infra_error", reward=None, detail=str(error))


def worker(run: RunDir, lease: Lease, means: Means) -> Worker[Episode, ScoredEpisode]:
    """Threads get no time to clean up: the kernel ends the sandboxes of a process that ends."""
    return Worker(
        run,
        lease,
        Spool(run.episodes, Episode),
        Spool(run.scored, ScoredEpisode),
        lambda episode: Grading(means, episode),
        means.config.slots,
        means.config.poll_s,
    )
