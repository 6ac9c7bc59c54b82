"""Train Qwen2, Qwen3 and Qwen3-MoE with megatron-core: tensor times data parallel, on CUDA or on a CPU."""

from pathlib import Path

from hpc_swe.plugins.costs import GIB, MemoryEstimate, Part
from hpc_swe.plugins.model_shape import ModelShape
from hpc_swe.plugins.policies._megatron import memory
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

    @property
    def gpus(self) -> int:
        """Return the GPUs of each process: one, or none on a CPU."""
        return int(self.device == "gpu")

    def check_model(self, model: Path) -> None:
        """Check that the model can be divided among the ranks."""
        ModelShape.read(model).check_parallel(self.tensor_parallel, self.sequence_parallel)

    def memory(self, model: Path, data_parallel: int, tokens: int, *, reference: bool) -> MemoryEstimate:
        """Estimate the memory of one rank."""
        shape = ModelShape.read(model)
        found = memory.learner_memory(shape, self, data_parallel, tokens)
        count, pinned = shape.parameters.total, memory.reference_memory(shape, self) / GIB
        return MemoryEstimate(
            f"memory of each learner GPU: P = {count:,}, tp = {self.tensor_parallel}, dp = {data_parallel}",
            found.parts,
            Part("peak", "leave 15 % for the allocator", found.peak),
            [f"reference model: {pinned:.2f} GiB of host memory for each learner process"] * reference,
        )

    def files(self, model: Path) -> tuple[Part, Part]:
        """Return one exported version and one checkpoint."""
        return memory.files(ModelShape.read(model), self)
