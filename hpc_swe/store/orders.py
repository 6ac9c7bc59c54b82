"""Read the orders (DRAIN, STOP, FINISHED) in control/. Any other file there is ignored."""

from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

KNOWN = tuple(path.name for path in (RunDir.drain, RunDir.stop, RunDir.finished))


def active(run: RunDir) -> list[str]:
    """List the names of the orders in force, by one listing of the folder."""
    return [name for name in atomic.names(run.control) if name in KNOWN]
