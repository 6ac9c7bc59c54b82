"""Train Qwen, Llama and Mistral models with megatron-core, on CUDA or on a CPU."""

from pathlib import Path

from hpc_swe.plugins.costs import MemoryEstimate, Part
from hpc_swe.plugins.model_shape import ModelShape
from hpc_swe.plugins.policies._megatron import memory, uncompiled
from hpc_swe.plugins.policies._megatron.settings import MegatronSettings
from hpc_swe.plugins.policies.base import Learner, OptimizerConfig, SteppingLearner, Tensors


class Megatron(MegatronSettings, frozen=True, kw_only=True):
    """Run one process per device. Its keys are those of `MegatronSettings`.

    Ranks and addresses come from the environment, where torchrun or jobs.run set them.
    """

    def build(
        self, model: Path, optimizer: OptimizerConfig, reference: Path | None, tokens: int = 0
    ) -> Learner:
        with uncompiled(self.device == "cpu"):
            from hpc_swe.plugins.policies._megatron.learner import MegatronLearner

        return MegatronLearner(self, model, optimizer, reference, tokens=tokens)

    def build_from(
        self, model: Path, optimizer: OptimizerConfig, tensors: Tensors, tokens: int = 0
    ) -> Learner:
        with uncompiled(self.device == "cpu"):
            from hpc_swe.plugins.policies._megatron.learner import MegatronLearner

        return MegatronLearner(self, model, optimizer, None, tensors, tokens=tokens)

    def build_stepped(self, model: Path, lr: float, tensors: Tensors) -> SteppingLearner:
        """Build a learner for benchmarks, whose steps have random directions and need less memory."""
        with uncompiled(self.device == "cpu"):
            from hpc_swe.plugins.policies._megatron.stepped import SteppedLearner

        return SteppedLearner(self, model, lr, tensors)

    @property
    def gpus(self) -> int:
        return int(self.device == "gpu")

    def check_model(self, model: Path, data_parallel: int) -> None:
        self.check(ModelShape.read(model))
        self.check_processes(data_parallel)

    def memory(self, model: Path, data_parallel: int, tokens: int, *, reference: bool) -> MemoryEstimate:
        return memory.learner_memory(ModelShape.read(model), self, data_parallel, tokens, reference=reference)

    def files(self, model: Path) -> tuple[Part, Part]:
        return memory.files(ModelShape.read(model), self)
