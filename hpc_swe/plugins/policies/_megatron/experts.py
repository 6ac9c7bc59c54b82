"""Compute a mixture of experts on torch alone; Megatron's own experts need packages built for CUDA."""

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hpc_swe.plugins.policies._megatron.kernels import swiglu, weighted


class Experts(MegatronModule):  # type: ignore[misc]
    """Compute all experts of this rank in two grouped products. Each expert is split like a dense MLP."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        self._groups = pg_collection
        width, inner = config.hidden_size, config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self.gate_up = self._weight(num_local_experts, 2, inner, width)
        self.down = self._weight(num_local_experts, width, inner)

    def _weight(self, *shape: int) -> torch.nn.Parameter:
        device, dtype = torch.cuda.current_device(), self.config.params_dtype
        weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        # The gradient norm and the data-parallel reduction read these attributes.
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 2, 1
        weight.allreduce = self.config.expert_model_parallel_size == 1
        return weight

    def forward(self, tokens: Tensor, counts: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """Return this rank's part of the sum of all ranks' outputs, [routed, width].

        `tokens` [routed, width] are sorted by expert, `counts` are integers [experts], and `probabilities`
        [routed] are the router's.
        """
        routed, ends = len(tokens), counts.to(tokens.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        if not routed:  # grouped products need a row; this one is cut off again, so its gradient is 0
            tokens, probabilities = F.pad(tokens, (0, 0, 0, 1)), F.pad(probabilities, (0, 1))
            ends = ends + 1
        both = F.grouped_mm(tokens, self.gate_up.flatten(1, 2).transpose(1, 2), offs=ends)
        inner = weighted(swiglu(both), probabilities)
        return F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)[:routed], None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: object = None,
    ) -> dict[str, ShardedTensor]:
        """Describe the split for checkpoints: over experts, and each expert over tensor-parallel ranks."""
        groups, depth = self._groups, len(sharded_offsets)
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                weight,
                *sharded_offsets,
                (depth, groups.ep.rank(), groups.ep.size()),
                (depth + 2, groups.expt_tp.rank(), groups.expt_tp.size()),
                replica_id=(0, 0, groups.expt_dp.rank()),
                prepend_axis_num=depth,
            )
            for name, weight in (("gate_up", self.gate_up), ("down", self.down))
        }
