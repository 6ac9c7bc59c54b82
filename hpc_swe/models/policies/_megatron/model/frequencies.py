"""Compute the frequencies of rotary positions, in float32 and in the order of operations of transformers."""

import math

import torch
from torch import Tensor

from hpc_swe.models.rope import Rope


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return radians per position, float32 [n / 2], for the n dimensions of a head that turn."""
    head_dim = int(head_dim * rope.share)
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / powers)
    if rope.kind == "yarn":
        return _yarn(rope, powers, head_dim)
    return 1.0 / powers


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Return the frequencies of Llama 3.1, which stretches long waves and keeps short ones."""
    wave = 2 * math.pi / plain
    is_long = wave > rope.original_length / rope.low_freq_factor
    is_between = ~is_long & (wave >= rope.original_length / rope.high_freq_factor)
    width = rope.high_freq_factor - rope.low_freq_factor
    kept = (rope.original_length / wave - rope.low_freq_factor) / width
    stretched = torch.where(is_long, plain / rope.factor, plain)
    between = (1 - kept) * stretched / rope.factor + kept * stretched
    return torch.where(is_between, between, stretched)


def _yarn(rope: Rope, powers: Tensor, head_dim: int) -> Tensor:
    """Return the frequencies of YaRN, which keeps fast dimensions and stretches slow ones.

    Source: Peng et al. 2023, arXiv 2309.00071.
    """

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
