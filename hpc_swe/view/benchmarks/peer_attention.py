"""Compute attention within each sequence of a pack for transformers' models, by our learner's kernels."""

import inspect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpc_swe.models.policies._megatron.kernels.flash_attention import Kernels, attend

LONG = 2048
"""Tokens from which on cuDNN's kernel is faster than varlen attention, on an H200, as in our learner."""
ROUND = 256
"""cuDNN plans anew for each length, so lengths are rounded up to a multiple of this, as in our learner."""


class PackedAttention:
    """Stand in transformers' registry of attentions; the lengths are set before each microbatch."""

    def __init__(self, kernels: Kernels | Literal["flash"]) -> None:
        """Take kernels as our learner does, or torch's flash attention for all."""
        self._kernels = kernels
        self.lengths: Sequence[int] = ()

    def __call__(
        self, _module: object, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        """Return [1, tokens, heads, d] for query [1, heads, tokens, d], and key and value with groups."""
        kernels = {"flash-attn-4": _flash_attn_4, "cuDNN": _mixed, "torch": _loop, "flash": _flash}
        return kernels[self._kernels](query, key, value, self.lengths), None


def _flash_attn_4(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    query, key, value = _tokens_first(query, key, value)
    return attend(query, key, value, _ends(tuple(lengths), query.device), max(lengths))[None]


def _flash(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _loop(query, key, value, lengths)


def _mixed(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    groups = [(is_long, list(group)) for is_long, group in groupby(lengths, lambda length: length >= LONG)]
    parts = _split((query, key, value), [sum(each) for _, each in groups])
    outputs = [
        (_cudnn if is_long else _varlen)(*part, each)
        for (is_long, each), part in zip(groups, parts, strict=True)
    ]
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


def _cudnn(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return _loop(query, key, value, lengths, ROUND)


def _loop(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], multiple: int = 1) -> Tensor:
    """Call the kernel for each sequence; causal attention does not see the zeros that round its length up."""
    outputs = []
    for length, part in zip(lengths, _split((query, key, value), lengths), strict=True):
        q, k, v = (_round_up(states, -length % multiple) for states in part)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        outputs.append(output[:, :length] if length % multiple else output)
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


def _split(states: Sequence[Tensor], lengths: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Divide the tokens of query, key and value; one part is the whole, as backward of a split copies."""
    sizes = list(lengths)
    query, key, value = (each.split(sizes, 2) if len(sizes) > 1 else (each,) for each in states)
    return zip(query, key, value, strict=True)


def _round_up(states: Tensor, missing: int) -> Tensor:
    """Append zeros to [1, heads, tokens, d], and keep tokens before heads in memory."""
    return F.pad(states.transpose(1, 2), (0, 0, 0, 0, 0, missing)).transpose(1, 2) if missing else states


def _varlen(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    more = {"enable_gqa": True} if "enable_gqa" in names else {}  # releases without it take groups unasked
    ends, longest = _ends(tuple(lengths), query.device), max(lengths)
    states = _tokens_first(query, key, value)
    return varlen_attn(*states, ends, ends, longest, longest, window_size=(-1, 0), **more)[None]


def _tokens_first(*states: Tensor) -> list[Tensor]:
    return [each[0].transpose(0, 1) for each in states]


@lru_cache(maxsize=8)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a 0 and the ends of the sequences, int32; the layers of a model ask for the same ones."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.pin_memory().to(device, non_blocking=True)
