"""List the checkpoints on disk, and tell whether the learner has written its last one."""

from operator import attrgetter

from hpc_swe.base.records import CheckpointManifest, WeightVersion
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import folders

Checkpoint = tuple[int, int]
"""Step and incarnation."""


def published(run: RunDir) -> list[Checkpoint]:
    """List all published checkpoints, sorted by step and incarnation."""
    key = attrgetter("step", "incarnation")
    return sorted(folders.published(run.checkpoints, CheckpointManifest, key, lambda c: run.checkpoint(*c)))


def is_trained(run: RunDir, newest: WeightVersion | None, steps: int) -> bool:
    """Return whether the learner has published its last weights and the checkpoint that follows them.

    The checkpoint of another incarnation may be that of a learner which was frozen, and has a successor.
    """
    if newest is None or newest.step < steps:
        return False
    return any(step >= steps and start == newest.incarnation for step, start in published(run))
