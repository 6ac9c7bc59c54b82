"""Keep what a run found out about each task, and which tasks its next groups have, beside each batch."""

from hpc_swe.base.records import BatchManifest, Record
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic, folders


class TaskHistory(Record, frozen=True, kw_only=True):
    """Sum up the groups of one task that batches have consumed."""

    groups: int = 0
    episodes: int = 0
    resolved: int = 0
    """Episodes that resolved the task."""
    settled: int = 0
    """Last groups in a row that all of their episodes resolved, or none."""
    passed_over: int = 0
    """Visits at which the task was passed over since its last group."""


class RunHistory(Record, frozen=True, kw_only=True):
    """Hold what a coordinator needs to plan the groups after a batch."""

    next_group: int = 0
    """First group of `planned`."""
    visits: int = 0
    """Visits made, or passed over, for all groups that are planned."""
    planned: list[str] = []
    """Tasks of the groups from `next_group` on that may have been dispatched."""
    tasks: dict[str, TaskHistory] = {}


def read(run: RunDir, step: int, next_group: int) -> RunHistory:
    """Read the history after batch `step`, or raise CorruptRecord; `next_group` follows the batch.

    A run of a version without histories made one visit per group.
    """
    path, manifest = run.history(step), folders.manifest(run.batch(step), BatchManifest)
    if path.name not in manifest.files:
        return RunHistory(next_group=next_group, visits=next_group)
    return atomic.decode(path, folders.read(path.parent, path.name, manifest), RunHistory)
