"""Which roles a run has, how many jobs each should have, and how large one is."""

from hpc_swe.plugins.engines.vllm import Vllm
from hpc_swe.plugins.executors.base import SINGLE
from hpc_swe.plugins.policies.megatron import Megatron
from hpc_swe.records import Role
from hpc_swe.settings import RunConfig

ROLES: dict[str, tuple[Role, ...]] = {
    "grpo": ("coordinator", "learner", "inference", "rollout", "reward"),
    "sft": ("coordinator", "learner"),
    "eval": ("coordinator", "inference", "rollout", "reward"),
}


def desired(config: RunConfig) -> dict[Role, int]:
    """Jobs of each role that the run should have; coordinator and learner are one job at most."""
    counts = {role: config.counts.get(role, 1) for role in ROLES[config.mode]}
    if config.inference.url and "inference" in counts:
        counts["inference"] = 0  # somebody else runs the engine
    return {role: min(count, 1) if role in SINGLE else count for role, count in counts.items()}


def processes(role: str, config: RunConfig) -> int:
    """Of one job of a role, over all its nodes."""
    return config.policy.tensor_parallel * config.learner.data_parallel if role == "learner" else 1


def gpus(role: str, config: RunConfig) -> int | None:
    """GPUs that one job of a role computes on; None where a plugin of your own does not tell."""
    if role == "learner" and isinstance(config.policy, Megatron):
        return processes(role, config) if config.policy.device == "gpu" else 0
    if role == "inference" and isinstance(config.engine, Vllm):
        return config.engine.tensor_parallel if config.engine.device == "gpu" else 0
    return None
