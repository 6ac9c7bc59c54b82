"""Clip the importance weight instead of the gradient.

    term = -min(pi / mu, ratio_cap) A log pi      where the first factor has no gradient

No token loses its gradient, however far its probability moved: the weight of a token only stops to grow. As
in the experiments of MiniMax-M1 (arXiv 2506.13585, section 3.1) there is no lower bound. The slope of a term
is never steeper than |A| ratio_cap.
"""

from hpc_swe.models.policies.base import LossConfig, TrainedTokens
from hpc_swe.roles.learner.objectives.base import TokenObjective, TokenTerms, ratio_of


class Cispo(TokenObjective):
    """Compute clipped importance sampling policy optimization, token by token."""

    def __call__(self, tokens: TrainedTokens, config: LossConfig) -> TokenTerms:
        ratio = ratio_of(tokens.logprobs.detach(), tokens.sampler)
        values = -ratio.clamp(max=config.ratio_cap) * tokens.advantages * tokens.logprobs
        return TokenTerms(values, {"ratio/capped_share": ratio > config.ratio_cap})
