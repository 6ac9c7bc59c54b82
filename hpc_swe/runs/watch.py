"""Watch a run until it has finished, for `launch start --wait`, `evaluate` and the demo."""

import logging
import time
from collections.abc import Callable

from hpc_swe.errors import DeadlineError, HpcSweError, SchedulerError, StorageError
from hpc_swe.plugins.executors.base import RunsHere
from hpc_swe.rundir import RunDir
from hpc_swe.runs import submit
from hpc_swe.runs.control import alive, stop
from hpc_swe.runs.submit import TickResult
from hpc_swe.settings import RunConfig
from hpc_swe.store import orders

log = logging.getLogger(__name__)


def wait(
    run: RunDir,
    config: RunConfig,
    timeout_s: float,
    each: Callable[[], None] = lambda: None,
    *,
    detaches: bool = False,
) -> None:
    """Watch the run and call `each` at each tick; whatever interrupts this stops the run.

    With `detaches` only a deadline stops the jobs of a cluster.

    Raises:
        HpcSweError: As from `watch`; the run was stopped.
    """
    try:
        _watch(run, config, timeout_s, each)
    except BaseException as error:
        if not detaches or isinstance(error, DeadlineError) or config.executor.is_here:
            stop(run, config, now=True)
        raise
    _require_finished(run)


def watch(run: RunDir, config: RunConfig, timeout_s: float) -> None:
    """Submit missing jobs until the run has finished and its processes are gone; an interrupt leaves them.

    Raises:
        HpcSweError: The run was ordered to end before it had finished.
        DeadlineError: It takes longer than `timeout_s`, or a role cannot be kept alive.
    """
    _watch(run, config, timeout_s, lambda: None)
    _require_finished(run)


def _watch(run: RunDir, config: RunConfig, timeout_s: float, each: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout_s
    while not orders.active(run) or alive(run, config):
        plan = _tick(run, config)
        if plan.lost or time.monotonic() > deadline:
            why = "; ".join(f"{role}: {plan.stuck[role]}" for role in plan.lost)
            raise DeadlineError(f"{run.root}: {why or f'not finished after {timeout_s:g} s; see its logs/'}")
        each()
        time.sleep(config.executor.pause_s)


def _require_finished(run: RunDir) -> None:
    if not run.finished.exists():
        raise HpcSweError(f"{run.root}: ordered to end before it had finished; `launch start` continues it")


def _tick(run: RunDir, config: RunConfig) -> TickResult:
    """Submit missing jobs, unless the scheduler or the file system does not answer."""
    try:
        return submit.tick(run, config)
    except (SchedulerError, StorageError) as error:
        log.warning("waiting for the scheduler or the file system: %s", error)
        return TickResult()


def left(run: RunDir, config: RunConfig) -> str:
    """Say what happens to a run that is no longer watched."""
    if isinstance(config.executor, RunsHere) and config.executor.foreground:
        return "stopped; its jobs end with this command, because [executor] foreground is set"
    status, end = (f"`python -m hpc_swe.{verb} {run.root}`" for verb in ("status", "launch stop"))
    return f"detached; jobs keep running. {status} shows them, {end} ends them"
