"""Desired minus alive is to submit: the pure plan, and the few lines that act on it."""

import logging
import sys
from collections.abc import Mapping, Sequence

from hpc_swe.config import RunConfig
from hpc_swe.records import Role
from hpc_swe.rundir import RunDir

ROLES: dict[str, tuple[Role, ...]] = {
    "grpo": ("coordinator", "inference", "learner", "rollout", "reward"),
    "sft": ("coordinator", "learner"),
    "eval": ("coordinator", "inference", "rollout", "reward"),
}
SINGLE: tuple[Role, ...] = ("coordinator", "learner")

log = logging.getLogger(__name__)


def desired(config: RunConfig) -> dict[Role, int]:
    """Jobs of each role that the run should have; coordinator and learner are one job at most."""
    counts = {role: config.counts.get(role, 1) for role in ROLES[config.mode]}
    return {role: min(count, 1) if role in SINGLE else count for role, count in counts.items()}


def plan(wanted: Mapping[Role, int], alive: Mapping[Role, Sequence[str]]) -> list[Role]:
    """One entry per job to submit, in the order of `wanted`."""
    return [role for role, count in wanted.items() for _ in range(count - len(alive.get(role, ())))]


def tick(run: RunDir, config: RunConfig) -> list[Role]:
    """Submit what is missing; nothing while an order stands or when the run has finished."""
    if run.drain.exists() or run.stop.exists() or run.finished.exists():
        return []
    missing = plan(desired(config), config.executor.alive(run))
    for role in missing:
        job = config.executor.submit(run, role, [sys.executable, "-m", "jobs.run", role, str(run.root)])
        log.info("submitted %s as job %s", role, job)
    return missing
