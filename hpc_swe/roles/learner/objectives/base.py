"""Define what an objective is, and the parts that several objectives share."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hpc_swe.models.policies.base import LossConfig, TrainedTokens

LARGEST = 20.0  # log-ratios beyond it are clamped, so that their exponentials stay finite


class TokenTerms(NamedTuple):
    """Hold what an objective computes of the n trained tokens of a microbatch."""

    values: Tensor
    """[n], differentiable; the loss is the sum of weight times value."""
    means: dict[str, Tensor]
    """Name of a metric -> [n], of which the metric is the mean over the trained tokens of the step. All
    microbatches of a step have the same names."""


class TokenObjective:
    """Serve as the base of every objective."""

    needs_proximal: ClassVar[bool] = False
    """Whether pi_prox, the weights before the batch, matter when a batch has several optimizer steps."""
    is_sampled: ClassVar[bool] = True
    """Whether an engine sampled the tokens, so that the metrics of mu say something."""

    def __call__(self, tokens: TrainedTokens, config: LossConfig) -> TokenTerms:
        """Return the terms of the trained tokens of one microbatch, of which there may be none."""
        raise NotImplementedError


def before_batch(tokens: TrainedTokens) -> Tensor:
    """Return log pi_prox [n] without gradient; where the policy computed none, that is log pi of now."""
    return tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal


def ratio_of(logprobs: Tensor, base: Tensor) -> Tensor:
    """Return the ratios [n] of two probabilities, from their logarithms."""
    return (logprobs - base).clamp(-LARGEST, LARGEST).exp()


def ppo(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float) -> Tensor:
    """Return max(-A r, -A clip(r, 1 - low, 1 + high)), but at most -A dual_clip where A < 0.

    This is eq. 7 of PPO (Schulman et al. 2017). Where A < 0, its maximum has no upper bound: the slope is
    -A r, and r is in the thousands when a router sends a token to other experts here than in the engine. The
    bound is that of dual-clip PPO (Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning", c = 3): from r = dual_clip on, the slope is 0. So the slope of a term over log r
    is never steeper than |A| max(1 + high, dual_clip).
    """
    clipped = ratio.clamp(1 - low, 1 + high)
    term = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.where(advantages < 0, torch.minimum(term, -advantages * dual_clip), term)


def stopped(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float
) -> dict[str, Tensor]:
    """Return, by metric, the tokens [n] whose gradient a bound of `ppo` stops."""
    return {
        "ratio/clipped_low": (advantages < 0) & (ratio < 1 - low),
        "ratio/clipped_high": (advantages > 0) & (ratio > 1 + high),
        "ratio/clipped_dual": (advantages < 0) & (ratio > dual_clip),
    }


def sequence_means(tokens: TrainedTokens, values: Tensor) -> Tensor:
    """Return for each token [n] the mean of `values` [n] over the trained tokens of its sequence.

    Sums are in float64, so that their order does not show. They are the only place where tokens of a
    sequence meet: where these lie on several ranks, sums and counts have to be added over those ranks.
    """
    if tokens.sequence is None:
        raise ValueError("the objective needs the sequence of each token, but the policy gave none")
    sums, counts = (
        values.new_zeros(tokens.sequences, dtype=torch.float64).index_add(0, tokens.sequence, each)
        for each in (values.double(), torch.ones_like(values, dtype=torch.float64))
    )
    return (sums / counts.clamp(min=1))[tokens.sequence].to(values.dtype)
