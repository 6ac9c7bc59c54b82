"""Learn given conversations: term = -log pi."""

from hpc_swe.models.policies.base import LossConfig, TrainedTokens
from hpc_swe.roles.learner.objectives.base import TokenObjective, TokenTerms


class Sft(TokenObjective):
    """Compute the negative log-likelihoods of tokens that no engine sampled."""

    is_sampled = False

    def __call__(self, tokens: TrainedTokens, config: LossConfig) -> TokenTerms:
        return TokenTerms(-tokens.logprobs, {})
