"""Leave tokens out of an objective that moves them away from the sampler. The square of `loss` keeps them.

Both masks look at pi of now, and only at what the advantage makes worse: a step that brings pi back to mu
keeps its gradient.

    mask_shift     (pi - mu) sign(A) > mask_shift: the binary mask of DPPO (Qi et al. 2026, arXiv 2602.04879).
                   Differences of probabilities spare rare tokens, and stop likely ones earlier than the
                   ratios of a clip do.
    mask_sequence  A < 0 and mean(log mu - log pi) > mask_sequence, over the trained tokens of a sequence:
                   off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)
"""

from torch import Tensor

from hpc_swe.models.policies.base import LossConfig, TrainedTokens
from hpc_swe.roles.learner.objectives.base import sequence_means


def masks(tokens: TrainedTokens, config: LossConfig) -> dict[str, Tensor]:
    """Return, by metric, the tokens [n] that each mask of the configuration leaves out."""
    now, found = tokens.logprobs.detach(), dict[str, Tensor]()
    if config.mask_shift:
        shift = now.exp() - tokens.sampler.exp()
        found["ratio/shifted_share"] = shift * tokens.advantages.sign() > config.mask_shift
    if config.mask_sequence:
        divergence = sequence_means(tokens, tokens.sampler - now)
        found["ratio/diverged_share"] = (tokens.advantages < 0) & (divergence > config.mask_sequence)
    return found
