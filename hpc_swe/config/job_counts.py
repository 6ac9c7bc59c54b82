"""Derive from a configuration which roles a run has, how many jobs each wants, and how large one job is."""

from hpc_swe.base.records import Role
from hpc_swe.cluster.executors.base import SINGLETON_ROLES
from hpc_swe.config.settings import RunConfig

ROLES: dict[str, tuple[Role, ...]] = {
    "grpo": ("coordinator", "learner", "inference", "rollout", "reward"),
    "sft": ("coordinator", "learner"),
    "replay": ("coordinator", "learner"),
    "eval": ("coordinator", "inference", "rollout", "reward"),
}


def is_hybrid(config: RunConfig) -> bool:
    """Return whether engines run in the learner's job; only runs that have both can be hybrid."""
    return config.hybrid and config.mode == "grpo"


def desired(config: RunConfig) -> dict[Role, int]:
    """Return how many jobs each role of the run should have; coordinator and learner have at most one."""
    counts = {role: config.counts.get(role, 1) for role in ROLES[config.mode]}
    if (config.inference.url or is_hybrid(config)) and "inference" in counts:
        counts["inference"] = 0  # somebody else runs the engine, or the learner's job does
    return {role: min(count, 1) if role in SINGLETON_ROLES else count for role, count in counts.items()}


def processes(role: str, config: RunConfig) -> int:
    """Count the processes of one job of a role, over all its nodes."""
    return config.policy.processes * config.learner.data_parallel if role == "learner" else 1


def engines_beside(role: str, config: RunConfig) -> int:
    """Count the supervisors of engines that run in the job of another role.

    That of an engine that somebody else runs needs no node, so it runs in the coordinator's job. With
    `hybrid`, engines run in the learner's job and share its GPUs.
    """
    if "inference" not in ROLES[config.mode]:
        return 0
    if role == "learner" and is_hybrid(config):
        return config.counts.get("inference", 1)
    return int(role == "coordinator" and bool(config.inference.url))


def gpus(role: str, config: RunConfig) -> int | None:
    """Count the GPUs that one job of a role computes on; None where the plugin does not know."""
    engines, engine = engines_beside(role, config), config.engine.gpus
    if role == "inference":
        return engine
    if role == "learner" and config.policy.gpus is not None:
        own = processes(role, config) * config.policy.gpus
        if engines and engine is None:
            return own or None  # not 0, which would hide all GPUs from engines that may need some
        return max(own, engines * (engine or 0))
    return None
