"""Trains Qwen2, Qwen3 and Qwen3-MoE with megatron-core: tensor times data parallel, on CUDA or CPU."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from hpc_swe.errors import ConfigError
from hpc_swe.plugins import Plugin
from hpc_swe.plugins.policies.base import Learner, OptimizerConfig


class Megatron(Plugin, frozen=True, kw_only=True):
    """One process a device; ranks and addresses come from the environment, set by torchrun or jobs.run."""

    tensor_parallel: Annotated[int, Meta(gt=0)] = 1
    """Processes that share each layer; the others repeat it on other data."""
    device: Literal["gpu", "cpu"] = "gpu"
    """gpu: one for each process, and a learner that finds too few refuses. cpu: GPUs are not looked at."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and activations. Gradients are summed, and bfloat16 parameters updated, in float32."""
    distributed_optimizer: bool = True
    """Spread the optimizer's state over the data-parallel ranks."""
    sequence_parallel: bool = False
    """Split activations between layers over the tensor-parallel ranks, too."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward computes again: none, those of attention, or all but the layers' inputs."""
    logprob_chunk: Annotated[int, Meta(gt=0)] = 2048
    """Tokens whose logits exist at one time."""

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError("[policy] sequence_parallel = true needs tensor_parallel > 1")

    def build(self, model: Path, optimizer: OptimizerConfig, reference: Path | None) -> Learner:
        """Join the process group and load `model`, a Hugging Face folder; keep `reference`, another, at hand.

        Raises:
            ConfigError: The model's shape or the number of processes does not fit the fields.
        """
        from hpc_swe.plugins.policies._megatron import fusions

        with fusions.uncompiled(self.device == "cpu"):
            from hpc_swe.plugins.policies._megatron.learner import MegatronLearner

        return MegatronLearner(self, model, optimizer, reference)
