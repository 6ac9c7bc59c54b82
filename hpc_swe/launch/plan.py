"""Hold the plan of a start: the dry run prints it, and the start carries it out."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpc_swe.agents.sandboxes.base import ImageSandboxes
from hpc_swe.base.errors import ConfigError
from hpc_swe.base.records import Role, Split, Task
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import submissions
from hpc_swe.base.store.parquet import tasks
from hpc_swe.base.store.parquet.trajectories import Trajectory
from hpc_swe.cluster.executors.base import Submission
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import estimate, existing, submit, trajectories
from hpc_swe.launch.estimate import Costs, RoleJobs
from hpc_swe.roles.coordinator.modes import replay
from hpc_swe.tasks import task_checks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Taken:
    """Hold what a run works on, taken once: its tasks by split, and what an SFT run trains."""

    tasks: Mapping[Split, Sequence[Task]]
    trajectories: Sequence[Trajectory] = ()


@dataclass(frozen=True)
class RunPlan:
    """Hold everything that a start decides from, each part read or computed once."""

    run: RunDir
    config: RunConfig
    """The configuration, in which epochs are steps."""
    made: RunConfig | None = None
    """The configuration of the run that exists; None for a new run."""
    taken: Taken = Taken({})
    """What a new run works on; a run that exists has that already."""
    complaints: Sequence[str] = ()
    """Reasons why nothing could be taken."""

    @cached_property
    def jobs(self) -> dict[Role, RoleJobs]:
        """Return what is asked for each role that has jobs."""
        return estimate.jobs(self.config)

    @cached_property
    def costs(self) -> Costs:
        """Return what the run needs of memory and disk."""
        return estimate.costs(self.config, self.jobs)

    @cached_property
    def submissions(self) -> list[Submission]:
        """Return what an empty queue would get."""
        found, size = [], self.config.executor.array_size
        for role, jobs in self.jobs.items():
            number = submissions.newest(self.run, role).number if self.made else 0
            for first in range(0, jobs.count, size):
                number += 1
                count = min(size, jobs.count - first)
                found.append(submit.submission(self.run, self.config, role, number, count))
        return found


def plan_start(run: RunDir, config: RunConfig) -> RunPlan:
    """Return the plan of a start or of a continuation; raise what `existing.load` does."""
    made = existing.load(run, trains=True) if run.config.exists() and run.manifest.exists() else None
    complaints: list[str] = []
    taken = Taken({})
    try:
        taken = taken if made else take(config)
        config = trajectories.resolved(run, config, taken.trajectories)
    except ConfigError as error:
        complaints += str(error).splitlines()
    return RunPlan(run, config, made, taken, complaints)


def take(config: RunConfig) -> Taken:
    """Return what a new run works on; raise ConfigError if it is nothing, or if some cannot be used."""
    if config.mode == "replay":
        _require_archive(config)
        return Taken({})
    if trajectories.is_source(config):
        return Taken({}, trajectories.take(config))
    return Taken(_take_tasks(config))


def _require_archive(config: RunConfig) -> None:
    """Raise ConfigError unless the run that is replayed has archived so many steps."""
    count = replay.archived_steps(RunDir(Path(config.batches.source)))
    if count < config.steps:
        raise ConfigError(
            f"batches.source = '{config.batches.source}': it has archived {count} steps, less than steps = "
            f"{config.steps}; lower steps, or name another run of mode grpo"
        )


def _require_images(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Raise ConfigError if tasks have no image, or share one by mistake; jobs would find out one by one."""
    workers = [config.counts.get(role, 1) for role in ("rollout", "reward")]
    if config.mode == "sft" or not any(workers) or not isinstance(config.sandbox, ImageSandboxes):
        return
    task_checks.require_one_source(task for task in tasks if task.base_commit)
    folder = Path(config.sandbox.images)
    names = sorted({task.image for task in tasks})
    missing = [name for name in names if not any(map(Path.exists, (folder / name, folder / f"{name}.sif")))]
    if missing:
        raise ConfigError(
            f"[sandbox] images = '{folder}': {len(missing)} of the tasks' {len(names)} images are not there, "
            f"{missing[0]}.sif first; run python -m hpc_swe.build_images for SWE-bench and published sets, "
            "or containers/build_image.sh for python-pytest"
        )


def _require_checked(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Log if nobody has checked the tasks; raise ConfigError if their images are not the checked ones."""
    for part, own in config.taskset.by_part(tasks):
        if not own or part.checked is None:
            continue
        if not part.checked:
            where = "taskset" if part is config.taskset else f"taskset.parts.{own[0].taskset}"
            log.warning("[%s] checked is not set: nobody has checked these tasks, none has a retest", where)
        elif isinstance(config.sandbox, ImageSandboxes):
            task_checks.require_images(part.checked, own, Path(config.sandbox.images))


def _take_tasks(config: RunConfig) -> Mapping[Split, Sequence[Task]]:
    """Return the run's tasks; log when there are fewer than asked for.

    Raise ConfigError when there are none, or their images are not those that were checked.
    """
    wanted = config.tasks
    taken = wanted.take(config.taskset)
    found = [*taken["train"], *taken["eval"]]
    _require_images(config, found)
    if config.mode == "eval" and not taken["eval"]:
        raise ConfigError(
            f"tasks.eval = {wanted.eval} (--tasks), tasks.eval_from = {wanted.eval_from}: [taskset] has no "
            "held-out task there; ask for one at least, of those that it has"
        )
    is_run = config.mode == "grpo" and config.counts.get("coordinator", 1)
    if is_run and not taken["train"]:
        remedy = "add some to it" if wanted.train else "ask for some"
        raise ConfigError(f"tasks.train = {wanted.train}: [taskset] has no task to train on; {remedy}")
    if is_run and config.eval.every and not taken["eval"]:
        raise ConfigError(
            f"tasks.eval = {wanted.eval}, tasks.eval_from = {wanted.eval_from}: [taskset] has no held-out "
            f"task there, but eval.every = {config.eval.every}; ask for some, or set eval.every = 0"
        )
    _check_held_out(config, taken)
    for key, asked, own in (("train", wanted.train, taken["train"]), ("eval", wanted.eval, taken["eval"])):
        if len(own) < asked:
            log.warning("tasks.%s = %d: [taskset] has %d of them only", key, asked, len(own))
    _require_checked(config, found)
    if config.mode != "sft":
        config.agent.check_tasks(found)
    return taken


def _trained_too(taken: Mapping[Split, Sequence[Task]]) -> list[str]:
    """Return the held-out tasks that are trained, under the same name or with the same content."""
    names = {task.task_id for task in taken["train"]}
    contents = {tasks.content(task) for task in taken["train"]}
    return [t.task_id for t in taken["eval"] if t.task_id in names or tasks.content(t) in contents]


def _check_held_out(config: RunConfig, taken: Mapping[Split, Sequence[Task]]) -> None:
    """Refuse held-out tasks that are trained if they can end the training; else log a warning."""
    trained = _trained_too(taken) if config.mode == "grpo" else []
    if not trained:
        return
    message = f"{len(trained)} held-out tasks are training tasks, too: {', '.join(trained[:3])}"
    if config.eval.every and config.eval.patience:
        raise ConfigError(
            f"[taskset] {message}; their evaluation would decide when the training ends. Name other rows for "
            "one of the splits, or set eval.patience = 0"
        )
    log.warning("[taskset] %s; the best of them may have been learned by heart", message)
