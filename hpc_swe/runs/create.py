"""A run's folder is made once and whole, by one of several starts; see docs/protocol.md, the layout."""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from hpc_swe import config as configuration
from hpc_swe.errors import ConfigError, CorruptRecord, StorageError
from hpc_swe.plugins.sandboxes.base import ImageSandboxes
from hpc_swe.plugins.tasksets.base import Referenced, RepositoryTasks, WithChangedTests
from hpc_swe.records import RunManifest, Split, Task
from hpc_swe.rundir import PROTOCOL, RunDir
from hpc_swe.runs import attach, environment
from hpc_swe.settings import RunConfig
from hpc_swe.store import atomic, folders, tasks

MAKING, MAKING_S, PAUSE_S = ".making", 120.0, 0.1  # a run folder is made in a second or two
LOOKS = 5  # a start that takes the place of a dead one is not there for a moment
PACKAGES = ("hpc_swe", "jobs")
Taken = Mapping[Split, Sequence[Task]]

log = logging.getLogger(__name__)


def create(run: RunDir, config: RunConfig, taken: Taken) -> bool:
    """Make the run with the tasks of `take_tasks`; False when another start has made it meanwhile."""
    try:
        with atomic.storage(run.root):
            run.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(
            f"{run.root}: cannot be made: {error.strerror}; choose a folder you own with {option(config)}"
        ) from None
    model_sha256 = digest(Path(config.model))  # minutes, so not while others wait
    with making(run) as place:
        if place:
            publish(run, place, config, taken, model_sha256)
    return place is not None


def require_free(run: RunDir, config: RunConfig) -> None:
    """Refuse a folder that is something else than a run, before anything in it is touched.

    Raises:
        ConfigError: The message says what is there.
    """
    root, real, code = run.root, run.root.resolve(), Path(__file__).resolve().parents[2]
    remedy = f"name a folder of its own with {option(config)}"
    if run.config.exists() and run.manifest.exists():
        return
    if root.is_symlink() and not root.exists():
        raise ConfigError(f"{root}: a link to {real}, which is not there; {remedy}")
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root}: a file and no folder; {remedy}")
    for what, place in (("your home", Path("~").expanduser()), ("this checkout", code)):
        if place.resolve().is_relative_to(real):
            raise ConfigError(f"{root}: {what} {'is' if place.resolve() == real else 'lies in'} it; {remedy}")
    if any(real.is_relative_to(code / package) for package in PACKAGES):
        raise ConfigError(f"{root}: among the packages that a run copies; {remedy}")
    found = _foreign(run)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(f"{root}: no run, but it holds {', '.join(found[:3])}{more}; {remedy}")


def _foreign(run: RunDir) -> list[str]:
    """Names in a folder that is no run, and that no start is making one of; each look judges one listing."""
    found: list[str] = []
    for _ in range(LOOKS):
        found = sorted(os.listdir(run.root)) if run.root.is_dir() else []
        if not found or MAKING in found or {run.config.name, run.manifest.name} <= set(found):
            return []
        with contextlib.suppress(OSError, CorruptRecord):
            atomic.get(run.manifest, RunManifest)
            return []
        time.sleep(PAUSE_S)
    return found


@contextlib.contextmanager
def making(run: RunDir, limit_s: float = MAKING_S) -> Iterator[RunDir | None]:
    """Where this start makes the run's files; others wait, and get None once the run is made.

    A start that seems dead loses the folder that it writes in, so that one which was slow can do no harm.

    Raises:
        StorageError: This start was taken for dead.
    """
    taken, seen, since = run.root / MAKING, 0, 0.0
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


def publish(run: RunDir, place: RunDir, config: RunConfig, taken: Taken, model_sha256: str) -> None:
    """Write a run's files in `place`, and move them into the run."""
    _copy_code(run, place)
    atomic.write(place.token, key(run, config).encode())
    tasks.write(place.tasks, taken)
    all_tasks = [task for split in taken.values() for task in split]
    if isinstance(config.taskset, WithChangedTests):
        tasks.write_hidden(place.changed_tests, config.taskset.changed_tests(all_tasks))
    if isinstance(config.taskset, Referenced):
        tasks.write_hidden(place.references, config.taskset.references(all_tasks))
    data = encoded(config)
    atomic.put(
        place.manifest,
        RunManifest(
            protocol=PROTOCOL,
            run_id=f"{run.root.name}-{secrets.token_hex(3)}",
            commit=_commit(),
            model_sha256=model_sha256,
            config_sha256=hashlib.sha256(data).hexdigest(),
            folder=str(Path.cwd()),
            environment=environment.own_environment(),
        ),
    )
    replace(place.manifest, run.manifest)  # first: a folder that has it is a run's, also when this start dies
    run.make()
    for path in list(place.root.iterdir()):
        replace(path, run.root / path.name)
    atomic.write(place.config, data)
    place.config.rename(run.config)  # last: its presence means that the run is whole


def renew_code(run: RunDir) -> None:
    """Give a run the code of this checkout."""
    _copy_code(run, run)
    manifest = atomic.get(run.manifest, RunManifest)
    changes = {"commit": _commit(), "environment": environment.own_environment()}
    atomic.put(run.manifest, msgspec.structs.replace(manifest, **changes))


def key(run: RunDir, config: RunConfig) -> str:
    """What every engine route asks for: the key of somebody else's engine, else the run's own."""
    given = os.environ.get(attach.KEY, "") if config.inference.url else ""
    known = run.token.read_text(encoding="ascii").strip() if run.token.exists() else ""
    return given or known or secrets.token_hex(16)


def option(config: RunConfig) -> str:
    """By which option people name a run's folder."""
    return "--out" if config.mode == "eval" else "--run"


def _copy_code(run: RunDir, place: RunDir) -> None:
    """Jobs of a run that lasts for weeks must not see what is changed in the checkout meanwhile."""
    copy = atomic.temporary(run.code)  # not in `place`: copying would make it anew after it was taken away
    with atomic.storage(run.code):
        for package in PACKAGES:
            source = Path(__file__).parents[2] / package
            shutil.copytree(source, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        replace(copy, place.code)


def replace(new: Path, final: Path) -> None:
    """Also a folder, which a rename alone would not."""
    mine = atomic.temporary(final)
    new.rename(mine)  # fails where another start has taken it away, and before anything is moved for it
    if final.is_dir():
        final.rename(atomic.temporary(final))
    mine.rename(final)


def take_tasks(config: RunConfig) -> Taken:
    """The run's tasks; that there are fewer than asked for is said.

    Raises:
        ConfigError: There are none, or their images are missing.
    """
    wanted = config.tasks
    taken = wanted.take(config.taskset)
    if isinstance(config.taskset, RepositoryTasks) and not config.taskset.checked:
        log.warning(
            "[taskset] checked is not set: instances are used that nobody has checked, and what resolves "
            "them is graded once, without a second sitting"
        )
    elif isinstance(config.taskset, RepositoryTasks) and isinstance(config.sandbox, ImageSandboxes):
        config.taskset.check_images([*taken["train"], *taken["eval"]], Path(config.sandbox.images))
    if config.mode == "eval" and not taken["eval"]:
        raise ConfigError(
            f"tasks.eval = {wanted.eval} (--tasks), tasks.eval_from = {wanted.eval_from}: [taskset] has no "
            "held-out task there; ask for one at least, of those that it has"
        )
    is_run = config.mode == "grpo" and config.counts.get("coordinator", 1)
    if is_run and not taken["train"]:
        raise ConfigError(f"tasks.train = {wanted.train}: [taskset] has no task to train on; ask for some")
    if is_run and config.eval.every and not taken["eval"]:
        raise ConfigError(
            f"tasks.eval = {wanted.eval}, tasks.eval_from = {wanted.eval_from}: [taskset] has no held-out "
            f"task there, but eval.every = {config.eval.every}; ask for some, or set eval.every = 0"
        )
    for key, asked, found in (("train", wanted.train, taken["train"]), ("eval", wanted.eval, taken["eval"])):
        if len(found) < asked:
            log.warning("tasks.%s = %d: [taskset] has %d of them only", key, asked, len(found))
    return taken


def encoded(config: RunConfig) -> bytes:
    """A configuration as run.json holds it."""
    return msgspec.json.format(msgspec.json.encode(configuration.dump(config)), indent=2)


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def digest(model: Path) -> str:
    """Of the names and contents of a model folder's files; minutes for a large one."""
    total = hashlib.sha256()
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
