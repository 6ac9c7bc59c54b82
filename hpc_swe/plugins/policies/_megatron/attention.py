"""Compute the core of attention: rotary positions, and causal attention within each sequence of a pack."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hpc_swe.plugins.policies._megatron.packing import Packing, rotate


class Attention(MegatronModule):  # type: ignore[misc]
    """Apply rotary positions and causal attention within each sequence of a packed microbatch.

    One call per sequence gives the exact block-diagonal result, without a mask and without a score matrix.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object) -> None:
        super().__init__(config=config)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, packed_seq_params: Packing, **__: object
    ) -> Tensor:
        """Return [tokens, heads * d] for query [tokens, heads, d], and key and value [tokens, groups, d]."""
        packing = packed_seq_params
        parts = zip(
            rotate(query, packing).split(packing.lengths),
            rotate(key, packing).split(packing.lengths),
            value.split(packing.lengths),
            strict=True,
        )
        grouped = query.shape[1] != key.shape[1]
        outputs = []
        for length, part in zip(packing.lengths, parts, strict=True):
            q, k, v = (_round_up(tensor).transpose(0, 1)[None] for tensor in part)
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            outputs.append(output[0].transpose(0, 1)[:length])
        return torch.cat(outputs).flatten(1)


def _round_up(tensor: Tensor) -> Tensor:
    """Append zeros up to a multiple of 256 on CUDA; causal attention of the sequence does not see them.

    cuDNN takes 70 ms to plan for each new length, and sampled sequences seldom have equal lengths.
    """
    missing = -len(tensor) % 256 if tensor.is_cuda else 0
    return F.pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor
