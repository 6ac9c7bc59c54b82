"""Desired minus alive is to submit: the pure plan, and the few lines that act on it."""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_swe.config import RunConfig
from hpc_swe.plugins.executors.base import Job
from hpc_swe.records import Role
from hpc_swe.rundir import RunDir
from hpc_swe.store import atomic

ROLES: dict[str, tuple[Role, ...]] = {
    "grpo": ("coordinator", "inference", "learner", "rollout", "reward"),
    "sft": ("coordinator", "learner"),
    "eval": ("coordinator", "inference", "rollout", "reward"),
}
SINGLE: tuple[Role, ...] = ("coordinator", "learner")
GENERATIONS = 3  # jobs of a role that may end
WITHIN_S = 360.0  # in so short a time before it counts as stuck

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a tick does."""

    submit: list[Role]
    """One entry per job."""
    stuck: list[Role]
    """Roles whose jobs end as soon as they start: a person must look."""


def desired(config: RunConfig) -> dict[Role, int]:
    """Jobs of each role that the run should have; coordinator and learner are one job at most."""
    counts = {role: config.counts.get(role, 1) for role in ROLES[config.mode]}
    return {role: min(count, 1) if role in SINGLE else count for role, count in counts.items()}


def plan(wanted: Mapping[Role, int], jobs: Sequence[Job], now: float) -> Plan:
    """Missing jobs, in the order of `wanted`; a role that keeps dying is left for a person."""
    submit: list[Role] = []
    stuck: list[Role] = []
    for role, count in wanted.items():
        mine = [job for job in jobs if job.role == role]
        missing = count - sum(job.is_alive for job in mine)
        recent = sum(not job.is_alive and now - job.submitted < WITHIN_S for job in mine)
        if missing > 0 and recent >= GENERATIONS * count:
            stuck.append(role)
        else:
            submit += [role] * missing
    return Plan(submit, stuck)


def tick(run: RunDir, config: RunConfig) -> Plan:
    """Submit what is missing; nothing while an order stands or when the run has finished."""
    if atomic.names(run.control):
        return Plan([], [])
    decided = plan(desired(config), config.executor.jobs(run), time.time())
    for role in decided.submit:
        job = config.executor.submit(run, role, [sys.executable, "-m", "jobs.run", role, str(run.root)])
        log.info("submitted %s as job %s", role, job)
    for role in decided.stuck:
        log.error("stuck: jobs of %s end as soon as they start; see %s", role, run.logs(role))
    return decided
