"""control/: which orders stand. What else lies there is nobody's order, and stops nothing."""

from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

KNOWN = tuple(path.name for path in (RunDir.drain, RunDir.stop, RunDir.finished))


def standing(run: RunDir) -> list[str]:
    """Names of the orders that stand, in one listing."""
    return [name for name in atomic.names(run.control) if name in KNOWN]
