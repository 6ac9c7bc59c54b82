"""List the checkpoints on disk, and tell whether the learner has written its last one."""

import re

from hpc_swe.records import CheckpointManifest, WeightVersion
from hpc_swe.rundir import RunDir
from hpc_swe.store import folders

NAME = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,8})-i([0-9]{2}|[1-9][0-9]{2,8})")

Checkpoint = tuple[int, int]
"""Step and incarnation."""


def published(run: RunDir) -> list[Checkpoint]:
    """List all published checkpoints, sorted by step and incarnation."""
    return sorted(
        folders.published(run.checkpoints, CheckpointManifest, _parse, lambda m: (m.step, m.incarnation))
    )


def is_trained(run: RunDir, newest: WeightVersion | None, steps: int) -> bool:
    """Tell whether the learner has published its last weights and the checkpoint that follows them."""
    return newest is not None and newest.step >= steps and any(step >= steps for step, _ in published(run))


def _parse(name: str) -> Checkpoint | None:
    parts = NAME.fullmatch(name)
    return (int(parts[1]), int(parts[2])) if parts else None
