"""Clip around the weights before the batch, and correct for the sampler by a constant weight.

    r = pi / pi_prox      term = min(pi_prox / mu, ratio_cap) ppo(r, A)

pi_prox is pi before the batch. With one optimizer step per batch that is pi itself without gradient, so r is
1 and never clipped; with more, its log-probabilities are computed before the first of them.
"""

from hpc_swe.models.policies.base import LossConfig, TrainedTokens
from hpc_swe.roles.learner.objectives.base import (
    TokenObjective,
    TokenTerms,
    before_batch,
    ppo,
    ratio_of,
    stopped,
)


class Decoupled(TokenObjective):
    """Compute decoupled PPO (Hilton et al. 2021, arXiv 2110.00641), token by token."""

    needs_proximal = True

    def __call__(self, tokens: TrainedTokens, config: LossConfig) -> TokenTerms:
        before = before_batch(tokens)
        ratio, correction = ratio_of(tokens.logprobs, before), ratio_of(before, tokens.sampler)
        bounds = (config.clip_low, config.clip_high, config.dual_clip)
        values = correction.clamp(max=config.ratio_cap) * ppo(ratio, tokens.advantages, *bounds)
        means = {"ratio/capped_share": correction > config.ratio_cap}
        if tokens.proximal is not None:
            means |= stopped(ratio, tokens.advantages, *bounds)
        return TokenTerms(values, means)
