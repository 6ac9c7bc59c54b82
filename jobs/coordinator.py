"""Run the coordinator of one run, in the run's mode: python -m jobs.coordinator RUN."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hpc_swe.base.errors import ConfigError
from hpc_swe.base.metrics import Log
from hpc_swe.base.records import Role, Sampling, Task
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet import tasks, trajectories
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch.trajectories import demonstrations
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.roles.coordinator.batching.batches import BatchSettings
from hpc_swe.roles.coordinator.curriculum import TaskPlan, WeightedTasks
from hpc_swe.roles.coordinator.dispatch import RequestPlan
from hpc_swe.roles.coordinator.loop import Coordinator, Mode
from hpc_swe.roles.coordinator.maintenance import Maintenance
from hpc_swe.roles.coordinator.modes import sft
from hpc_swe.roles.coordinator.modes.evaluation import Evaluating, Evaluator
from hpc_swe.roles.coordinator.modes.replay import ArchiveReplay
from hpc_swe.roles.coordinator.modes.training import Training
from hpc_swe.roles.coordinator.supervision import Supervision
from jobs import entry


def mode(run: RunDir, config: RunConfig, curves: Log) -> Mode:
    """Make the work of the run's mode, continuing from the state in the run folder."""
    learner, minibatches = config.learner, config.learner.optimizer.minibatches
    if config.mode == "sft":
        schedule = sft.SftSchedule(
            config.steps,
            config.sft.samples_per_step,
            config.batches.microbatch_tokens,
            learner.data_parallel,
            config.eval.every if config.sft.holds_out else 0,
            minibatches,
        )
        if config.sft.trajectories:
            return _trained(run, config, schedule, curves)
        fates = Counter[str]()
        return sft.WarmStart(run, demonstrations(config, fates), schedule, curves, fates=fates)
    settings = BatchSettings(
        config.groups,
        config.batches,
        config.advantage,
        learner.data_parallel,
        config.shaping,
        minibatches,
        _routing_bytes(Path(config.model)),
        STRAGGLES * config.rollout.episode_timeout_s,
    )
    if config.mode == "replay":
        return ArchiveReplay(run, RunDir(Path(config.batches.source)), settings, config.steps, curves)
    taken = tasks.read(run.tasks)
    held_out = [task.task_id for task in taken["eval"]][: config.eval.tasks or None]
    every = config.eval.every if config.mode == "grpo" else 0
    known = held_out if every or config.mode == "eval" else []
    parts = {task.task_id: task.taskset for task in taken["eval"]}
    evaluator = Evaluator(run, known, config.eval, config.seed, curves, every, learner.export_every, parts)
    if config.mode == "eval":
        return Evaluating(run, evaluator, config.groups.max_attempts)
    sampling = Sampling(max_tokens=config.sampling.max_tokens)
    requests = RequestPlan(config.seed, config.groups.group_size, sampling)
    plan_tasks = partial(TaskPlan, requests, _sources(config, taken["train"]), config.curriculum)
    return Training(run, plan_tasks, settings, config.steps, evaluator, curves)


def _routing_bytes(model: Path) -> int | None:
    """Return the size of a token's routing in a model; None if its config.json does not say."""
    try:
        return ModelShape.read(model).routing_bytes
    except ConfigError:  # plugins of others train other models
        return None


def _sources(config: RunConfig, taken: Sequence[Task]) -> list[WeightedTasks]:
    weights = config.taskset.weights
    if not weights:
        return [WeightedTasks("", tuple(task.task_id for task in taken))]
    by_name: dict[str, list[str]] = {}
    for task in taken:
        by_name.setdefault(task.taskset, []).append(task.task_id)
    return [WeightedTasks(name, tuple(ids), weights[name]) for name, ids in by_name.items()]


def _trained(run: RunDir, config: RunConfig, schedule: sft.SftSchedule, curves: Log) -> sft.WarmStart:
    """Make the work of a run on trajectories."""
    known = trajectories.read(run.trajectories)
    fates = Counter(each.fate for each in known)
    curves.write(0, {"sft/cut": fates["cut"], "sft/dropped": fates["dropped"]})
    stream = sft.in_passes(sft.of_split(known, "train"), config.seed, config.sft.epochs)
    held_out = [sft.as_sample(each) for each in sft.of_split(known, "eval")]
    return sft.WarmStart(run, map(sft.as_sample, stream), schedule, curves, held_out)


STRAGGLES = 4  # an episode that was worked on for so many times its time-out keeps no group open
MAX_LOSSES = 10  # expired leases of one message before it moves to dead/: its workers die of it


def work(run: RunDir, config: RunConfig) -> None:
    """Work until the run has finished or is ordered to end."""
    with entry.lease(run, config, "coordinator") as lease:
        lease.publish(state="ready")
        curves = Log(run.metric_log(lease.owner))
        maintenance = Maintenance(run, config.retention, config.lease, MAX_LOSSES, own=lease.owner)
        make = partial(mode, run, config, curves)
        desired = job_counts.desired(config)
        limits, beat_s = _limits(run, config), config.lease.beat_s
        roles = tuple(desired)
        supervision = Supervision(lease, run, limits, config.max_restarts, roles, config.steps, beat_s)
        Coordinator(run, maintenance, make, config.poll_s, desired, supervision).work()


def _limits(run: RunDir, config: RunConfig) -> dict[Role, float]:
    """Return, for each role, the seconds without progress after which it is stuck; empty where none ever is.

    A worker may be in one action of an agent for its time-out, or in one run of tests for all its time.
    """
    limits = config.stuck_limits if config.supervision.stuck_s else {}
    if limits and config.mode != "sft":
        known = [task for found in tasks.read(run.tasks).values() for task in found]
        limits["reward"] = max([limits["reward"], *(2 * config.grader.longest_s(task) for task in known)])
    return limits


if __name__ == "__main__":
    entry.run_role(work)
