"""python -m jobs.reward RUN: one reward worker."""

from hpc_swe.config import RunConfig
from hpc_swe.plugins.sandboxes._watched import Watched
from hpc_swe.roles.reward.worker import Means, worker
from hpc_swe.rundir import RunDir
from hpc_swe.store import tasks
from jobs import entry


def work(run: RunDir, config: RunConfig) -> None:
    """Grade episodes until the run has finished or is ordered to end."""
    config.sandbox.check()
    means = Means(
        tasks={task.task_id: task for found in tasks.read(run.tasks).values() for task in found},
        sandboxes=Watched(config.sandbox),
        grader=config.grader,
        config=config.reward,
        references=tasks.read_references(run.references),
    )
    with entry.lease(run, config, "reward") as lease:
        worker(run, lease, means).work()


if __name__ == "__main__":
    entry.enter(work)
