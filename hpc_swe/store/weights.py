"""List the weight versions on disk, find the newest, and choose which ones retention removes."""

from collections.abc import Collection

from hpc_swe.records import WeightManifest, WeightVersion
from hpc_swe.rundir import RunDir
from hpc_swe.store import folders


def published(run: RunDir) -> list[WeightVersion]:
    """List all published versions, oldest first; those of the live incarnation come last."""
    return sorted(folders.published(run.weights, WeightManifest, lambda m: m.version, run.weight))


def newest(run: RunDir) -> WeightVersion | None:
    """Return the highest version, which is the live incarnation's newest; None before any is published."""
    return max(published(run), default=None)


def superseded(
    versions: Collection[WeightVersion], in_use: Collection[str], keep_last: int, keep_every: int
) -> list[WeightVersion]:
    """List the versions to remove: neither among the last, nor a milestone, nor named by a live lease.

    The newest is never among them, whatever the limits.
    """
    ordered = sorted(versions)
    kept = set(ordered[-max(1, keep_last) :])
    return [
        version
        for version in ordered
        if version not in kept
        and version.name not in in_use
        and not (keep_every and version.step % keep_every == 0)
    ]
