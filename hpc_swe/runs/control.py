"""Start a run or go on with it, and stop it."""

import logging
import time
from pathlib import Path
from typing import get_args

from hpc_swe import config as configuration
from hpc_swe.errors import (
    ConfigError,
    HpcSweError,
)
from hpc_swe.records import Role, RunManifest
from hpc_swe.rundir import RunDir
from hpc_swe.runs import checks, create, submit
from hpc_swe.runs.existing import load
from hpc_swe.runs.submit import TickResult
from hpc_swe.settings import RunConfig
from hpc_swe.store import atomic, submissions

log = logging.getLogger(__name__)


GRACE_S = 10.0  # `stop --now` lets processes see the order before it ends them


def start(run: RunDir, config: RunConfig, *, upgrade: bool = False) -> TickResult:
    """Make the run folder, or go on with the one that is there, and submit what is missing.

    A run keeps the code that it was made with, unless it is to be upgraded.

    Raises:
        ConfigError: The run exists with another configuration, or this machine cannot run it.
    """
    taken = checks.require(run, config)
    if run.config.exists() or not create.create(run, config, taken):
        _must_agree(run, config)
        if upgrade:
            _upgrade(run, config)
    for order in (run.drain, run.stop):
        order.unlink(missing_ok=True)
    return _submit(run, config)


def _submit(run: RunDir, config: RunConfig) -> TickResult:
    """Tick; where a role cannot be had and nothing ran before, take back what was submitted beside it."""
    before = {role: submissions.newest(run, role).number for role in get_args(Role)}
    plan = submit.tick(run, config)
    if not plan.lost:
        return plan
    queue = config.executor.queue(run)
    if any(job.submission <= before[job.role] for job in queue if job.state != "broken"):
        return plan
    config.executor.cancel([job.job for job in queue])
    said = "; ".join(f"{role}: {plan.stuck[role]}" for role in plan.lost)
    raise ConfigError(f"{run.root}: {said}; nothing was left in the queue. Mend it and start again")


def stop(run: RunDir, config: RunConfig, *, now: bool) -> None:
    """Cancel what waits and order the rest to drain, or to exit now and be ended after a grace."""
    with atomic.storage(run.control):
        (run.stop if now else run.drain).touch()
    config.executor.cancel([job.job for job in config.executor.queue(run) if job.state != "running"])
    if not now:
        return
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and config.executor.queue(run):
        time.sleep(min(config.executor.pause_s, 2.0))
    config.executor.cancel([job.job for job in config.executor.queue(run)])


def alive(run: RunDir, config: RunConfig) -> list[str]:
    """Ids of the run's jobs that run or may run."""
    return [job.job for job in config.executor.queue(run) if job.state != "broken"]


def differences(run: RunDir, config: RunConfig) -> list[str]:
    """What differs from the run's own configuration and may not change, as ``key: old -> new``."""
    manifest = atomic.get(run.manifest, RunManifest)
    found = configuration.forbidden_changes(load(run), config, Path(manifest.folder))
    models = [change for change in found if change.startswith("model:")]
    if models and create.digest(Path(config.model)) == manifest.model_sha256:
        found.remove(models[0])  # a copy of it, or its folder has moved
    return found


def require_alike(run: RunDir, config: RunConfig) -> None:
    """Raise ConfigError where a key differs that decides what the run trains."""
    refused = differences(run, config)
    if refused:
        raise ConfigError(
            f"{run.root} exists with another configuration, and these keys decide what it trains: "
            f"{'; '.join(refused)}. Go on with the old values (`launch tick`), or name another folder with "
            f"{create.option(config)}"
        )


def _must_agree(run: RunDir, config: RunConfig) -> None:
    require_alike(run, config)
    old, folder = load(run), Path(atomic.get(run.manifest, RunManifest).folder)
    config = configuration.keep_paths(old, config, folder)
    for change in configuration.changes(old, config, folder).values():
        log.info("changed %s, for jobs that start from now on", change)
    if config.steps > old.steps:
        run.finished.unlink(missing_ok=True)
    atomic.write(run.token, create.key(run, config).encode())
    atomic.write(run.config, create.encoded(config))


def _upgrade(run: RunDir, config: RunConfig) -> None:
    jobs = alive(run, config)
    if jobs:
        raise ConfigError(f"{run.root}: {len(jobs)} jobs still run the old code; `launch stop` it first")
    create.renew_code(run)


def tell(run: RunDir, plan: TickResult) -> None:
    """Say what was submitted.

    Raises:
        HpcSweError: A role is stuck.
    """
    submitted = ", ".join(f"{count} {role}" for role, count in plan.submit.items())
    cancelled = f", cancelled {len(plan.cancel)}" if plan.cancel else ""
    print(f"{run.root}: submitted {submitted or 'nothing'}{cancelled}", flush=True)  # `start --wait` goes on
    if plan.stuck:
        raise HpcSweError("; ".join(f"{role}: {why}" for role, why in plan.stuck.items()))
