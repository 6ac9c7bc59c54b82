"""Mend how vLLM samples proposed tokens on a CPU.

Each proposed token needs temperature, top_p and top_k of its request. vLLM 0.32 computes them in a copy of
64-bit integers, which it drops, so that tokens would be sampled at whatever temperature lies in memory.
"""

import torch
from vllm.v1.sample import rejection_sampler


def mend_sampling() -> None:
    """Replace the function; no kernel of a GPU is replaced, since only CPUs call this."""
    rejection_sampler.expand_batch_to_tokens = _of_tokens


def _of_tokens(
    values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return for each of `count` tokens the value of its request; `ends`, int32 [requests], are sums."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    changed = torch.where(values == replace_from, replace_to, values)
    return changed.repeat_interleave(counts, output_size=count)
