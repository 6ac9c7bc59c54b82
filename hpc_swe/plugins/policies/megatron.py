"""Train Qwen2, Qwen3 and Qwen3-MoE with megatron-core: tensor times data parallel, on CUDA or on a CPU."""

from pathlib import Path

from hpc_swe.plugins.policies._megatron.settings import MegatronSettings
from hpc_swe.plugins.policies.base import Learner, OptimizerConfig


class Megatron(MegatronSettings, frozen=True, kw_only=True):
    """Run one process per device. Its keys are those of `MegatronSettings`.

    Ranks and addresses come from the environment, where torchrun or jobs.run set them.
    """

    def build(self, model: Path, optimizer: OptimizerConfig, reference: Path | None) -> Learner:
        """Join the process group and load the weights in `model`, a Hugging Face folder.

        The weights in `reference`, a folder of the same architecture, are kept for the KL divergence.

        Raises:
            ConfigError: The model's shape or the number of processes does not fit the keys.
        """
        from hpc_swe.plugins.policies._megatron import fusions

        with fusions.uncompiled(self.device == "cpu"):
            from hpc_swe.plugins.policies._megatron.learner import MegatronLearner

        return MegatronLearner(self, model, optimizer, reference)
