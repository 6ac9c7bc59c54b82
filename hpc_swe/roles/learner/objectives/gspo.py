"""Clip whole sequences by one ratio each: s = exp(mean of log pi - log mu), term = ppo(s, A).

The mean is over all trained tokens of the sequence, and the gradient goes through it: all trained tokens of a
sequence have the same gradient. A sequence is one sample, that is one chain of turns of an episode. Tokens
without a loss (prompts, tool results, turns that are context only, tokens masked as stale) are in no mean, so
a sequence that they interrupt still has one ratio.

With `batches.aggregate = "seq_mean_token_mean"` and one sample per episode, the sum of a sequence's terms is
that of eq. 5 in Zheng et al. 2025, arXiv 2507.18071. Other aggregations give sequences other weights.
"""

from hpc_swe.models.policies.base import LossConfig, TrainedTokens
from hpc_swe.roles.learner.objectives.base import (
    LARGEST,
    TokenObjective,
    TokenTerms,
    ppo,
    sequence_means,
    stopped,
)


class Gspo(TokenObjective):
    """Compute group sequence policy optimization, with a clip of its own and the dual clip."""

    def __call__(self, tokens: TrainedTokens, config: LossConfig) -> TokenTerms:
        gap = sequence_means(tokens, tokens.logprobs - tokens.sampler)
        ratio = gap.clamp(-LARGEST, LARGEST).exp()
        bounds = (config.sequence_clip_low, config.sequence_clip_high, config.dual_clip)
        means = stopped(ratio, tokens.advantages, *bounds) | {
            "ratio/sequence_mean": ratio,
            "ratio/sequence_spread": gap.abs(),
        }
        return TokenTerms(ppo(ratio, tokens.advantages, *bounds), means)
