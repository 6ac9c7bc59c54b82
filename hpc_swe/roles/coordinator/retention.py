"""What may go: folders that nothing needs any more, and what dead processes left half-written.

The learner resumes from the newest checkpoint, or from the one before when that does not load, and then
needs every batch from there on.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_swe.records import Node, WeightVersion
from hpc_swe.roles.coordinator import batches
from hpc_swe.rundir import SPOOLS, RunDir
from hpc_swe.settings import RetentionConfig
from hpc_swe.store import atomic, weights
from hpc_swe.store.spool import STATES

CHECKPOINT = re.compile(r"step_(\d{6,})-i(\d{2,})")
TEMPORARY = re.compile(r"\..*-([0-9a-f]{8})")

Checkpoint = tuple[int, int]
"""Step and incarnation."""


def is_trained(run: RunDir, newest: WeightVersion, steps: int) -> bool:
    """Whether the learner has published its last weights, and the checkpoint that it writes after them."""
    if newest.step < steps:
        return False
    return any(step >= steps for step, _ in checkpoints(run))


def superseded(run: RunDir, retention: RetentionConfig, nodes: Iterable[Node]) -> list[Path]:
    """Published folders that nothing needs any more; the newest of a kind is always needed."""
    in_use = {Path(node.reading).name for node in nodes} | {v.name for node in nodes for v in node.versions}
    found = checkpoints(run)
    kept = kept_checkpoints(list(found), retention.keep_every)
    old = [path for checkpoint, path in found.items() if checkpoint not in kept and path.name not in in_use]
    first = first_kept_batch(list(found))
    old += [run.batch(step) for step in batches.steps(run)[:-1] if step < first]
    return old + [run.weight(version) for version in _superseded_weights(run, retention, in_use)]


def checkpoints(run: RunDir) -> dict[Checkpoint, Path]:
    """Published checkpoints."""
    names = ((name, CHECKPOINT.fullmatch(name)) for name in atomic.names(run.checkpoints))
    return {(int(m[1]), int(m[2])): run.checkpoints / name for name, m in names if m}


def newest_checkpoints(published: Sequence[Checkpoint]) -> set[Checkpoint]:
    """The one to resume from and its fallback, whether newest means the step or the incarnation."""
    return {*sorted(published)[-2:], *sorted(published, key=lambda c: c[::-1])[-2:]}


def kept_checkpoints(published: Sequence[Checkpoint], keep_every: int) -> set[Checkpoint]:
    """The newest, and milestones."""
    milestones = {c for c in published if keep_every and c[0] % keep_every == 0}
    return milestones | newest_checkpoints(published)


def first_kept_batch(published: Sequence[Checkpoint]) -> int:
    """Where a learner may have to start again; from the beginning while there is no fallback."""
    return min(newest_checkpoints(published))[0] if len(published) > 1 else 0


def temporaries(folder: Path, alive: Iterable[str]) -> list[Path]:
    """Half-written names in a folder whose process is not alive."""
    with atomic.storage(folder):
        found = [path for path in folder.iterdir() if TEMPORARY.fullmatch(path.name)]
    return [path for path in found if path.name[-8:] not in alive]


def swept(run: RunDir) -> list[Path]:
    """Folders in which cells, messages and folders are published."""
    spools = [run.spool(name) / state for name in SPOOLS for state in STATES]
    cells = [run.root, run.nodes, run.evals, run.archives, run.endpoints.parent]
    return [*cells, run.batches, run.weights, run.checkpoints, *spools]


def _superseded_weights(run: RunDir, retention: RetentionConfig, in_use: set[str]) -> list[WeightVersion]:
    """A delta is worth nothing without its parents, so these stay with it."""
    published = weights.published(run)
    gone = set(weights.superseded(published, in_use, retention.keep_last, retention.keep_every))
    if not gone:
        return []
    for version in sorted(set(published) - gone):
        parent = weights.manifest(run, version).parent
        while parent in gone:
            gone.discard(parent)
            parent = weights.manifest(run, parent).parent
    return sorted(gone)
