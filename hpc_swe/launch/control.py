"""Start a run or continue it, and stop it."""

import logging
import time
from pathlib import Path
from typing import Any, get_args

import msgspec

from hpc_swe.base import cli
from hpc_swe.base.errors import ConfigError, DeadlineError, HpcSweError, StorageError
from hpc_swe.base.records import Role, RunManifest
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, orders, sharing, stop_signs, submissions, supervision
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig, StopConfig
from hpc_swe.launch import checks, create, submit
from hpc_swe.launch.existing import is_copy, load, note_interpreter
from hpc_swe.launch.plan import RunPlan, plan_start
from hpc_swe.launch.submit import TickResult
from hpc_swe.roles.coordinator.batching import batches

GRACE_S = 10.0  # seconds that `stop --now` gives processes to obey the order before it ends them
FINISH_S = 3600.0  # the longest wait of a start for jobs that an order has told to end

log = logging.getLogger(__name__)


def start(run: RunDir, config: RunConfig, *, upgrade: bool = False, finish_s: float = FINISH_S) -> TickResult:
    """Make the plan of a start, and carry it out."""
    return carry_out(plan_start(run, config), upgrade=upgrade, finish_s=finish_s)


def carry_out(plan: RunPlan, *, upgrade: bool = False, finish_s: float = FINISH_S) -> TickResult:
    """Create the run, or continue an existing one, and submit the jobs that are missing.

    A run keeps the code that it was created with, unless `upgrade` is set. Raise ConfigError when a check
    refuses the plan. Jobs that an order has told to end are awaited first, for `finish_s`: they would count
    as running, and be missing when they have ended.
    """
    run, config = plan.run, plan.config
    checks.require(plan)
    if plan.made or not create.create(run, config, plan.taken):
        if not plan.made:  # another start has made it meanwhile
            checks.require_alike(run, config)
        batches.newest(run)  # raises where `launch clean` has deleted what the run would go on from
        if is_copy(run):
            create.adopt(run)
        create.note_place(run)
        _await_ordered(run, finish_s)
        if upgrade and (jobs := alive(run, config)):
            raise ConfigError(f"{run.root}: {len(jobs)} jobs still run the old code; `launch stop` it first")
        _update_config(run, config, upgrade=upgrade)
        if upgrade:
            create.renew_code(run)
    sharing.share(run, config.share == "group")
    note_interpreter(run, config)
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
    while orders.active(run) and (ticked := submit.tick(run, config)).orders and ticked.running:
        count, waited_s = len(ticked.running), time.monotonic() - began
        rest = f"`python -m hpc_swe.launch stop {cli.quoted(run.root)} --now` ends them"
        if waited_s > finish_s:
            raise DeadlineError(
                f"{run.root}: {count} jobs that control/{ticked.orders[0]} told to end have not ended in "
                f"{finish_s:g} s ({', '.join(ticked.running[:8])}); nothing was started. Start "
                f"again, or {rest}"
            )
        if count != shown:
            log.warning("waiting for %d jobs of %s that finish their work; %s", count, run.root, rest)
        shown = count
        time.sleep(config.executor.pause(waited_s))


def _submit(run: RunDir, config: RunConfig) -> TickResult:
    """Submit missing jobs; cancel all when one role cannot be submitted and nothing ran before.

    Then an order stands, so that no tick submits before the next start what was cancelled. Processes that
    people have started by hand would end by it.
    """
    before = {role: submissions.newest(run, role).number for role in get_args(Role)}
    leases = atomic.names(run.nodes)
    ticked = submit.tick(run, config, rests=False)  # a person may have mended what failed
    if not ticked.lost:
        return ticked
    queue = config.executor.queue(run)
    ran_before = any(job.submission <= before[job.role] for job in queue if job.state != "broken")
    if ran_before or leases:
        return ticked
    with atomic.storage(run.control):
        run.stop.touch()
    config.executor.cancel([job.job for job in queue])
    raise ConfigError(
        f"{run.root}: {ticked.reasons(ticked.lost)}; nothing was left in the queue. Correct this and start "
        "again"
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
    ticked = submit.tick(run, config)
    done, running = f"cancelled {len(ticked.cancel)} jobs that had not begun", len(ticked.running)
    if not now:
        return f"{done}; {running} finish their work, and then exit"
    began = time.monotonic()
    while time.monotonic() < began + GRACE_S and config.executor.queue(run):
        time.sleep(config.executor.pause(time.monotonic() - began))
    late = [job.job for job in config.executor.queue(run)]
    config.executor.cancel(late)
    return f"{done}; {running} were told to exit, and {len(late)} of them were ended"


def alive(run: RunDir, config: RunConfig) -> list[str]:
    """Return the ids of the run's jobs that run or may run."""
    return [job.job for job in config.executor.queue(run) if job.state != "broken"]


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
    atomic.write_secret(run.token, create.key(run, config).encode())
    atomic.write(run.config, create.encoded(tree))


def _has_other_bounds(run: RunDir, old: StopConfig, new: StopConfig) -> bool:
    """Return whether `[stop]` changes, or has changed since a learner that went on has found a sign."""
    signs = stop_signs.read(run)
    return new != old or (bool(signs.reason) and signs.bounds not in ({}, msgspec.to_builtins(new)))


def print_result(run: RunDir, ticked: TickResult) -> None:
    """Print what was submitted, or why nothing was; raise HpcSweError when a role is stuck."""
    submitted = ", ".join(f"{count} {role}" for role, count in ticked.submit.items())
    cancelled = f", cancelled {len(ticked.cancel)}" if ticked.cancel else ""
    ended = f": control/{ticked.orders[0]} forbids it; `launch start` removes that" if ticked.orders else ""
    if run.finished.name in ticked.orders:
        ended = ": the run has finished"
    print(f"{run.root}: submitted {submitted or 'nothing'}{cancelled}{ended}", flush=True)  # before a wait
    if ticked.stuck:
        raise HpcSweError(ticked.reasons(ticked.stuck))
