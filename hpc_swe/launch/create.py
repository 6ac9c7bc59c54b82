"""Create a run's folder once and completely, even when several starts race (docs/protocol.md)."""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpc_swe.base import shipped
from hpc_swe.base.errors import ConfigError, CorruptRecord, StorageError
from hpc_swe.base.records import RunManifest
from hpc_swe.base.rundir import PROTOCOL, RunDir
from hpc_swe.base.store import atomic, folders
from hpc_swe.base.store.parquet import tasks, trajectories
from hpc_swe.cluster.executors.base import own_environment
from hpc_swe.cluster.processes import completed
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.launch.plan import Taken

ENGINE_KEY = "VLLM_API_KEY"  # the environment variable of `launch start` that holds an engine's key
MAKING = ".making"  # folder below the run's in which a start prepares the files
MAKING_TIMEOUT_S = 120.0  # seconds without a change after which a start is dead; a run takes a second or two
PAUSE_S = 0.1
COMMIT_S = 60.0  # longest wait for the commit of this checkout
LISTINGS = 5
"""Listings of a folder before it counts as foreign: a start that replaces a dead one removes files first."""
PACKAGES = ("hpc_swe", "jobs")

log = logging.getLogger(__name__)


def create(run: RunDir, config: RunConfig, taken: Taken) -> bool:
    """Create the run; return False when another start has created it."""
    try:
        with atomic.storage(run.root):
            run.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(
            f"{run.root}: cannot be made: {error.strerror}; choose a folder you own with {option(config)}"
        ) from None
    model_sha256 = digest(Path(config.model))  # takes minutes, so do it before others wait
    with making(run) as place:
        if place:
            publish(run, place, config, taken, model_sha256)
    return place is not None


def require_free(run: RunDir, config: RunConfig) -> None:
    """Raise ConfigError, before anything is changed, unless the folder is a run, empty, or absent."""
    root, code = run.root, Path(__file__).resolve().parents[2]
    real = Path(os.path.realpath(root))  # where links lead in a circle, resolve() raises
    remedy = f"name another folder with {option(config)}"
    if run.config.exists() and run.manifest.exists():
        return
    if unfit := _unfit(root):
        raise ConfigError(f"{root}: {unfit}; {remedy}")
    for what, place in (("your home", Path("~").expanduser()), ("this checkout", code)):
        if place.resolve().is_relative_to(real):
            raise ConfigError(f"{root}: {what} {'is' if place.resolve() == real else 'lies in'} it; {remedy}")
    if any(real.is_relative_to(code / package) for package in PACKAGES):
        raise ConfigError(f"{root}: among the packages that a run copies; {remedy}")
    found = _foreign(run)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(f"{root}: no run, but it holds {', '.join(found[:3])}{more}; {remedy}")


def _unfit(root: Path) -> str:
    """Say why no run can be made at a path, whatever the folder holds; empty if one can."""
    if configuration.FOREIGN_BYTES.search(str(root)):
        return "the name is not UTF-8, as records are"
    if not root.exists():
        if root.is_symlink():
            return f"a link to {os.path.realpath(root)}, which does not exist"
        above = next(filter(os.path.lexists, root.parents))
        return "" if above.is_dir() else f"below {above}, which is no folder"
    if not root.is_dir():
        return "a file, not a folder"
    owner = root.stat().st_uid
    return "" if owner == os.getuid() else f"belongs to user {owner}"


def _foreign(run: RunDir) -> list[str]:
    """List the names in a folder that is no run and that no start is making into one."""
    found: list[str] = []
    for _ in range(LISTINGS):
        found = sorted(os.listdir(run.root)) if run.root.is_dir() else []
        if not found or MAKING in found or {run.config.name, run.manifest.name} <= set(found):
            return []
        with contextlib.suppress(OSError, CorruptRecord):
            atomic.get(run.manifest, RunManifest)
            return []
        time.sleep(PAUSE_S)
    return found


@contextlib.contextmanager
def making(run: RunDir, timeout_s: float = MAKING_TIMEOUT_S) -> Iterator[RunDir | None]:
    """Yield the folder in which this start makes the run's files; others wait, and get None at the end.

    A start that seems dead loses its folder, and gets StorageError, so that it does no harm if it was slow.
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
                elif time.monotonic() - since > timeout_s:  # its maker has died
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
    copy_code(run, place)
    atomic.write_secret(place.token, key(run, config).encode())
    tasks.write(place.tasks, taken.tasks)
    if taken.trajectories:
        trajectories.write(place.trajectories, taken.trajectories)
    all_tasks = [task for split in taken.tasks.values() for task in split]
    tasks.write_hidden(place.changed_tests, config.taskset.changed_tests(all_tasks))
    tasks.write_hidden(place.references, config.taskset.references(all_tasks))
    data = encoded(configuration.dump(config))
    atomic.write(place.made, data)
    atomic.put(
        place.manifest,
        RunManifest(
            **_identity(run),
            protocol=PROTOCOL,
            commit=_commit(),
            model_sha256=model_sha256,
            config_sha256=hashlib.sha256(data).hexdigest(),
            folder=str(Path.cwd()),
            environment=own_environment(),
        ),
    )
    replace(place.manifest, run.manifest)  # first: it marks the folder as a run's, should this start die
    run.make()
    for path in list(place.root.iterdir()):
        replace(path, run.root / path.name)
    atomic.write(place.config, data)
    place.config.rename(run.config)  # last: it marks the run as complete


def _identity(run: RunDir) -> dict[str, Any]:
    """Draw the id by which jobs find the run, and note which folder has it."""
    return {"run_id": f"{run.root.name}-{secrets.token_hex(3)}", **_place(run)}


def _place(run: RunDir) -> dict[str, Any]:
    return {"root": str(run.root.resolve()), "inode": run.root.stat().st_ino}


def note_place(run: RunDir) -> None:
    """Note where a run is that was moved or restored, so that copies at its old path are told from it."""
    made = atomic.get(run.manifest, RunManifest)
    if (noted := msgspec.structs.replace(made, **_place(run))) != made:
        atomic.put(run.manifest, noted)


def adopt(run: RunDir) -> None:
    """Make a copy of a run a run of its own, without the records of the original's jobs."""
    log.warning("%s is a copy of a run: it becomes a run of its own", run.root)
    folders.remove(run.launches)
    run.make()
    made = atomic.get(run.manifest, RunManifest)
    atomic.put(run.manifest, msgspec.structs.replace(made, **_identity(run)))


def renew_code(run: RunDir) -> None:
    """Replace a run's code by that of this checkout, whose keys its configuration has from now on."""
    copy_code(run, run)
    manifest = atomic.get(run.manifest, RunManifest)
    renewed = msgspec.structs.replace(manifest, commit=_commit(), environment=own_environment())
    atomic.write(run.made, atomic.read(run.config))
    atomic.put(run.manifest, renewed)


def key(run: RunDir, config: RunConfig) -> str:
    """Return the key of every engine route: that of an external engine, else the run's own."""
    given = os.environ.get(ENGINE_KEY, "") if config.inference.url else ""
    known = run.token.read_text(encoding="ascii").strip() if run.token.exists() else ""
    return given or known or secrets.token_hex(16)


def option(config: RunConfig) -> str:
    """Return the command line option that names a run's folder."""
    return "--out" if config.mode == "eval" else "--run"


def copy_code(run: RunDir, place: RunDir) -> None:
    """Copy the packages, so that jobs of a long run do not see later changes of the checkout."""
    copy = atomic.temporary(run.code)  # not in `place`: copying would make it again after its removal
    ignored = shutil.ignore_patterns("__pycache__", "configs", "containers", "jobs")  # of a wheel
    try:
        with atomic.storage(run.code):
            for package in PACKAGES:
                source = shipped.folder(package)
                shutil.copytree(source, copy / package, ignore=ignored, copy_function=_copy_file)
            with tarfile.open(copy / RunDir.code_archive.name, "w") as archive:
                for package in PACKAGES:
                    archive.add(copy / package, package)
            replace(copy, place.code)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _copy_file(source: str, target: str) -> None:
    """Copy one file; `copytree` would collect a refusal of the file system as text, file by file."""
    with atomic.storage(Path(target)):
        shutil.copy2(source, target)


def replace(new: Path, final: Path) -> None:
    """Rename `new` to `final`, also where a folder is there, which rename(2) alone would refuse.

    A file takes one step, so a start that was frozen replaces no file of the one that took its place.
    """
    if final.is_dir():
        moved = atomic.temporary(final)
        new.rename(moved)  # fails, before anything else is moved, where another start has removed it
        if final.is_dir():  # unless both are the same folder
            final.rename(atomic.temporary(final))
        new = moved
    new.rename(final)


def encoded(tree: Mapping[str, Any]) -> bytes:
    """Encode the tree of a configuration for run.json."""
    return msgspec.json.format(msgspec.json.encode(tree), indent=2)


def _commit() -> str:
    """Return the commit of this checkout; "unknown" if no commit holds this file, or git does not answer."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD", "HEAD:./create.py"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        job = subprocess.Popen(git, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        done = completed(job, COMMIT_S)
        done.check_returncode()
        return done.stdout.split()[0]
    return "unknown"


def digest(model: Path) -> str:
    """Return a digest of a model folder's file names and contents; a large model takes minutes."""
    total = hashlib.sha256()
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
