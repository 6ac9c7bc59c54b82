"""python -m hpc_swe.launch start | tick | stop. See docs/operations.md."""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from hpc_swe import checks, cli, creation, reconcile
from hpc_swe import config as configuration
from hpc_swe.errors import (
    ConfigError,
    CorruptRecord,
    DeadlineError,
    HpcSweError,
    SchedulerError,
    StaleRun,
    StorageError,
)
from hpc_swe.plugins.executors.local import Local
from hpc_swe.reconcile import Plan
from hpc_swe.records import Role, RunManifest
from hpc_swe.rundir import PROTOCOL, RunDir
from hpc_swe.settings import RunConfig
from hpc_swe.store import atomic, ledger, orders

GRACE_S = 10.0  # `stop --now` lets processes see the order before it ends them

log = logging.getLogger(__name__)


def start(run: RunDir, config: RunConfig, *, upgrade: bool = False) -> Plan:
    """Make the run folder, or go on with the one that is there, and submit what is missing.

    A run keeps the code that it was made with, unless it is to be upgraded.

    Raises:
        ConfigError: The run exists with another configuration, or this machine cannot run it.
    """
    taken = checks.require(run, config)
    if run.config.exists() or not creation.create(run, config, taken):
        _must_agree(run, config)
        if upgrade:
            _upgrade(run, config)
    for order in (run.drain, run.stop):
        order.unlink(missing_ok=True)
    return _submit(run, config)


def _submit(run: RunDir, config: RunConfig) -> Plan:
    """Tick; where a role cannot be had and nothing ran before, take back what was submitted beside it."""
    before = {role: ledger.newest(run, role).number for role in get_args(Role)}
    plan = reconcile.tick(run, config)
    if not plan.lost:
        return plan
    queue = config.executor.queue(run)
    if any(job.submission <= before[job.role] for job in queue if job.state != "broken"):
        return plan
    config.executor.cancel([job.job for job in queue])
    said = "; ".join(f"{role}: {plan.stuck[role]}" for role in plan.lost)
    raise ConfigError(f"{run.root}: {said}; nothing was left in the queue. Mend it and start again")


def load(run: RunDir) -> RunConfig:
    """The configuration of a run that exists.

    Raises:
        ConfigError: There is no run in the folder, or it belongs to somebody else.
        CorruptRecord: Its configuration cannot be read.
        StaleRun: It was made under another protocol version.
    """
    try:
        owner = run.config.stat().st_uid
        manifest = atomic.get(run.manifest, RunManifest)
        tree = json.loads(run.config.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{run.root}: no run here ({error.filename} is missing); `launch start` makes one"
        ) from None
    except (IsADirectoryError, ValueError) as error:
        raise _damaged(run, str(error)) from None
    if not isinstance(tree, dict):
        raise _damaged(run, "no table")
    if owner != os.getuid():
        raise ConfigError(f"{run.root}: belongs to user {owner}; a run is acted on by its owner only")
    require_closed(run.root)
    if manifest.protocol != PROTOCOL:
        raise StaleRun(
            f"{run.root}: protocol {manifest.protocol}, this code reads {PROTOCOL}; use {manifest.commit}"
        )
    return configuration.build(tree, str(run.config))


def _damaged(run: RunDir, why: str) -> CorruptRecord:
    return CorruptRecord(
        f"{run.config}: not the configuration of a run: {why}; put back what was there, or start another run"
    )


def require_closed(root: Path) -> None:
    """A run holds keys, and what its jobs believe: nobody else may read or write in it.

    Raises:
        ConfigError: Its folder belongs to another user, or is open to group or others.
    """
    found = root.stat()
    if found.st_uid != os.getuid():
        raise ConfigError(f"{root}: belongs to user {found.st_uid}; a run is acted on by its owner only")
    if found.st_mode & 0o077:
        raise ConfigError(f"{root}: mode {found.st_mode & 0o777:o} lets others in; run chmod 700 {root}")


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


def wait(
    run: RunDir,
    config: RunConfig,
    timeout_s: float,
    each: Callable[[], None] = lambda: None,
    *,
    detaches: bool = False,
) -> None:
    """As `watch`, calling `each` at each look; but what ends the wait ends the run.

    With `detaches` only a deadline ends the jobs of a cluster.

    Raises:
        HpcSweError: As `watch`; the run is ended.
    """
    try:
        _watch(run, config, timeout_s, each)
    except BaseException as error:
        if not detaches or isinstance(error, DeadlineError) or config.executor.is_here:
            stop(run, config, now=True)
        raise
    _require_finished(run)


def watch(run: RunDir, config: RunConfig, timeout_s: float) -> None:
    """Tick until the run has finished and its processes are gone; whatever ends the watch, they go on.

    Raises:
        HpcSweError: It was ordered to end before it had finished.
        DeadlineError: It takes longer than `timeout_s`, or a role cannot be kept alive.
    """
    _watch(run, config, timeout_s, lambda: None)
    _require_finished(run)


def _watch(run: RunDir, config: RunConfig, timeout_s: float, each: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout_s
    while not orders.standing(run) or alive(run, config):
        plan = _tick_patiently(run, config)
        if plan.lost or time.monotonic() > deadline:
            why = "; ".join(f"{role}: {plan.stuck[role]}" for role in plan.lost)
            raise DeadlineError(f"{run.root}: {why or f'not finished after {timeout_s:g} s; see its logs/'}")
        each()
        time.sleep(config.executor.pause_s)


def _require_finished(run: RunDir) -> None:
    if not run.finished.exists():
        raise HpcSweError(f"{run.root}: ordered to end before it had finished; `launch start` goes on")


def _tick_patiently(run: RunDir, config: RunConfig) -> Plan:
    try:
        return reconcile.tick(run, config)
    except (SchedulerError, StorageError) as error:
        log.warning("waiting for the scheduler or the file system: %s", error)
        return Plan()


def differences(run: RunDir, config: RunConfig) -> list[str]:
    """What differs from the run's own configuration and may not change, as ``key: old -> new``."""
    manifest = atomic.get(run.manifest, RunManifest)
    found = configuration.differences(load(run), config, Path(manifest.folder))
    models = [change for change in found if change.startswith("model:")]
    if models and creation.digest(Path(config.model)) == manifest.model_sha256:
        found.remove(models[0])  # a copy of it, or its folder has moved
    return found


def _require_alike(run: RunDir, config: RunConfig) -> None:
    refused = differences(run, config)
    if refused:
        raise ConfigError(
            f"{run.root} exists with another configuration, and these keys decide what it trains: "
            f"{'; '.join(refused)}. Go on with the old values (`launch tick`), or name another folder with "
            f"{creation.option(config)}"
        )


def _must_agree(run: RunDir, config: RunConfig) -> None:
    _require_alike(run, config)
    old, folder = load(run), Path(atomic.get(run.manifest, RunManifest).folder)
    config = configuration.respelled(old, config, folder)
    for change in configuration.changes(old, config, folder).values():
        log.info("changed %s, for jobs that start from now on", change)
    if config.steps > old.steps:
        run.finished.unlink(missing_ok=True)
    atomic.write(run.token, creation.key(run, config).encode())
    atomic.write(run.config, creation.encoded(config))


def _upgrade(run: RunDir, config: RunConfig) -> None:
    jobs = alive(run, config)
    if jobs:
        raise ConfigError(f"{run.root}: {len(jobs)} jobs still run the old code; `launch stop` it first")
    creation.renew_code(run)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_swe.launch", description="Start, keep and end a run."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    begin = verbs.add_parser("start", help="make the run folder and submit its jobs")
    add = begin.add_argument
    add("config", nargs="+", help="TOML files, merged left to right, and overrides such as steps=10")
    add(
        "--run", type=cli.folder, help="run folder (default: $HPC_SWE_RUNS or runs/, named by the first file)"
    )
    add("--wait", type=float, metavar="SECONDS", help="stay and tick until the run has finished")
    add("--dry-run", action="store_true", help="print configuration, batch scripts and costs; make nothing")
    add("--upgrade", action="store_true", help="go on with this code, not with the one of the run's start")
    again = verbs.add_parser("tick", help="submit what is missing; cron calls this")
    again.add_argument("run", type=cli.folder)
    listed = verbs.add_parser("keys", help="list the keys of a configuration, with type, default and meaning")
    listed.add_argument("prefix", nargs="?", default="", help="only those that begin so, for example groups")
    listed.add_argument("--markdown", action="store_true", help="as docs/configuration.md")
    end = verbs.add_parser("stop", help="let the run drain")
    end.add_argument("run", type=cli.folder)
    end.add_argument("--now", action="store_true", help="exit at once, then end what is left")
    return parser, dict(verbs.choices)


def _start(arguments: argparse.Namespace) -> None:
    files = [Path(word) for word in arguments.config if "=" not in word]
    if not files:
        raise ConfigError("no CONFIG.toml; give the files that say what is run, as configs/demo.toml")
    config = configuration.of_words(arguments.config)
    runs = Path(os.environ.get("HPC_SWE_RUNS") or "runs").absolute()
    run = RunDir(arguments.run or runs / files[0].stem)
    if arguments.dry_run:
        preview(run, config)
        return
    tell(run, start(run, config, upgrade=arguments.upgrade))
    if arguments.wait is None:
        return
    try:
        watch(run, config, arguments.wait)
    except (DeadlineError, KeyboardInterrupt):
        print(left(run, config), file=sys.stderr)
        raise


def _list_keys(arguments: argparse.Namespace) -> None:
    from hpc_swe import keys  # which reads the source of every plugin

    found = keys.listed(arguments.prefix)
    if not found:
        names = [key.name for key in keys.listed()]
        raise ConfigError(f"no key begins with {arguments.prefix!r}{cli.like(arguments.prefix, names)}")
    print("\n".join(keys.markdown(found) if arguments.markdown else keys.told(found)))


def preview(run: RunDir, config: RunConfig) -> None:
    """Show what `start` would make and submit.

    Raises:
        ConfigError: `start` would refuse it.
    """
    from hpc_swe import dry_run  # jobs import this module, and print no tables

    try:
        dry_run.show(run, config)
    finally:
        checks.require(run, config)
        if run.config.exists():
            _require_alike(run, config)


def left(run: RunDir, config: RunConfig) -> str:
    """What becomes of a run that nobody watches any more."""
    if isinstance(config.executor, Local) and config.executor.foreground:
        return "left; its jobs end with this command, as [executor] foreground says"
    status, end = (f"`python -m hpc_swe.{verb} {run.root}`" for verb in ("status", "launch stop"))
    return f"left; its jobs go on. {status} shows how, {end} ends them"


def tell(run: RunDir, plan: Plan) -> None:
    """Say what was submitted.

    Raises:
        HpcSweError: A role is stuck.
    """
    submitted = ", ".join(f"{count} {role}" for role, count in plan.submit.items())
    cancelled = f", cancelled {len(plan.cancel)}" if plan.cancel else ""
    print(f"{run.root}: submitted {submitted or 'nothing'}{cancelled}", flush=True)  # `start --wait` goes on
    if plan.stuck:
        raise HpcSweError("; ".join(f"{role}: {why}" for role, why in plan.stuck.items()))


@cli.command
def main() -> None:
    """The command line."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    parser, verbs = _parser()
    verb, arguments = cli.parse_verb(verbs, sys.argv[1:], parser)
    if verb == "start":
        _start(arguments)
        return
    if verb == "keys":
        _list_keys(arguments)
        return
    run = RunDir(arguments.run)
    config = load(run)
    if verb == "tick":
        tell(run, reconcile.tick(run, config))
    else:
        stop(run, config, now=arguments.now)


if __name__ == "__main__":
    main()
