"""python -m hpc_swe.launch start | tick | stop. See docs/operations.md."""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from hpc_swe import config as configuration
from hpc_swe import reconcile
from hpc_swe.config import RunConfig
from hpc_swe.errors import ConfigError, DeadlineError, HpcSweError, SchedulerError, StaleRun, StorageError
from hpc_swe.plugins.sandboxes.apptainer import Apptainer
from hpc_swe.plugins.tasksets.base import Referenced
from hpc_swe.plugins.tasksets.swebench import Swebench
from hpc_swe.reconcile import Plan
from hpc_swe.records import RunManifest, Split, Task
from hpc_swe.roles.inference import attach
from hpc_swe.rundir import PROTOCOL, RunDir
from hpc_swe.store import atomic, folders, tasks

GRACE_S = 10.0  # `stop --now` lets processes see the order before it ends them
MAKING_S, PAUSE_S = 120.0, 0.1  # a run folder is made in a second or two
Taken = Mapping[Split, Sequence[Task]]

log = logging.getLogger(__name__)


def start(run: RunDir, config: RunConfig, *, upgrade: bool = False) -> Plan:
    """Make the run folder, or go on with the one that is there, and submit what is missing.

    A run keeps the code that it was made with, unless it is to be upgraded.

    Raises:
        ConfigError: The run exists with another configuration, or this machine cannot run it.
    """
    _preflight(run, config)
    if run.config.exists() or not _create(run, config):
        _must_agree(run, config)
        if upgrade:
            _upgrade(run, config)
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
    except (FileNotFoundError, NotADirectoryError) as error:
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
    """Cancel what waits and order the rest to drain, or to exit now and be ended after a grace."""
    with atomic.storage(run.control):
        (run.stop if now else run.drain).touch()
    config.executor.cancel([job.job for job in config.executor.queue(run) if job.state != "running"])
    if not now:
        return
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and config.executor.queue(run):
        time.sleep(min(config.executor.pause_s, 2.0))
    config.executor.cancel(alive(run, config))


def alive(run: RunDir, config: RunConfig) -> list[str]:
    """Ids of the run's jobs that run or wait."""
    return [job.job for job in config.executor.queue(run)]


def wait(
    run: RunDir,
    config: RunConfig,
    timeout_s: float,
    each: Callable[[], None] = lambda: None,
    *,
    detaches: bool = False,
) -> None:
    """Tick, and call `each`, until the run has finished and its processes are gone.

    What ends the wait ends the run; with `detaches` only a deadline ends the jobs of a cluster.

    Raises:
        HpcSweError: It was ordered to end before it had finished.
        DeadlineError: It takes longer than `timeout_s`, or a role cannot be kept alive; the run is ended.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while not atomic.names(run.control) or alive(run, config):
            plan = _tick_patiently(run, config)
            if plan.lost or time.monotonic() > deadline:
                why = "; ".join(f"{role}: {plan.stuck[role]}" for role in plan.lost)
                why = why or f"not finished after {timeout_s:.0f} s; see its logs/"
                raise DeadlineError(f"{run.root}: {why}")
            each()
            time.sleep(config.executor.pause_s)
    except BaseException as error:
        if not detaches or isinstance(error, DeadlineError) or config.executor.is_here:
            stop(run, config, now=True)
        raise
    if not run.finished.exists():
        raise HpcSweError(f"{run.root}: ordered to end before it had finished; `launch start` goes on")


def _tick_patiently(run: RunDir, config: RunConfig) -> Plan:
    try:
        return reconcile.tick(run, config)
    except (SchedulerError, StorageError) as error:
        log.warning("waiting for the scheduler or the file system: %s", error)
        return Plan()


def _preflight(run: RunDir, config: RunConfig) -> None:
    known = [("model", config.model, "config.json"), ("model", config.model, "tokenizer.json")]
    for key, folder, name in (*known, ("reference", config.reference or config.model, "config.json")):
        if not (Path(folder) / name).is_file():
            raise ConfigError(f"{key} = {folder!r}: no {name} there; give the folder of a Hugging Face model")
    for role, count in reconcile.desired(config).items():
        if count:
            config.executor.check(reconcile.submission(run, config, role, 1, count))
    if config.mode != "sft" and config.executor.is_here:  # on a cluster the workers check, on their nodes
        config.sandbox.check()
    if config.inference.url and "inference" in reconcile.desired(config):
        attach.require_usable(config, _key(run, config))


def _key(run: RunDir, config: RunConfig) -> str:
    """What every engine route asks for: the key of somebody else's engine, else the run's own."""
    given = os.environ.get(attach.KEY, "") if config.inference.url else ""
    known = run.token.read_text(encoding="ascii").strip() if run.token.exists() else ""
    return given or known or secrets.token_hex(16)


def _must_agree(run: RunDir, config: RunConfig) -> None:
    old = load(run)
    changed = configuration.differences(old, config)
    if changed:
        raise ConfigError(
            f"{run.root} exists with another configuration: {'; '.join(changed)}. "
            f"Go on with the old one (`launch tick`), or name another folder with {_option(config)}"
        )
    if config.steps > old.steps:
        run.finished.unlink(missing_ok=True)
    atomic.write(run.token, _key(run, config).encode())
    atomic.write(run.config, _json(config))


def _option(config: RunConfig) -> str:
    return "--out" if config.mode == "eval" else "--run"


def _create(run: RunDir, config: RunConfig) -> bool:
    """Make the run; False when another start has made it meanwhile."""
    taken = _take_tasks(config)
    try:
        with atomic.storage(run.root):
            run.make()
    except OSError as error:
        raise StorageError(
            f"{run.root}: cannot be made: {error.strerror}; choose a folder you own with {_option(config)}"
        ) from None
    model_sha256 = _digest(Path(config.model))  # minutes, so not while others wait
    with making(run) as place:
        if place:
            _publish(run, place, config, taken, model_sha256)
    return place is not None


@contextlib.contextmanager
def making(run: RunDir, limit_s: float = MAKING_S) -> Iterator[RunDir | None]:
    """Where this start makes the run's files; others wait, and get None once the run is made.

    A start that seems dead loses the folder that it writes in, so that one which was slow can do no harm.

    Raises:
        StorageError: This start was taken for dead.
    """
    taken, seen, since = run.root / ".making", 0, 0.0
    place = RunDir(taken / secrets.token_hex(4))
    while not run.config.exists():
        try:
            taken.mkdir()
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                made = taken.stat().st_mtime_ns
                if made != seen:
                    seen, since = made, time.monotonic()
                elif time.monotonic() - since > limit_s:  # whoever took it has died
                    folders.remove(taken)
            time.sleep(PAUSE_S)
            continue
        try:
            place.root.mkdir()
            yield None if run.config.exists() else place
        except OSError:
            if place.root.exists():
                raise
            raise StorageError(f"{run.root}: another start took this one for dead; start again") from None
        finally:
            if place.root.exists():
                folders.remove(taken)
        return
    yield None


def _publish(run: RunDir, place: RunDir, config: RunConfig, taken: Taken, model_sha256: str) -> None:
    _copy_code(run, place)
    atomic.write(place.token, _key(run, config).encode())
    tasks.write(place.tasks, taken)
    if isinstance(config.taskset, Referenced):
        all_tasks = [task for split in taken.values() for task in split]
        tasks.write_references(place.references, config.taskset.references(all_tasks))
    data = _json(config)
    atomic.put(
        place.manifest,
        RunManifest(
            protocol=PROTOCOL,
            run_id=f"{run.root.name}-{secrets.token_hex(3)}",
            commit=_commit(),
            model_sha256=model_sha256,
            config_sha256=hashlib.sha256(data).hexdigest(),
            folder=str(Path.cwd()),
            environment=reconcile.own_environment(),
        ),
    )
    for path in list(place.root.iterdir()):
        _replace(path, run.root / path.name)
    atomic.write(place.config, data)
    place.config.rename(run.config)  # last: its presence means that the run is whole


def _upgrade(run: RunDir, config: RunConfig) -> None:
    jobs = alive(run, config)
    if jobs:
        raise ConfigError(f"{run.root}: {len(jobs)} jobs still run the old code; `launch stop` it first")
    _copy_code(run, run)
    manifest = atomic.get(run.manifest, RunManifest)
    changes = {"commit": _commit(), "environment": reconcile.own_environment()}
    atomic.put(run.manifest, msgspec.structs.replace(manifest, **changes))


def _copy_code(run: RunDir, place: RunDir) -> None:
    """Jobs of a run that lasts for weeks must not see what is changed in the checkout meanwhile."""
    copy = atomic.temporary(run.code)  # not in `place`: copying would make it anew after it was taken away
    with atomic.storage(run.code):
        for package in ("hpc_swe", "jobs"):
            source = Path(__file__).parents[1] / package
            shutil.copytree(source, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        _replace(copy, place.code)


def _replace(new: Path, final: Path) -> None:
    """Also a folder, which a rename alone would not."""
    mine = atomic.temporary(final)
    new.rename(mine)  # fails where another start has taken it away, and before anything is moved for it
    if final.is_dir():
        final.rename(atomic.temporary(final))
    mine.rename(final)


def _take_tasks(config: RunConfig) -> dict[Split, list[Task]]:
    wanted = config.tasks
    taken = wanted.take(config.taskset)
    if isinstance(config.taskset, Swebench) and not config.taskset.checked:
        log.warning("[taskset] checked is not set: instances are used that nobody has checked")
    elif isinstance(config.taskset, Swebench) and isinstance(config.sandbox, Apptainer):
        config.taskset.require_images([*taken["train"], *taken["eval"]], Path(config.sandbox.images))
    if config.mode == "eval" and not taken["eval"]:
        raise ConfigError(
            f"tasks.eval = {wanted.eval} (--tasks), tasks.eval_from = {wanted.eval_from}: [taskset] has no "
            "held-out task there; ask for one at least, of those that it has"
        )
    for key, asked, found in (("train", wanted.train, taken["train"]), ("eval", wanted.eval, taken["eval"])):
        if len(found) < asked:
            log.warning("tasks.%s = %d: [taskset] has %d of them only", key, asked, len(found))
    return taken


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
    begin.add_argument("--dry-run", action="store_true", help="print batch scripts and costs; make nothing")
    begin.add_argument(
        "--upgrade", action="store_true", help="go on with this code, not with the one of the run's start"
    )
    again = verbs.add_parser("tick", help="submit what is missing; cron calls this")
    again.add_argument("run", type=Path)
    end = verbs.add_parser("stop", help="let the run drain")
    end.add_argument("run", type=Path)
    end.add_argument("--now", action="store_true", help="exit at once, then end what is left")
    return parser


def _start(arguments: argparse.Namespace) -> None:
    files = [Path(word) for word in arguments.config if "=" not in word]
    config = configuration.of_words(arguments.config)
    runs = Path(os.environ.get("HPC_SWE_RUNS", "runs"))
    run = RunDir((arguments.run or runs / files[0].stem).absolute())
    if arguments.dry_run:
        from hpc_swe import dry_run  # jobs import this module, and print no tables

        dry_run.show(run, config)
        _preflight(run, config)
        return
    tell(run, start(run, config, upgrade=arguments.upgrade))
    if arguments.wait:
        wait(run, config, arguments.wait)


def tell(run: RunDir, plan: Plan) -> None:
    """Say what was submitted.

    Raises:
        HpcSweError: A role is stuck.
    """
    submitted = ", ".join(f"{count} {role}" for role, count in plan.submit.items())
    cancelled = f", cancelled {len(plan.cancel)}" if plan.cancel else ""
    print(f"{run.root}: submitted {submitted or 'nothing'}{cancelled}")
    if plan.stuck:
        raise HpcSweError("; ".join(f"{role}: {why}" for role, why in plan.stuck.items()))


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
            tell(run, reconcile.tick(run, config))
        else:
            stop(run, config, now=arguments.now)
    except HpcSweError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
