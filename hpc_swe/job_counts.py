"""Derive from a configuration which roles a run has, how many jobs each wants, and how large one job is."""

from hpc_swe.plugins.engines.base import EstimatedEngine
from hpc_swe.plugins.executors.base import SINGLETON_ROLES
from hpc_swe.plugins.policies.base import EstimatedPolicy
from hpc_swe.records import Role
from hpc_swe.settings import RunConfig

ROLES: dict[str, tuple[Role, ...]] = {
    "grpo": ("coordinator", "learner", "inference", "rollout", "reward"),
    "sft": ("coordinator", "learner"),
    "eval": ("coordinator", "inference", "rollout", "reward"),
}


def desired(config: RunConfig) -> dict[Role, int]:
    """Return how many jobs each role of the run should have; coordinator and learner have at most one."""
    counts = {role: config.counts.get(role, 1) for role in ROLES[config.mode]}
    if config.inference.url and "inference" in counts:
        counts["inference"] = 0  # somebody else runs the engine
    return {role: min(count, 1) if role in SINGLETON_ROLES else count for role, count in counts.items()}


def processes(role: str, config: RunConfig) -> int:
    """Count the processes of one job of a role, over all its nodes."""
    return config.policy.tensor_parallel * config.learner.data_parallel if role == "learner" else 1


def gpus(role: str, config: RunConfig) -> int | None:
    """Count the GPUs that one job of a role computes on; None where the plugin does not know."""
    if role == "learner" and isinstance(config.policy, EstimatedPolicy):
        return processes(role, config) * config.policy.gpus
    if role == "inference" and isinstance(config.engine, EstimatedEngine):
        return config.engine.gpus
    return None
