"""Clip around the sampler's own probabilities: r = pi / mu, term = ppo(r, A)."""

from hpc_swe.models.policies.base import LossConfig, TrainedTokens
from hpc_swe.roles.learner.objectives.base import TokenObjective, TokenTerms, ppo, ratio_of, stopped


class SamplerRatio(TokenObjective):
    """Compute PPO (Schulman et al. 2017) with the dual clip, token by token."""

    def __call__(self, tokens: TrainedTokens, config: LossConfig) -> TokenTerms:
        ratio = ratio_of(tokens.logprobs, tokens.sampler)
        bounds = (config.clip_low, config.clip_high, config.dual_clip)
        values = ppo(ratio, tokens.advantages, *bounds)
        return TokenTerms(values, stopped(ratio, tokens.advantages, *bounds))
