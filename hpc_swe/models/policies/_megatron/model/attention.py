"""Compute attention within the sequences of a pack: queries, keys and values, and the core, block by block.

A block is one long sequence, or several short ones that one kernel takes together.
"""

from collections.abc import Iterable
from inspect import signature

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hpc_swe.models.policies._megatron.kernels.flash_attention import attend
from hpc_swe.models.policies._megatron.kernels.kernels import gated_heads, rotated_heads
from hpc_swe.models.policies._megatron.kernels.recompute import Call, keep
from hpc_swe.models.policies._megatron.model.packing import Block, Packing


class SequenceAttention(SelfAttention):  # type: ignore[misc]
    """Compute attention within each sequence of a packed microbatch."""

    def context(self, hidden: Tensor, packing: Packing, cheap: Call, costly: Call) -> Tensor:
        """Return what the output projection takes, [tokens, 1, heads * d], for normed hidden states."""
        norms = (self.q_layernorm, self.k_layernorm) if self.config.qk_layernorm else None
        groups = self.num_query_groups_per_partition
        cosines, sines = packing.cosines, packing.sines
        if self.layer_number - 1 in self.config.unrotated:
            cosines, sines = torch.ones_like(cosines), torch.zeros_like(sines)

        def heads(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            query, *others = rotated_heads(mixed.squeeze(1), groups, norms, cosines, sines)
            if packing.query_scales is not None:
                query = (query * packing.query_scales).to(query.dtype)
            return query, *others

        return self._attended(packing, cheap, *cheap(heads, costly(self._mixed, hidden)))

    def _attended(self, packing: Packing, cheap: Call, *parts: Tensor) -> Tensor:
        context: Tensor = self.core_attention(*parts, packed_seq_params=packing, call=cheap)
        return context.unsqueeze(1)

    def _mixed(self, hidden: Tensor) -> Tensor:
        mixed, _ = self.linear_qkv(hidden)
        return mixed


class GatedAttention(SequenceAttention):
    """Compute attention whose output is multiplied by sigmoid of a gate, which comes with each query."""

    def context(self, hidden: Tensor, packing: Packing, cheap: Call, costly: Call) -> Tensor:
        groups, norms = self.num_query_groups_per_partition, (self.q_layernorm, self.k_layernorm)

        def heads(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return gated_heads(mixed.squeeze(1), groups, norms, packing.cosines, packing.sines)

        *parts, gate = cheap(heads, costly(self._mixed, hidden))
        context: Tensor = self._attended(packing, cheap, *parts)
        return context * gate.sigmoid()


class Attention(MegatronModule):  # type: ignore[misc]
    """Apply causal attention within each sequence of a packed microbatch.

    One call per sequence, or one for several, gives the exact block-diagonal result without a score matrix.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object) -> None:
        super().__init__(config=config)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: Packing, call: Call = keep
    ) -> Tensor:
        """Return [tokens, heads * d] for query [tokens, heads, d], and key and value [tokens, groups, d]."""
        blocks, states, scale = packed_seq_params.blocks, (query, key, value), self.config.softmax_scale
        if packed_seq_params.kernels == "flash-attn-4":
            (block,) = blocks
            return attend(*states, block.ends, block.longest, scale).flatten(1)
        parts: Iterable[tuple[Tensor, ...]] = [states]
        if len(blocks) > 1:  # backward of a split copies
            sizes = [block.tokens for block in blocks]
            parts = zip(*(each.split(sizes) for each in states), strict=True)
        kinds = [_attend_one if block.ends is None else _attend_varying for block in blocks]
        pairs = zip(kinds, blocks, parts, strict=True)
        outputs = [each(block, part, call, scale) for each, block, part in pairs]
        joined: Tensor = call(_join, *outputs)
        return joined


def _attend_one(block: Block, part: tuple[Tensor, ...], call: Call, scale: float | None) -> Tensor:
    """Let torch choose the kernel: on an H200 cuDNN's, the fastest one for a long sequence."""
    query, key, value = call(_round_up, *part) if _missing(part[0]) else part
    grouped = query.shape[1] != key.shape[1]
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )
    output = output.squeeze(0).transpose(0, 1)
    return output if len(output) == block.tokens else output[: block.tokens]


def _attend_varying(block: Block, part: tuple[Tensor, ...], call: Call, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # needs CUDA

    query, key, value = part
    ends, longest = block.ends, block.longest
    grouped = query.shape[1] != key.shape[1]
    is_option = "enable_gqa" in signature(varlen_attn).parameters  # since torch 2.12
    options = {"enable_gqa": grouped} if is_option else {}
    window = (-1, 0)  # all that came before, and nothing after
    output: Tensor = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scale, window_size=window, **options
    )
    return output


def _round_up(*states: Tensor) -> tuple[Tensor, ...]:
    """Append zeros up to a multiple of 256; causal attention of the sequence does not see them.

    cuDNN takes 70 ms to plan for each new length, and sampled sequences seldom have equal lengths.
    """
    missing = _missing(states[0])
    return tuple(F.pad(each, (0, 0, 0, 0, 0, missing)) for each in states)


def _missing(states: Tensor) -> int:
    return -len(states) % 256 if states.is_cuda else 0


def _join(*outputs: Tensor) -> Tensor:
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)
