"""Find what may be deleted: folders that nothing needs any more, and unfinished files of dead processes.

The learner resumes from the newest checkpoint, or from the one before it when that does not load, and then
needs every batch from there on.
"""

import logging
import re
from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from pathlib import Path

from hpc_swe.base.errors import CorruptRecord
from hpc_swe.base.records import Node, WeightManifest, WeightVersion
from hpc_swe.base.rundir import SPOOLS, RunDir
from hpc_swe.base.store import atomic, checkpoints, folders, weights
from hpc_swe.base.store.checkpoints import Checkpoint
from hpc_swe.base.store.spool import STATES
from hpc_swe.config.settings import RetentionConfig
from hpc_swe.roles.coordinator.batching import batches

TEMPORARY = re.compile(r"\..*-([0-9a-f]{8})")

log = logging.getLogger(__name__)


def superseded(
    run: RunDir, retention: RetentionConfig, nodes: Iterable[Node], kept_steps: Set[int] = frozenset()
) -> list[Path]:
    """Return the published folders that nothing needs any more; the newest of each kind is always needed.

    Weights and checkpoints of `kept_steps` are needed too.
    """
    in_use = {Path(node.reading).name for node in nodes} | {v.name for node in nodes for v in node.versions}
    found = checkpoints.published(run)
    kept = kept_checkpoints(found, retention.keep_every)
    old = [run.checkpoint(*c) for c in found if c not in kept and c[0] not in kept_steps]
    old = [path for path in old if path.name not in in_use]
    first = first_kept_batch(found)
    old += [run.batch(step) for step in batches.published_steps(run)[:-1] if step < first]
    return old + [run.weight(v) for v in _superseded_weights(run, retention, in_use, kept_steps)]


def newest_checkpoints(published: Sequence[Checkpoint]) -> set[Checkpoint]:
    """Return the checkpoint to resume from and its fallback, by step as well as by incarnation."""
    return {*sorted(published)[-2:], *sorted(published, key=lambda c: c[::-1])[-2:]}


def kept_checkpoints(published: Sequence[Checkpoint], keep_every: int) -> set[Checkpoint]:
    """Return the newest checkpoints, and those of every `keep_every` steps (0: none of these)."""
    milestones = {c for c in published if keep_every and c[0] % keep_every == 0}
    return milestones | newest_checkpoints(published)


def first_kept_batch(published: Sequence[Checkpoint]) -> int:
    """Return the first step that a learner may have to repeat; 0 while there is no fallback checkpoint."""
    return min(newest_checkpoints(published))[0] if len(published) > 1 else 0


def orphans(folder: Path, alive: Iterable[str]) -> list[Path]:
    """Return what was not removed whole, and the unfinished files of processes that are not alive."""
    with atomic.storage(folder):
        found = [path for path in folder.iterdir() if TEMPORARY.fullmatch(path.name)]
    return [path for path in found if path.name[-8:] not in alive or path.name.startswith(folders.TRASH)]


def swept_folders(run: RunDir) -> list[Path]:
    """Return the folders in which cells, messages and folders are published."""
    spools = [run.spool(name) / state for name in SPOOLS for state in STATES]
    cells = [run.root, run.nodes, run.evals, run.archives, run.endpoints.parent]
    return [*cells, run.batches, run.weights, run.checkpoints, *spools]


def _superseded_weights(
    run: RunDir, retention: RetentionConfig, in_use: set[str], kept_steps: Set[int]
) -> list[WeightVersion]:
    """Return the versions to delete; the parents of a delta are kept as long as the delta."""
    published = weights.published(run)
    found = weights.superseded(published, in_use, retention.keep_last, retention.keep_every)
    gone = {version for version in found if version.step not in kept_steps}
    if not gone:
        return []
    for version in sorted(set(published) - gone):
        parent = _parent(run, version)
        while parent in gone:
            gone.discard(parent)
            parent = _parent(run, parent)
    return sorted(gone)


def _parent(run: RunDir, version: WeightVersion) -> WeightVersion | None:
    """Return a version's parent; one without a readable manifest cannot be loaded and needs no parent."""
    try:
        return _recorded_parent(run.weight(version))
    except (FileNotFoundError, CorruptRecord) as error:
        log.warning("kept %s without its parents: %s", version.name, error)
        return None


@lru_cache(maxsize=10_000)
def _recorded_parent(folder: Path) -> WeightVersion | None:
    """Read a manifest once, not at each beat: one that is published does not change."""
    return folders.manifest(folder, WeightManifest).parent
