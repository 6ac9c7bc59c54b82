"""Train Qwen, Llama, Mistral, Granite, Seed-OSS, SmolLM3 and Phi-4 models with Megatron, on CUDA or CPU."""

from collections.abc import Sequence
from pathlib import Path

from hpc_swe.models.costs import MemoryEstimate, Part
from hpc_swe.models.model_shape import ModelShape
from hpc_swe.models.policies._megatron import memory, uncompiled
from hpc_swe.models.policies._megatron.memory import MemoryNeeds
from hpc_swe.models.policies._megatron.settings import MegatronSettings
from hpc_swe.models.policies.base import Kept, Learner, OptimizerConfig, Policy, Tensors
from hpc_swe.models.weight_files import require_tensors


class Megatron(MegatronSettings, Policy, frozen=True, kw_only=True):
    """Run one process per device. Its keys are those of `MegatronSettings`.

    Ranks and addresses come from the environment, where torchrun or jobs.run set them.
    """

    def build(
        self,
        model: Path,
        optimizer: OptimizerConfig,
        reference: Path | None,
        tokens: int = 0,
        kept: Sequence[Kept] = (),
    ) -> Learner:
        with uncompiled(self.device == "cpu"):
            from hpc_swe.models.policies._megatron.learner import MegatronLearner

        return MegatronLearner(self, model, optimizer, reference, needs=MemoryNeeds(tokens, kept))

    def build_from(
        self, model: Path, optimizer: OptimizerConfig, tensors: Tensors, tokens: int = 0
    ) -> Learner:
        with uncompiled(self.device == "cpu"):
            from hpc_swe.models.policies._megatron.learner import MegatronLearner

        return MegatronLearner(self, model, optimizer, None, tensors, needs=MemoryNeeds(tokens))

    def check_model(self, model: Path, data_parallel: int) -> None:
        shape = ModelShape.read(model)
        self.check(shape)
        self.check_processes(data_parallel)
        require_tensors(model, shape)

    def memory(
        self, model: Path, data_parallel: int, tokens: int, kept: Sequence[Kept] = ()
    ) -> MemoryEstimate:
        self.check_processes(data_parallel)
        return memory.learner_memory(ModelShape.read(model), self, data_parallel, tokens, kept)

    def files(self, model: Path) -> tuple[Part, Part]:
        return memory.files(ModelShape.read(model), self)
