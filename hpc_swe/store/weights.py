"""Weight versions on disk: publish, follow the newest, retain."""

from collections.abc import Collection

from hpc_swe.records import WeightManifest, WeightVersion
from hpc_swe.rundir import RunDir
from hpc_swe.store import folders


def published(run: RunDir) -> list[WeightVersion]:
    """All published versions, oldest first; those of the live incarnation come last."""
    return sorted(folders.published(run.weights, WeightManifest, _version, lambda manifest: manifest.version))


def newest(run: RunDir) -> WeightVersion | None:
    """The newest version of the live incarnation, which is the highest; None before any is published."""
    return max(published(run), default=None)


def manifest(run: RunDir, version: WeightVersion) -> WeightManifest:
    """What a version's folder holds.

    Raises:
        FileNotFoundError: It is not, or no longer, published: take the newest.
    """
    return folders.manifest(run.weight(version), WeightManifest)


def _version(name: str) -> WeightVersion | None:
    try:
        return WeightVersion.parse(name)
    except ValueError:
        return None


def superseded(
    versions: Collection[WeightVersion], in_use: Collection[str], keep_last: int, keep_every: int
) -> list[WeightVersion]:
    """Versions that retention lets go: not among the last, no milestone, not named by a live lease.

    The newest is never let go, whatever the limits.
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
