"""Read the orders (DRAIN, STOP, FINISHED) in control/. Any other file there is ignored."""

import logging

from hpc_swe.base.errors import StorageError
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic

log = logging.getLogger(__name__)

KNOWN = tuple(path.name for path in (RunDir.drain, RunDir.stop, RunDir.finished))


def active(run: RunDir) -> list[str]:
    """List the names of the orders in force, by one listing of the folder."""
    return [name for name in atomic.names(run.control) if name in KNOWN]


def is_over(run: RunDir) -> bool:
    """Return whether nothing is to be started again; no, while the file system refuses to say."""
    try:
        return not {run.stop.name, run.finished.name}.isdisjoint(active(run))
    except StorageError as error:
        log.warning("looking again: %s", error)
        return False
