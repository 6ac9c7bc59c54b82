"""Define what a step minimizes: the sum over trained tokens of weight times term, divided by nothing.

pi are the weights being trained, mu those that sampled, ref the initial ones, and A is the advantage:

    ppo(r, A) = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))    but at most -A dual_clip, where A < 0

    sampler_ratio   r = pi / mu         term = ppo(r, A)
    decoupled       r = pi / pi_prox    term = min(pi_prox / mu, ratio_cap) ppo(r, A)
    sft                                 term = -log pi

sampler_ratio is PPO (Schulman et al. 2017, eq. 7) that clips around the sampler's own probabilities. Where
A < 0, its maximum has no upper bound: the slope is -A r, and r is in the thousands when a router sends a
token to other experts here than in the engine. The bound is that of dual-clip PPO (Ye et al. 2020,
"Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", c = 3): from r = dual_clip on,
the slope is 0. So the slope of a term is never steeper than |A| max(1 + clip_high, dual_clip).

decoupled is decoupled PPO (Hilton et al. 2021). pi_prox is pi before the batch. With one optimizer step per
batch that is pi itself without gradient, so its r is 1 and never clipped; with more, its log-probabilities
are computed before the first of them. Tokens whose pi_prox / mu lies outside mask_low .. mask_high have
term 0.

    + kl_coefficient r_mu (e^d - 1 - d),  d = log ref - log pi,  r_mu = pi / mu

is the k3 estimate of KL(pi, ref), times the importance ratio because mu drew the tokens; the gradient of its
expectation is that of the divergence (DeepSeek-V3.2 report, section 3.1). The slope of one token is -r_mu d,
in which r_mu is bounded to min(r_mu, dual_clip), for the same reason as above.

    - entropy_coefficient H

is the entropy bonus (Mnih et al. 2016, arXiv 1602.01783, section 4): H is the entropy of pi at the token. Its
gradient is that of the entropy at the prefixes that were sampled, whose own probability counts as constant.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpc_swe.plugins.policies.base import LossConfig, TrainedTokens

LARGEST = 20.0  # log-ratios beyond it are clamped, so that their exponentials stay finite
PER_DECADE, DECADES, LOWEST = 20, 8, -6  # bins of the histogram of |gap|, 12 % wide, from 1e-6 on
BINS = PER_DECADE * DECADES
MEANS = (
    "policy/nll",
    "policy/entropy",
    "policy/surprise_balance",
    "gap/mean",
    "gap/k3",
    "gap/far_share",
    "ratio/mean",
    "ratio/square",
    "ratio/clipped_low",
    "ratio/clipped_high",
    "ratio/clipped_dual",
    "ratio/capped_share",
    "ratio/masked_share",
    "policy/kl",
)
"""Metrics that are means over trained tokens. They are, in this order: -log pi; entropy in nats; -log mu -
entropy, about 0 on new tokens; then with d = log pi - log mu: d; e^d - 1 - d; |d| > 1; e^d; its square; r
below the clip, above it, or over dual_clip, where these stop the gradient; pi_prox / mu over ratio_cap;
outside mask_low .. mask_high; and last the divergence from the reference."""

Term = Callable[[TrainedTokens, LossConfig], Tensor]


class PolicyObjective:
    """Compute one of the objectives above, and the metrics that show whether it can be trusted."""

    def __init__(self, config: LossConfig) -> None:
        self._config = config
        self.needs_reference = config.kl_coefficient > 0
        self.needs_proximal = config.objective == "decoupled"
        self._has_proximal = False

    def __call__(self, tokens: TrainedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss; sums of ones, of MEANS and of the histogram of |log pi - log mu|; its maximum."""
        term = TERMS[self._config.objective](tokens, self._config)
        if self.needs_reference:
            term = term + self._config.kl_coefficient * divergence(tokens, self._config)
        if self._config.entropy_coefficient:
            term = term - self._config.entropy_coefficient * tokens.entropy
        self._has_proximal = tokens.proximal is not None
        with torch.no_grad():
            gap = (tokens.logprobs - tokens.sampler).abs()
            sums = torch.cat((_sums(tokens, self._config), _histogram(gap)))
            largest = torch.cat((gap, gap.new_zeros(1))).amax()[None]
        return (tokens.weights * term).sum(), sums, largest

    def metrics(self, sums: Sequence[float], maxima: Sequence[float]) -> dict[str, float]:
        """Return means over the trained tokens of the step, without those that the objective does not use."""
        count, end = max(sums[0], 1.0), 1 + len(MEANS)
        means = {name: total / count for name, total in zip(MEANS, sums[1:end], strict=True)}
        means["ratio/effective_share"] = means["ratio/mean"] ** 2 / max(means.pop("ratio/square"), 1e-30)
        means["gap/p99"] = _percentile(sums[end:], 0.99)
        means["gap/max"] = maxima[0]
        return {"policy/tokens": sums[0]} | {name: means[name] for name in means if self._applies(name)}

    def _applies(self, name: str) -> bool:
        objective = self._config.objective
        if name == "policy/kl":
            return self.needs_reference
        if name.startswith("ratio/clipped"):
            return objective == "sampler_ratio" or self._has_proximal
        if name in ("ratio/capped_share", "ratio/masked_share"):
            return objective == "decoupled"
        return objective != "sft" or name in ("policy/nll", "policy/entropy")


def sampler_ratio(tokens: TrainedTokens, config: LossConfig) -> Tensor:
    """Return the terms [n] of PPO with the ratio to the sampler."""
    return _clipped(_ratio(tokens.logprobs, tokens.sampler), tokens.advantages, config)


def decoupled(tokens: TrainedTokens, config: LossConfig) -> Tensor:
    """Return the terms [n] of PPO around the weights before the step, corrected by a constant weight."""
    before = _proximal(tokens)
    correction = _ratio(before, tokens.sampler)
    weight = ~_masked(correction, config) * correction.clamp(max=config.ratio_cap)
    return weight * _clipped(_ratio(tokens.logprobs, before), tokens.advantages, config)


def sft(tokens: TrainedTokens, _config: LossConfig) -> Tensor:
    """Return the negative log-likelihoods [n]."""
    return -tokens.logprobs


TERMS: dict[str, Term] = {"sampler_ratio": sampler_ratio, "decoupled": decoupled, "sft": sft}


def divergence(tokens: TrainedTokens, config: LossConfig) -> Tensor:
    """Return k3 estimates [n] of the divergence from the reference, with their slope bounded as above."""
    if tokens.reference is None:
        raise ValueError("the KL needs log-probabilities of the reference, but the policy computed none")
    now = tokens.logprobs.detach()
    difference = (tokens.reference - now).clamp(-LARGEST, LARGEST)
    ratio = _ratio(now, tokens.sampler)
    slope = -ratio.clamp(max=config.dual_clip) * difference
    return ratio * (difference.exp() - 1 - difference) + slope * (tokens.logprobs - now)


def _proximal(tokens: TrainedTokens) -> Tensor:
    return tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal


def _ratio(logprobs: Tensor, base: Tensor) -> Tensor:
    return (logprobs - base).clamp(-LARGEST, LARGEST).exp()


def _clipped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    term = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.where(advantages < 0, torch.minimum(term, -advantages * config.dual_clip), term)


def _masked(correction: Tensor, config: LossConfig) -> Tensor:
    masked = correction < config.mask_low
    return masked | (correction > config.mask_high) if config.mask_high else masked


def _sums(tokens: TrainedTokens, config: LossConfig) -> Tensor:
    """Sum the statistics into float64 [1 + means]; float32 would lose precision over a million tokens."""
    gap = tokens.logprobs - tokens.sampler
    ratio, before = _ratio(tokens.logprobs, tokens.sampler), _proximal(tokens)
    clipped = _ratio(tokens.logprobs, before) if config.objective == "decoupled" else ratio
    correction = _ratio(before, tokens.sampler)
    columns = (
        torch.ones_like(gap),
        -tokens.logprobs,
        tokens.entropy,
        -tokens.sampler - tokens.entropy,
        gap,
        ratio - 1 - gap,
        gap.abs() > 1,
        ratio,
        ratio.square(),
        (tokens.advantages < 0) & (clipped < 1 - config.clip_low),
        (tokens.advantages > 0) & (clipped > 1 + config.clip_high),
        (tokens.advantages < 0) & (clipped > config.dual_clip),
        correction > config.ratio_cap,
        _masked(correction, config),
        torch.zeros_like(gap) if tokens.reference is None else divergence(tokens, config),
    )
    return torch.stack([column.double() for column in columns]).sum(1)


def _histogram(gap: Tensor) -> Tensor:
    bins = ((gap.nan_to_num(1e30).clamp(min=1e-30).log10() - LOWEST) * PER_DECADE).clamp(0, BINS - 1).long()
    ones = torch.ones_like(gap, dtype=torch.float64)
    return ones.new_zeros(BINS).index_add_(0, bins, ones)


def _percentile(counts: Sequence[float], share: float) -> float:
    """Return the upper edge of the bin that contains the percentile."""
    due, seen = share * sum(counts), 0.0
    for index, count in enumerate(counts):
        seen += count
        if count and seen >= due:
            return float(10 ** (LOWEST + (index + 1) / PER_DECADE))
    return 0.0
