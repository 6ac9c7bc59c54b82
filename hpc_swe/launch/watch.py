"""Watch a run until it has finished, for `launch start --wait`, `evaluate` and the demo."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Set
from typing import Literal

from hpc_swe.base import cli
from hpc_swe.base.errors import DeadlineError, HpcSweError, SchedulerError, StorageError, StuckRun
from hpc_swe.base.records import Role, StatusReport
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, checkpoints, folders, stop_signs, supervision, weights
from hpc_swe.base.store.lease import Watcher
from hpc_swe.cluster.executors.base import FOREGROUND
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch import submit
from hpc_swe.launch.control import stop
from hpc_swe.launch.submit import REST_S, TickResult
from hpc_swe.launch.view import RunReader, RunView, failing

SAVE_S = 120.0  # the longest step, checkpoint and full version of a learner that is stopped

log = logging.getLogger(__name__)


def watch(
    run: RunDir,
    config: RunConfig,
    timeout_s: float,
    show: Callable[[RunView | str], None] | None = None,
    *,
    stop_on: Literal["nothing", "deadline", "error"] = "nothing",
    save_s: float = SAVE_S,
) -> None:
    """Submit missing jobs until the run has finished and none of its jobs runs, and show its state.

    After each tick `show` gets the state of the run, or a text that says why it cannot be read. When this
    ends early the jobs keep running, unless `stop_on` names what stops them: a deadline, or any error or
    interrupt. Then a learner has `save_s` to save its steps first. Raise HpcSweError when the run was ordered
    to end before it had finished, and DeadlineError when it takes longer than `timeout_s`, or a role cannot
    be kept alive. While the scheduler or the file system does not answer, wait.
    """
    try:
        _watch(run, config, timeout_s, show)
    except BaseException as error:
        if stop_on == "error" or (stop_on == "deadline" and isinstance(error, DeadlineError)):
            _save_and_stop(run, config, save_s)
        raise
    if reason := stop_signs.read(run).reason:
        log.warning("%s: ended early: %s", run.root, reason)
    if not run.finished.exists() and (last := supervision.read(run)).gave_up:
        raise StuckRun(f"{run.root}: {last.message(config.max_restarts)}")
    if not run.finished.exists():
        raise HpcSweError(f"{run.root}: ordered to end before it had finished; `launch start` continues it")


def _save_and_stop(run: RunDir, config: RunConfig, save_s: float) -> None:
    """Stop the run, but let its learner save what it has trained; a second interrupt stops it at once."""
    try:
        if what := _unsaved(run, config):
            log.warning("saving %s, for at most %g s; another Ctrl-C discards that", what, save_s)
            stop(run, config, now=False)
            began = time.monotonic()
            while (what := _unsaved(run, config)) and time.monotonic() < began + save_s:
                time.sleep(config.executor.pause(time.monotonic() - began))
            if what:
                log.warning("not saved within %g s: %s", save_s, what)
    except HpcSweError as error:  # what ended the watch matters more
        log.warning("perhaps not saved: %s", error)
    finally:
        stop(run, config, now=True)


def _unsaved(run: RunDir, config: RunConfig) -> str:
    """Name what a learner that runs would save: steps since its checkpoint, or weights that are a delta."""
    if ("learner", "running") not in {(job.role, job.state) for job in config.executor.queue(run)}:
        return ""
    watcher = Watcher(run, config.lease.beat_s, config.lease.ttl_s)
    watcher.look()
    taken = max((node.step for node in watcher.live("learner")), default=0)
    if (steps := taken - max(checkpoints.published(run), default=(0, 0))[0]) > 0:
        return f"the last {steps} steps"
    return "the last weights in full" * (weights.newest(run) != weights.newest_full(run))


def _watch(
    run: RunDir, config: RunConfig, timeout_s: float, show: Callable[[RunView | str], None] | None
) -> None:
    began, reader = time.monotonic(), RunReader(run, config)
    lost_at: dict[Role, float] = {}
    logged, troubles = "", dict[str, str]()
    with atomic.storage(run.root):
        told = {*failing(run, config)}  # those before this start
    while True:
        try:
            ticked = submit.tick(run, config)
            lost_at = {role: lost_at.get(role, time.monotonic()) for role in ticked.lost}
            troubles = _troubles(run, config)
            state = f"stuck {ticked.reasons(ticked.stuck)}" if ticked.stuck else ""
        except (SchedulerError, StorageError) as error:
            ticked, state = TickResult(), f"waiting for the scheduler or the file system: {error}"
        if ticked.orders and not ticked.running:
            return
        why = ticked.reasons(given_up(ticked, lost_at, time.monotonic()))
        if why or time.monotonic() > began + timeout_s:
            why = why or f"not finished after {timeout_s:g} s; see its logs/"
            raise DeadlineError("; ".join([f"{run.root}: {why}", *troubles.values()]))
        if state not in ("", logged):
            log.error(state)
        logged = state
        told |= _tell(troubles, told)
        if show:
            show(reader.read())
        time.sleep(config.executor.pause(time.monotonic() - began))


def _tell(troubles: Mapping[str, str], told: Set[str]) -> Set[str]:
    """Log each trouble once though many have it; return those that are there."""
    for text, line in troubles.items():
        if text not in told:
            log.warning("%s", line)
    return troubles.keys()


def _troubles(run: RunDir, config: RunConfig) -> dict[str, str]:
    """Return what keeps jobs from their work, and the same after who says it."""
    with atomic.storage(run.root):
        found = {line: line for line in failing(run, config)}
    try:
        folders.require_room(run.launches)
    except StorageError as error:  # then jobs can report nothing
        found[f"{error}"] = f"jobs wait for room: {error}"
    try:
        said = atomic.get(run.status, StatusReport).troubles
    except (HpcSweError, OSError):  # no report yet, or it is being replaced
        return found
    return found | {text: f"{owner}: {text}" for owner, text in said.items()}


def given_up(ticked: TickResult, lost_at: Mapping[Role, float], now: float) -> list[Role]:
    """List the lost roles that are not waited for, where `lost_at` says since when each is lost.

    A scheduler that refuses a role may accept it later, when a partition is no longer drained or a limit no
    longer reached, so that role is waited for as long as one that failed rests. (When it refuses a role of a
    new run, `launch start` has ended with that.) Other lost roles have failed repeatedly or for good.
    """
    return [role for role in ticked.lost if role not in ticked.refused or now - lost_at[role] >= REST_S]


def left(run: RunDir, config: RunConfig) -> str:
    """Say what happens to a run that is no longer watched."""
    if config.executor.is_here and FOREGROUND in os.environ:
        return f"stopped; its jobs end with this command, because {FOREGROUND} is set"
    status, end = (f"`python -m hpc_swe.{verb} {cli.quoted(run.root)}`" for verb in ("status", "launch stop"))
    return f"detached; jobs keep running. {status} shows them, {end} ends them"
