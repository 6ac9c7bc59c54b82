"""python -m jobs.reward RUN: one reward worker."""

import logging

from hpc_swe.plugins.sandboxes._watched import Watched
from hpc_swe.plugins.tasksets.base import Referenced
from hpc_swe.roles.reward.worker import Means, worker
from hpc_swe.rundir import RunDir
from hpc_swe.settings import RunConfig
from hpc_swe.store import tasks
from jobs import entry

log = logging.getLogger(__name__)


def work(run: RunDir, config: RunConfig) -> None:
    """Grade episodes until the run has finished or is ordered to end."""
    config.sandbox.check()
    means = Means(
        tasks={task.task_id: task for found in tasks.read(run.tasks).values() for task in found},
        sandboxes=Watched(config.sandbox),
        grader=config.grader,
        config=config.reward,
        references=references(run, config),
    )
    with entry.lease(run, config, "reward") as lease:
        worker(run, lease, means).work()


def references(run: RunDir, config: RunConfig) -> dict[str, str]:
    """Task id -> its reference; that there are none where there should be is said, once."""
    found = tasks.read_references(run.references)
    if not found and config.reward.sentinel_every and isinstance(config.taskset, Referenced):
        log.warning("%s is missing: no sentinel of this worker grades a reference", run.references)
    return found


if __name__ == "__main__":
    entry.enter(work)
