"""Compute what a gated delta net does over time, within each sequence of a pack.

No state passes a border between sequences. In plain torch it is the reference, on any device;
linear_attention.py has kernels of a GPU for bfloat16.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_swe.models.policies._megatron.kernels import linear_attention
from hpc_swe.models.policies._megatron.kernels.linear_attention import Ends

CHUNK = 64
"""Tokens between which products of matrices take the place of the recurrence."""
EPS = 1e-6


@dataclass(frozen=True)
class Borders:
    """Hold where the sequences of a pack end."""

    lengths: list[int]
    ends: Ends | None = None
    """The same for kernels of a GPU; None where plain torch computes."""


def convolved(states: Tensor, weight: Tensor, borders: Borders) -> Tensor:
    """Return silu of a causal convolution of each channel, [tokens, channels].

    `states` are [tokens, channels], `weight` is [channels, 1, kernel]; before a sequence there are zeros.
    """
    if borders.ends:
        return linear_attention.convolved(states, weight, borders.ends)
    channels, _, kernel = weight.shape
    outputs = []
    for part in states.split(borders.lengths):
        padded = F.pad(part.t(), (kernel - 1, 0))
        outputs.append(F.conv1d(padded[None], weight, groups=channels)[0].t())
    return F.silu(torch.cat(outputs))


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, borders: Borders
) -> Tensor:
    """Return what queries read from the state of their head, [tokens, heads, v], in the type of `value`.

    `query` and `key` are [tokens, groups, k], each for as many heads side by side, and `value` [tokens,
    heads, v]; `decay`, which is not above 0, and `rate` are [tokens, heads]. With q and k of norm 1, a state
    S [k, v] begins as 0, and each token does

        S = exp(decay) S;  S = S + rate k (value - S^T k)^T;  output = S^T q / sqrt(k)

    in float32. Source: Yang et al. 2024, arXiv 2412.06464; its chunks: Yang et al. 2024, arXiv 2406.06484.
    """
    if borders.ends:
        return linear_attention.delta_rule(query, key, value, decay, rate, borders.ends)
    shared = value.shape[1] // query.shape[1]
    query, key = (each.repeat_interleave(shared, 1) for each in (query, key))
    inputs = (each.float().split(borders.lengths) for each in (query, key, value, decay, rate))
    return torch.cat([_sequence(*part) for part in zip(*inputs, strict=True)]).to(value.dtype)


def _sequence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    tokens, factor = len(query), query.shape[-1] ** -0.5
    query, key, value = (_chunks(each) for each in (_unit(query) * factor, _unit(key), value))
    decay, rate = (_chunks(each[..., None]) for each in (decay, rate))  # [heads, chunks, CHUNK, 1]
    total = decay.cumsum(2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (total - total.transpose(2, 3)).masked_fill(later, -torch.inf).exp()
    system = (rate * key) @ key.transpose(2, 3) * between  # its diagonal counts as ones
    written = torch.linalg.solve_triangular(system, rate * value, upper=False, unitriangular=True)
    reading = torch.linalg.solve_triangular(system, rate * key * total.exp(), upper=False, unitriangular=True)
    scores = query @ key.transpose(2, 3) * between
    query = query * total.exp()
    state, outputs = value.new_zeros(len(query), query.shape[-1], value.shape[-1]), []
    news = state
    for chunk in range(query.shape[1]):
        if chunk:  # nothing reads the last state, and a graph without a backward would never be freed
            passed, last = total[:, chunk - 1], total[:, chunk - 1, -1:]
            states = key[:, chunk - 1] * (last - passed).exp()
            state = state * last.exp() + states.transpose(1, 2) @ news
        news = written[:, chunk] - reading[:, chunk] @ state
        outputs.append(query[:, chunk] @ state + scores[:, chunk] @ news)
    return torch.cat(outputs, 1)[:, :tokens].transpose(0, 1)


def _chunks(states: Tensor) -> Tensor:
    """Return [heads, chunks, CHUNK, d] for [tokens, heads, d], with zeros behind the last token."""
    missing = -len(states) % CHUNK
    return F.pad(states.transpose(0, 1), (0, 0, 0, missing)).unflatten(1, (-1, CHUNK))


def _unit(states: Tensor) -> Tensor:
    return states * torch.rsqrt((states * states).sum(-1, keepdim=True) + EPS)
