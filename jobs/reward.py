"""Run one reward worker: python -m jobs.reward RUN; with --alone, grade one episode for a worker."""

import logging
import math
import sys
from functools import partial

from hpc_swe.agents.sandboxes.base import WatchedSandboxes
from hpc_swe.base.records import Task
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet import tasks
from hpc_swe.config.settings import RunConfig
from hpc_swe.roles.reward import alone
from hpc_swe.roles.reward.worker import RewardResources, judge, worker
from hpc_swe.tasks.hidden_tests import with_versions
from jobs import entry

ALONE = "--alone"

log = logging.getLogger(__name__)


def work(run: RunDir, config: RunConfig) -> None:
    """Grade episodes until the run has finished or is ordered to end."""
    config.sandbox.check()
    resources = _resources(run, config, WatchedSandboxes(config.sandbox))
    with entry.lease(run, config, "reward") as lease:
        worker(run, lease, resources, config.poll_s).work()


def work_alone(run: RunDir, config: RunConfig) -> None:
    """Grade the episode of the standard input."""
    sandboxes = WatchedSandboxes(config.sandbox)
    alone.answer(partial(judge, _resources(run, config, sandboxes)), lambda: sandboxes.opened)


def _resources(run: RunDir, config: RunConfig, sandboxes: WatchedSandboxes) -> RewardResources:
    known, stuck_s = graded(run), config.supervision.stuck_s
    longest_s = max(map(config.grader.longest_s, known.values()), default=0.0)
    hung_s = max(stuck_s / 2, 1.5 * longest_s) if stuck_s else math.inf  # the coordinator waits longer
    return RewardResources(
        tasks=known,
        patience=alone.Patience(hung_s=hung_s, progressed=sandboxes.note),
        sandboxes=sandboxes,
        opened_by=lambda thread: sandboxes.opened_by.get(thread, 0),
        grader=config.grader,
        config=config.reward,
        references=references(run, config),
        alone=(sys.executable, "-P", "-m", "jobs.reward", str(run.root), ALONE),
    )


def graded(run: RunDir) -> dict[str, Task]:
    """Read the tasks by id, with the changed tests of those that are graded by a second test run."""
    changed = tasks.read_hidden(run.changed_tests)
    all_tasks = [task for found in tasks.read(run.tasks).values() for task in found]
    return {task.task_id: with_versions(task, changed.get(task.task_id, "")) for task in all_tasks}


def references(run: RunDir, config: RunConfig) -> dict[str, str]:
    """Read the reference patches by task id; log a warning when they are expected but missing."""
    found = tasks.read_hidden(run.references)
    if not run.references.exists():
        log.warning("%s is missing: no self-check of this worker grades a reference", run.references)
    return found


if __name__ == "__main__":
    entry.run_role(work_alone if ALONE in sys.argv[2:] else work)
