"""Let the group of a run's folder read what `status`, `show` and `report` need, and nothing else.

The mode of the run's folder says whether it is shared, and from it each process takes its umask, so that
files that are made later are open, too. Every other folder stays closed to all but the owner, whatever modes
its files have. `atomic.write_secret` writes the files beside them that stay closed.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic

SHARED, PRIVATE = 0o2750, 0o700
"""Modes of an open folder, in which all has its group, and of a closed one."""

log = logging.getLogger(__name__)


def is_shared(run: RunDir) -> bool:
    """Return whether the group may read the run."""
    return bool(run.root.stat().st_mode & 0o050)


def take_umask(run: RunDir) -> None:
    """Set the umask of a process that works for a run, which decides who may read what it publishes."""
    os.umask(0o027 if is_shared(run) else 0o077)


def share(run: RunDir, with_group: bool) -> None:
    """Open a run to the group of its folder, or close it, and take the umask that fits.

    A run that is open already is opened again: processes from before may have added closed files.
    """
    was_shared, mode = is_shared(run), SHARED if with_group else PRIVATE
    if with_group != was_shared:
        run.root.chmod(PRIVATE)
    if with_group or was_shared:
        for folder in (run.stacks, run.skipped(0).parent, run.tracked):  # others would make them open
            folder.mkdir(exist_ok=True)
        opened = list(_open(run))
        for path in {*run.root.iterdir()}.difference(opened):
            _set_mode(path, PRIVATE)
        for path in opened:
            _set_mode(path, mode)
        run.root.chmod(mode)  # last: it says that all is done
    take_umask(run)
    barred = [path for path in run.root.parents if path.stat().st_uid == os.getuid() and not _lets_in(path)]
    if with_group and barred:
        log.warning("%s: its group cannot enter; run chmod g+x %s", barred[0], barred[0])


def _set_mode(path: Path, mode: int) -> None:
    """Give a folder its mode, and a file what is left of it without execution; leave links alone.

    What they lead to may be another's, as a folder of models.
    """
    if path.is_symlink():
        return
    with contextlib.suppress(FileNotFoundError):  # a job has removed it just now
        path.chmod(mode if path.is_dir() else mode & 0o640)


def _lets_in(folder: Path) -> bool:
    return bool(folder.stat().st_mode & 0o011)


def _open(run: RunDir) -> Iterator[Path]:
    """Yield all that a group may read of a run."""
    folders = [run.archives.parent, run.evals, run.metrics, run.control, run.status.parent, run.launches]
    folders += [run.logs("learner").parent, run.report, run.tensorboard]
    files = [run.manifest, run.config, run.made, run.results, run.summary, *run.root.glob("predictions.*")]
    yield from (path for path in files if path.exists())
    for top in (each for each in folders if not each.is_symlink()):
        for folder, _, names in os.walk(top):
            yield Path(folder)
            yield from (Path(folder, name) for name in names)


def entries(folder: Path) -> list[str]:
    """List the published names of a folder; none where there is no folder, or its owner keeps it closed."""
    return atomic.names(folder) if os.access(folder, os.R_OK | os.X_OK) else []
