"""Summarize the trained tokens of a step: sums of columns, and a histogram of |log pi_prox - log mu|.

Microbatches and data-parallel ranks only add up, so a step needs no further pass over its tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpc_swe.models.policies.base import TrainedTokens
from hpc_swe.roles.learner.objectives.base import before_batch, ratio_of

PER_DECADE, DECADES, LOWEST = 20, 8, -6  # bins of the histogram of |gap|, 12 % wide, from 1e-6 on
BINS = PER_DECADE * DECADES
OF_POLICY = ("policy/nll", "policy/entropy")
OF_SAMPLER = (
    "policy/surprise_balance",
    "gap/mean",
    "gap/k3",
    "gap/far_share",
    "ratio/mean",
    "ratio/square",
)
"""Means over trained tokens. They are, in this order: -log mu - entropy, about 0 on new tokens; then with
d = log pi_prox - log mu: d; e^d - 1 - d; |d| > 1; then pi / mu; its square."""


def totals(tokens: TrainedTokens, more: Mapping[str, Tensor]) -> Tensor:
    """Return float64 [1 + means + BINS]: the number of tokens, sums of the means, and the histogram.

    The means are those of OF_POLICY and OF_SAMPLER, then `more`. In float32, sums over a million tokens
    would lose precision.
    """
    before = before_batch(tokens)
    gap = before - tokens.sampler
    ratio = ratio_of(tokens.logprobs, tokens.sampler)
    columns = (
        torch.ones_like(gap),
        -tokens.logprobs,
        tokens.entropy,
        -tokens.sampler - tokens.entropy,
        gap,
        ratio_of(before, tokens.sampler) - 1 - gap,
        gap.abs() > 1,
        ratio,
        ratio.square(),
        *more.values(),
    )
    sums = torch.stack([column.double() for column in columns]).sum(1)
    return torch.cat((sums, _histogram(gap.abs())))


def means(total: Sequence[float], more: Sequence[str], *, is_sampled: bool) -> dict[str, float]:
    """Return metrics from the totals of a whole step, without those of the sampler unless there was one.

    A step without trained tokens has no means.
    """
    if not total[0]:
        return {"policy/tokens": 0.0}
    names = (*OF_POLICY, *OF_SAMPLER, *more)
    count, end = total[0], 1 + len(names)
    found = {name: value / count for name, value in zip(names, total[1:end], strict=True)}
    found["ratio/effective_share"] = found["ratio/mean"] ** 2 / max(found.pop("ratio/square"), 1e-30)
    found["gap/p99"] = _percentile(total[end:], 0.99)
    kept = found if is_sampled else {name: found[name] for name in (*OF_POLICY, *more)}
    return {"policy/tokens": total[0]} | kept


def _histogram(gap: Tensor) -> Tensor:
    bins = ((gap.nan_to_num(1e30).clamp(min=1e-30).log10() - LOWEST) * PER_DECADE).clamp(0, BINS - 1).long()
    ones = torch.ones_like(gap, dtype=torch.float64)
    return ones.new_zeros(BINS).index_add_(0, bins, ones)


def _percentile(counts: Sequence[float], share: float) -> float:
    due, seen = share * sum(counts), 0.0
    for index, count in enumerate(counts):
        seen += count
        if count and seen >= due:
            return float(10 ** (LOWEST + (index + 1) / PER_DECADE))
    return 0.0
