"""Open a run that exists, after checking its owner, its mode and its protocol."""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpc_swe.base import cli
from hpc_swe.base.errors import ConfigError, CorruptRecord, StaleRun, StorageError
from hpc_swe.base.records import RunManifest
from hpc_swe.base.rundir import PROTOCOL, RunDir
from hpc_swe.base.store import atomic, sharing
from hpc_swe.cluster.executors.base import INTERPRETER
from hpc_swe.config import config as configuration
from hpc_swe.config import job_counts
from hpc_swe.config.settings import RunConfig

T = TypeVar("T")
log = logging.getLogger(__name__)


def load(run: RunDir, *, trains: bool = False, reads: bool = False) -> RunConfig:
    """Return the configuration of a run that exists.

    A caller that only `reads` may be another user, with whose group the run is shared. A process that
    `trains` makes files for the run from now on, with the run's umask.
    If somebody changed by hand what decides its training, warn; raise ConfigError where it `trains`.
    Raise ConfigError also if the folder holds no run, or another user's; CorruptRecord if its configuration
    cannot be read; and StaleRun if it was made under another protocol version, or by an older release with
    keys that this one lacks.
    """
    owner, manifest, tree = _read_run(run)
    if owner != os.getuid() and not reads:
        raise ConfigError(f"{run.root}: belongs to user {owner}; a run is acted on by its owner only")
    if owner == os.getuid():
        require_private(run.root, is_shared=tree.get("share") == "group")
    _refuse_stale(run, manifest, tree)
    made = _read(run.made, dict[str, Any]) if run.made.exists() else {}
    if changed := configuration.changed_by_hand(made, tree):
        problem = (
            f"{run.config}: {'; '.join(changed)}: changed by hand, and this decides what the run trains; put "
            "the old value back, or start another run with the new one"
        )
        if trains:
            raise ConfigError(problem)
        log.warning("%s; its jobs refuse to start", problem)
    is_archive = not os.access(run.root, os.W_OK)  # read-only, by its mode or its file system
    if not is_archive and not all(folder.is_dir() for folder in run.folders()):
        with suppress(PermissionError):  # copied or cleaned without its empty folders
            run.make_folders()
    if trains:
        sharing.take_umask(run)
    return configuration.build(tree, str(run.config))


def _read_run(run: RunDir) -> tuple[int, RunManifest, dict[str, Any]]:
    """Return who owns a run, its manifest and the tree of its configuration."""
    try:
        owner = run.config.stat().st_uid
        return owner, _read(run.manifest, RunManifest), _read(run.config, dict[str, Any])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{run.root}: no run here ({error.filename} is missing); {_remedy(run.root)}"
        ) from None
    except (PermissionError, StorageError):
        if os.access(run.config, os.R_OK):
            raise
        raise ConfigError(
            f"{run.root}: closed to you; its owner may let a group read it: `launch start --run "
            f"{cli.quoted(run.root)} share=group`"
        ) from None


def _refuse_stale(run: RunDir, manifest: RunManifest, tree: dict[str, Any]) -> None:
    stale = "made by an older release" if configuration.removed_keys(tree) else ""
    if manifest.protocol != PROTOCOL:
        stale = f"protocol {manifest.protocol}, this code reads {PROTOCOL}"
    if stale:
        example = f"cd {cli.quoted(run.code)} && python -m hpc_swe.status {cli.quoted(run.root)}"
        raise StaleRun(
            f"{run.root}: {stale}; call the command in {run.code}, which holds the run's own code (commit "
            f"{manifest.commit}), for example: {example}"
        )


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(atomic.read(path), type=kind)
    except ValueError as error:
        raise CorruptRecord(
            f"{path}: not what `launch start` wrote: {error}; restore the file, or start another run"
        ) from None


def is_copy(run: RunDir) -> bool:
    """Return whether the folder was copied from a run's, not moved: jobs of its id are the original's.

    The folder at the noted path is the original; if it holds no run of this id, that of the noted inode is.
    """
    made, inode = atomic.get(run.manifest, RunManifest), run.root.stat().st_ino
    if made.root == str(run.root.resolve()):
        return False
    return made.inode != inode or _has_run(RunDir(Path(made.root)), made.run_id, inode)


def _has_run(other: RunDir, run_id: str, inode: int) -> bool:
    """Return whether a folder holds a run of this id, and is not the folder of this inode by another path."""
    with suppress(OSError, CorruptRecord, StorageError):
        return other.root.stat().st_ino != inode and atomic.get(other.manifest, RunManifest).run_id == run_id
    return False


def require_original(run: RunDir) -> None:
    """Raise ConfigError if the folder is a copy that was not started yet."""
    if is_copy(run):
        raise ConfigError(
            f"{run.root}: a copy of the run {atomic.get(run.manifest, RunManifest).root}, whose jobs are not "
            f"to be touched; `launch start --run {cli.quoted(run.root)}` makes it a run of its own"
        )


def enter(run: RunDir) -> None:
    """Go to the folder in which relative paths of the run start; raise ConfigError if it is gone."""
    folder = atomic.get(run.manifest, RunManifest).folder
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}; the run was started in this folder, and its relative paths start "
            "there; put it back"
        ) from None


def note_interpreter(run: RunDir, config: RunConfig) -> None:
    """Note that jobs run with this interpreter, whichever a tick has, and in its environment that they do.

    containers/setup.sh changes no environment that a run uses, and passes over links to runs that are gone:
    another node may know a folder that this one does not see.
    """
    made = atomic.get(run.manifest, RunManifest)
    environment = {**made.environment, INTERPRETER: sys.executable}
    if environment != made.environment:
        atomic.put(run.manifest, msgspec.structs.replace(made, environment=environment))
    if any(job_counts.desired(config).values()) and sys.prefix != sys.base_prefix:
        link = Path(sys.prefix, "runs", made.run_id)
        with suppress(OSError):  # somebody else's environment, which that person guards
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)  # the run may have moved
            link.symlink_to(run.root.resolve())


def _remedy(folder: Path) -> str:
    inside = sorted(path.parent.name for path in folder.glob(f"*/{RunDir(folder).config.name}"))
    return f"it holds the runs {', '.join(inside[:8])}" if inside else "`launch start` creates a run"


def require_private(root: Path, is_shared: bool = False) -> None:
    """Raise ConfigError if others may read or write a run: it holds keys, and jobs trust what it says.

    The group of a run that `is_shared` may read.
    """
    found = root.stat()
    if found.st_uid != os.getuid():
        raise ConfigError(f"{root}: belongs to user {found.st_uid}; a run is acted on by its owner only")
    if found.st_mode & (0o027 if is_shared else 0o077):
        raise ConfigError(
            f"{root}: mode {found.st_mode & 0o777:o} lets others in; run chmod 700 {cli.quoted(root)}"
        )
