"""Compute attention within each sequence of a pack for transformers' models, with kernels of torch."""

import inspect
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

LONG = 2048
"""Tokens from which on cuDNN's kernel is faster than varlen attention, on an H200."""
HEADS = 16
"""Number of query heads that cuDNN's kernel takes at one time, so that more of what it reads is in the cache;
our learner does the same."""


class PackedAttention:
    """Stand in transformers' registry of attentions; the lengths are set before each microbatch."""

    def __init__(self, *, fast: bool) -> None:
        """Take the fastest kernel of each sequence if `fast`, else flash attention."""
        self._fast = fast
        self.lengths: Sequence[int] = ()

    def __call__(
        self, _module: object, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        """Return [1, tokens, heads, d] for query [1, heads, tokens, d], and key and value with groups."""
        if not query.is_cuda:
            return _loop(query, key, value, self.lengths), None
        if not self._fast:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return _loop(query, key, value, self.lengths), None
        outputs, start = [], 0
        for is_long, group in groupby(self.lengths, lambda length: length >= LONG):
            lengths = list(group)
            part = slice(start, start + sum(lengths))
            kernel = _cudnn if is_long else _varlen
            outputs.append(kernel(query[:, :, part], key[:, :, part], value[:, :, part], lengths))
            start = part.stop
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0], None


def _cudnn(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    pieces = max(1, query.shape[1] // HEADS)
    pieces = pieces if key.shape[1] % pieces == 0 else 1
    chunks = zip(*(tensor.chunk(pieces, 1) for tensor in (query, key, value)), strict=True)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        outputs = [_loop(*chunk, lengths) for chunk in chunks]  # type: ignore[call-arg]
    return torch.cat(outputs, 2) if pieces > 1 else outputs[0]


def _loop(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    sizes = list(lengths)
    outputs = [
        F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True).transpose(1, 2)
        for part in zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    ]
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


def _varlen(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    more = {"enable_gqa": True} if "enable_gqa" in names else {}  # releases without it take groups unasked
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = ends.pin_memory().to(query.device, non_blocking=True)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return varlen_attn(q, k, v, ends, ends, max(lengths), max(lengths), window_size=(-1, 0), **more)[None]
