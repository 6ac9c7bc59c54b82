"""Start a run or continue it, and stop it."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from hpc_swe.base.errors import ConfigError, DeadlineError, HpcSweError, StorageError
from hpc_swe.base.records import Role, RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, orders, stop_signs, submissions, supervision
from hpc_swe.config import config as configuration
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig, StopConfig
from hpc_swe.launch import checks, create, submit, trajectories, upgrades
from hpc_swe.launch.existing import is_copy, load, note_interpreter
from hpc_swe.launch.submit import TickResult

GRACE_S = 10.0  # seconds that `stop --now` gives processes to obey the order before it ends them
FINISH_S = 3600.0  # the longest wait of a start for jobs that an order has told to end

log = logging.getLogger(__name__)


def start(
    run: RunDir,
    config: RunConfig,
    words: Sequence[str] = (),
    *,
    upgrade: bool = False,
    finish_s: float = FINISH_S,
) -> TickResult:
    """Create the run, or continue an existing one, and submit the jobs that are missing.

    A run keeps the code that it was created with, unless `upgrade` is set. Raise ConfigError when the run
    exists with another configuration, or a check refuses it. Jobs that an order has told to end are awaited
    first, for `finish_s`: they would count as running, and be missing when they have ended. Defaults that a
    release has changed since the run was made stay as they were, unless the `words` of the command line, from
    which the configuration was read, give the key.
    """
    config = upgrades.with_former_defaults(run, config, words)
    taken = checks.require(run, config)
    config = trajectories.resolved(run, config, taken.trajectories)
    if run.config.exists() or not create.create(run, config, taken):
        require_alike(run, config)
        if is_copy(run):
            create.adopt(run)
        create.note_place(run)
        _await_ordered(run, finish_s)
        if upgrade and (jobs := alive(run, config)):
            raise ConfigError(f"{run.root}: {len(jobs)} jobs still run the old code; `launch stop` it first")
        _update_config(run, config, upgrade=upgrade)
        if upgrade:
            upgrades.prepare(run, config)
            create.renew_code(run)
    note_interpreter(run)
    for order in (run.drain, run.stop):
        order.unlink(missing_ok=True)
    supervision.forget(run)
    return _submit(run, config)


def _await_ordered(run: RunDir, finish_s: float) -> None:
    """Wait, while an order stands, until no job of the run is left; a tick cancels those that only wait.

    Their executor is that of the configuration that they were submitted with. Raise DeadlineError if some
    take longer than `finish_s`; then the order still stands, as it does when a person interrupts this.
    """
    config, began, shown = load(run), time.monotonic(), 0
    while orders.active(run) and (plan := submit.tick(run, config)).orders and plan.running:
        count, waited_s = len(plan.running), time.monotonic() - began
        rest = f"`python -m hpc_swe.launch stop {run.root} --now` ends them"
        if waited_s > finish_s:
            raise DeadlineError(
                f"{run.root}: {count} jobs that control/{plan.orders[0]} told to end have not ended in "
                f"{finish_s:g} s ({', '.join(plan.running[:8])}); nothing was started. Start again, or {rest}"
            )
        if count != shown:
            log.warning("waiting for %d jobs of %s that finish their work; %s", count, run.root, rest)
        shown = count
        time.sleep(min(config.executor.pause_s, 0.5 + waited_s / 10))


def _submit(run: RunDir, config: RunConfig) -> TickResult:
    """Submit missing jobs; cancel all when one role cannot be submitted and nothing ran before.

    Then an order stands, so that no tick submits before the next start what was cancelled. Processes that
    people have started by hand would end by it.
    """
    before = {role: submissions.newest(run, role).number for role in get_args(Role)}
    leases = atomic.names(run.nodes)
    plan = submit.tick(run, config, rests=False)  # a person may have mended what failed
    if not plan.lost:
        return plan
    queue = config.executor.queue(run)
    ran_before = any(job.submission <= before[job.role] for job in queue if job.state != "broken")
    if ran_before or leases:
        return plan
    with atomic.storage(run.control):
        run.stop.touch()
    config.executor.cancel([job.job for job in queue])
    raise ConfigError(
        f"{run.root}: {plan.reasons(plan.lost)}; nothing was left in the queue. Correct this and start again"
    )


def stop(run: RunDir, config: RunConfig, *, now: bool) -> str:
    """Cancel waiting jobs and order the others to drain; with `now` to exit, and end them after a grace.

    Return what was done, for people. Raise StorageError when the order cannot be written.
    """
    try:
        with atomic.storage(run.control):
            (run.stop if now else run.drain).touch()
    except StorageError as error:
        raise StorageError(
            f"{error}. No order was written, so the run goes on: make room and call this again, or end the "
            "tick in cron, which would submit them again, and cancel the jobs with the scheduler"
        ) from error
    plan = submit.tick(run, config)
    done, running = f"cancelled {len(plan.cancel)} jobs that had not begun", len(plan.running)
    if not now:
        return f"{done}; {running} finish their work, and then exit"
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and config.executor.queue(run):
        time.sleep(min(config.executor.pause_s, 2.0))
    late = [job.job for job in config.executor.queue(run)]
    config.executor.cancel(late)
    return f"{done}; {running} were told to exit, and {len(late)} of them were ended"


def alive(run: RunDir, config: RunConfig) -> list[str]:
    """Return the ids of the run's jobs that run or may run."""
    return [job.job for job in config.executor.queue(run) if job.state != "broken"]


def differences(run: RunDir, config: RunConfig) -> list[str]:
    """List the keys that may not change but differ from the run's, as ``key: old -> new``."""
    manifest = atomic.get(run.manifest, RunManifest)
    found = configuration.forbidden_changes(load(run), config, Path(manifest.folder))
    models = [change for change in found if change.startswith("model:")]
    if models and create.digest(Path(config.model)) == manifest.model_sha256:
        found.remove(models[0])  # the same model in another folder
    return found


def require_alike(run: RunDir, config: RunConfig) -> None:
    """Raise ConfigError with the keys that differ, of those that decide what the run trains."""
    follows = "it follows steps; for more of them, start another run from its last weights"
    refused = [
        f"{change} ({follows})" if change.startswith("learner.optimizer.decay_steps") else change
        for change in differences(run, config)
    ]
    if refused:
        raise ConfigError(
            f"{run.root} exists with another configuration, and these keys decide what it trains: "
            f"{'; '.join(refused)}. Continue with the old values (`launch start --run {run.root}`), or "
            f"name another folder with {create.option(config)}"
        )
    _require_size(run, config)


def _require_size(run: RunDir, config: RunConfig) -> None:
    """Raise ConfigError if a learner's job goes on that has another number of processes."""
    old, new = (job_counts.processes("learner", each) for each in (load(run), config))
    jobs = config.executor.queue(run) if old != new and not orders.active(run) else []
    if any(job.role == "learner" and job.state != "broken" for job in jobs):
        raise ConfigError(
            f"{run.root}: [policy] divides the learner among {new} processes, but its job has {old}; "
            "`launch stop` it first"
        )


def _update_config(run: RunDir, config: RunConfig, *, upgrade: bool) -> None:
    """Store the keys that may change, for jobs that start from now on.

    Without an upgrade no key is later than the run's own code, which would refuse to start with it.
    """
    old, folder = load(run), Path(atomic.get(run.manifest, RunManifest).folder)
    config = configuration.keep_paths(old, config, folder)
    tree = configuration.dump(config)
    if not upgrade:
        written = msgspec.json.decode(atomic.read(run.config), type=dict[str, Any])
        tree = configuration.without_later_keys(tree, written, configuration.dump(old))
    for change in configuration.changes(old, config, folder).values():
        log.info("changed %s, for jobs that start from now on", change)
    if has_other_bounds := _has_other_bounds(run, old.stop, config.stop):
        stop_signs.forgive(run)
    if config.steps > old.steps or config.eval.patience != old.eval.patience or has_other_bounds:
        run.finished.unlink(missing_ok=True)
    atomic.write(run.token, create.key(run, config).encode())
    atomic.write(run.config, create.encoded(tree))


def _has_other_bounds(run: RunDir, old: StopConfig, new: StopConfig) -> bool:
    """Return whether `[stop]` changes, or has changed since a learner that went on has found a sign."""
    signs = stop_signs.read(run)
    return new != old or (bool(signs.reason) and signs.bounds not in ({}, msgspec.to_builtins(new)))


def print_result(run: RunDir, plan: TickResult) -> None:
    """Print what was submitted, or why nothing was; raise HpcSweError when a role is stuck."""
    submitted = ", ".join(f"{count} {role}" for role, count in plan.submit.items())
    cancelled = f", cancelled {len(plan.cancel)}" if plan.cancel else ""
    ended = f": control/{plan.orders[0]} forbids it; `launch start` removes that" if plan.orders else ""
    if run.finished.name in plan.orders:
        ended = ": the run has finished"
    print(f"{run.root}: submitted {submitted or 'nothing'}{cancelled}{ended}", flush=True)  # before a wait
    if plan.stuck:
        raise HpcSweError(plan.reasons(plan.stuck))
