"""Share the tokens of a microbatch among context-parallel ranks, and attention's heads between them.

Each rank has an equal, consecutive part of the packed tokens in every layer. Before attention an all-to-all
turns a part of the tokens with all heads into all tokens with a part of the heads, and another one after it
turns them back. So attention and packed sequences are the same as without context parallelism.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hpc_swe.models.policies._megatron.kernels.recompute import Call, keep
from hpc_swe.models.policies._megatron.model.attention import Attention
from hpc_swe.models.policies._megatron.model.packing import Packing


class ContextAttention(Attention):
    """Compute attention of all tokens for this rank's part of the heads."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(config=config, layer_number=layer_number)
        self._group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: Packing, call: Call = keep
    ) -> Tensor:
        """Return [tokens / ranks, heads * d] for [tokens / ranks, heads or groups, d]."""
        ranks, counts = self._group.size(), [part.shape[1] for part in (query, key, value)]
        parts = [part.unflatten(1, (ranks, -1)) for part in (query, key, value)]
        by_rank = torch.cat(parts, 2).transpose(0, 1)  # [ranks, tokens / ranks, heads and groups / ranks, d]
        whole = all_to_all(self._group, by_rank.contiguous()).flatten(0, 1)
        query, key, value = whole.split([count // ranks for count in counts], 1)
        output = super().forward(query, key, value, packed_seq_params, call)
        back = all_to_all(self._group, output.unflatten(0, (ranks, -1)).contiguous())
        return back.transpose(0, 1).flatten(1)


def join_trained(
    found: tuple[Tensor, Tensor], packing: Packing, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and entropies of all trained tokens of a microbatch on every rank.

    So an objective sees whole sequences. Its gradient reaches this rank's own tokens only.
    """
    if group.size() == 1:
        return found
    after = packing.trained - packing.trained_before - len(found[0])
    padded = [F.pad(own, (packing.trained_before, after)) for own in found]
    logprobs, entropy = (reduce_from_tensor_model_parallel_region(each, group) for each in padded)
    return logprobs, entropy
