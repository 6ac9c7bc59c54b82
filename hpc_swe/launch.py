"""python -m hpc_swe.launch start | tick | stop. See docs/operations.md."""

import argparse
import hashlib
import itertools
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from hpc_swe import config as configuration
from hpc_swe import reconcile
from hpc_swe.config import RunConfig
from hpc_swe.errors import ConfigError, DeadlineError, HpcSweError, StaleRun, StorageError
from hpc_swe.reconcile import Plan
from hpc_swe.records import RunManifest, Split, Task
from hpc_swe.rundir import PROTOCOL, RunDir
from hpc_swe.store import atomic, tasks

GRACE_S = 10.0  # `stop --now` lets processes see the order before it ends them

log = logging.getLogger(__name__)


def start(run: RunDir, config: RunConfig) -> Plan:
    """Make the run folder, or go on with the one that is there, and submit what is missing.

    Raises:
        ConfigError: The run exists with another configuration, or this machine cannot run it.
    """
    _preflight(config)
    if run.config.exists():
        _must_agree(run, config)
    else:
        _create(run, config)
    for order in (run.drain, run.stop):
        order.unlink(missing_ok=True)
    return reconcile.tick(run, config)


def load(run: RunDir) -> RunConfig:
    """The configuration of a run that exists.

    Raises:
        ConfigError: There is no run in the folder, or it belongs to somebody else.
        StaleRun: It was made under another protocol version.
    """
    try:
        owner = run.config.stat().st_uid
        manifest = atomic.get(run.manifest, RunManifest)
        tree = json.loads(run.config.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{run.root}: no run here ({error.filename} is missing); `launch start` makes one"
        ) from None
    if owner != os.getuid():
        raise ConfigError(f"{run.root}: belongs to user {owner}; a run is acted on by its owner only")
    if manifest.protocol != PROTOCOL:
        raise StaleRun(
            f"{run.root}: protocol {manifest.protocol}, this code reads {PROTOCOL}; use {manifest.commit}"
        )
    return configuration.build(tree, str(run.config))


def stop(run: RunDir, config: RunConfig, *, now: bool) -> None:
    """Order all processes to drain, or to exit now and be ended after a grace."""
    with atomic.storage(run.control):
        (run.stop if now else run.drain).touch()
    if not now:
        return
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and alive(run, config):
        time.sleep(0.2)
    for job in alive(run, config):
        config.executor.cancel(run, job)


def alive(run: RunDir, config: RunConfig) -> list[str]:
    """Ids of the run's jobs that run or wait."""
    return [job.job for job in config.executor.jobs(run) if job.is_alive]


def wait(run: RunDir, config: RunConfig, timeout_s: float, each: Callable[[], None] = lambda: None) -> None:
    """Tick, and call `each`, until the run has finished and its processes are gone.

    Raises:
        HpcSweError: It was ordered to end before it had finished.
        DeadlineError: It takes longer than `timeout_s`, or a role cannot be kept alive; the run is ended.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while not atomic.names(run.control) or alive(run, config):
            stuck = reconcile.tick(run, config).stuck
            if stuck or time.monotonic() > deadline:
                why = (
                    f"{', '.join(stuck)} cannot be kept alive"
                    if stuck
                    else f"not finished after {timeout_s:.0f} s"
                )
                raise DeadlineError(f"{run.root}: {why}; see its logs/ and `python -m hpc_swe.status`")
            each()
            time.sleep(0.5)
    except BaseException:
        stop(run, config, now=True)
        raise
    if not run.finished.exists():
        raise HpcSweError(f"{run.root}: ordered to end before it had finished; `launch start` goes on")


def _preflight(config: RunConfig) -> None:
    for key, folder in (("model", config.model), ("reference", config.reference or config.model)):
        if not (Path(folder) / "config.json").is_file():
            raise ConfigError(
                f"{key} = {folder!r}: no config.json there; give the folder of a Hugging Face model"
            )
    if config.mode != "sft":
        config.sandbox.check()


def _must_agree(run: RunDir, config: RunConfig) -> None:
    old = load(run)
    changed = configuration.differences(old, config)
    if changed:
        raise ConfigError(
            f"{run.root} exists with another configuration: {'; '.join(changed)}. "
            "Go on with the old one (`launch tick`), or name another folder with --run"
        )
    if config.steps > old.steps:
        run.finished.unlink(missing_ok=True)
    atomic.write(run.config, _json(config))


def _create(run: RunDir, config: RunConfig) -> None:
    try:
        with atomic.storage(run.root):
            run.make()
    except OSError as error:
        raise StorageError(
            f"{run.root}: cannot be made: {error.strerror}; choose a folder you own with --run"
        ) from None
    atomic.write(run.token, secrets.token_hex(16).encode())
    tasks.write(run.tasks, _take_tasks(config))
    data = _json(config)
    atomic.put(
        run.manifest,
        RunManifest(
            protocol=PROTOCOL,
            run_id=f"{run.root.name}-{secrets.token_hex(3)}",
            commit=_commit(),
            model_sha256=_digest(Path(config.model)),
            config_sha256=hashlib.sha256(data).hexdigest(),
        ),
    )
    atomic.write(run.config, data)  # last: its presence means that the run is whole


def _take_tasks(config: RunConfig) -> dict[Split, Sequence[Task]]:
    wanted, first = config.tasks, config.tasks.eval_from
    return {
        "train": list(itertools.islice(config.taskset.load("train"), wanted.train)),
        "eval": list(itertools.islice(config.taskset.load("eval"), first, first + wanted.eval)),
    }


def _json(config: RunConfig) -> bytes:
    return msgspec.json.format(msgspec.json.encode(configuration.dump(config)), indent=2)


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _digest(model: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_swe.launch", description="Start, keep and end a run."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    begin = verbs.add_parser("start", help="make the run folder and submit its jobs")
    begin.add_argument(
        "config", nargs="+", help="TOML files, merged left to right, and overrides such as steps=10"
    )
    begin.add_argument(
        "--run", type=Path, help="run folder (default: $HPC_SWE_RUNS or runs/, named by the first file)"
    )
    begin.add_argument(
        "--wait", type=float, metavar="SECONDS", help="stay and tick until the run has finished"
    )
    again = verbs.add_parser("tick", help="submit what is missing; cron calls this")
    again.add_argument("run", type=Path)
    end = verbs.add_parser("stop", help="let the run drain")
    end.add_argument("run", type=Path)
    end.add_argument("--now", action="store_true", help="exit at once, then end what is left")
    return parser


def _start(arguments: argparse.Namespace) -> None:
    files = [Path(name) for name in arguments.config if "=" not in name]
    config = configuration.read(*files, overrides=[name for name in arguments.config if "=" in name])
    runs = Path(os.environ.get("HPC_SWE_RUNS", "runs"))
    run = RunDir((arguments.run or runs / files[0].stem).absolute())
    _tell(run, start(run, config))
    if arguments.wait:
        wait(run, config, arguments.wait)


def _tell(run: RunDir, plan: Plan) -> None:
    print(f"{run.root}: submitted {', '.join(plan.submit) or 'nothing'}")
    if plan.stuck:
        raise HpcSweError(f"{', '.join(plan.stuck)}: jobs end as soon as they start; see {run.root / 'logs'}")


def main() -> None:
    """The command line."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    arguments = _parser().parse_args()
    try:
        if arguments.verb == "start":
            _start(arguments)
            return
        run = RunDir(arguments.run.absolute())
        config = load(run)
        if arguments.verb == "tick":
            _tell(run, reconcile.tick(run, config))
        else:
            stop(run, config, now=arguments.now)
    except HpcSweError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
